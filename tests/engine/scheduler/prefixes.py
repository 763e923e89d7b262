"""Reservations of a prefix, filled as a source would that has it, or a part of it."""

from dataclasses import dataclass

from engine.handoff import ComputeHere, Delivered, FetchOutcome, Refetch, Reservation
from tests.engine.scheduler.fake_runner import FakeRunner, digest


@dataclass(frozen=True)
class PrefixPlan:
    """What becomes of the reservation of a prefix."""

    ends_with: str = "delivered"  # or "here", "refetch"
    after: int = 0  # ticks
    short: int = 0  # blocks that the source lacks at the end, of those that were reserved


@dataclass
class PrefixTransfer:
    reservation: Reservation
    plan: PrefixPlan
    runner: FakeRunner
    age: int = 0

    def go_on(self) -> FetchOutcome | None:
        """None before its time has come; until then, whoever looks sees nonsense."""
        for run in self.reservation.held.runs:
            for block in run.blocks:
                self.runner.cells[run.group, block] = [-1] * self.runner.block_size
        self.age += 1
        if self.age <= self.plan.after:
            return None
        match self.plan.ends_with:
            case "here":
                return ComputeHere()
            case "refetch":
                return Refetch()
        held, size = self.reservation.held, self.runner.block_size
        end = max(held.start, held.end - self.plan.short * size)
        fill(self.runner, self.reservation, end)
        return Delivered(end=end)


def fill(runner: FakeRunner, reservation: Reservation, end: int) -> None:
    """The tokens before `end` arrive, those from there on do not."""
    tokens, size = list(reservation.token_ids), runner.block_size
    for group, first_entry, blocks in reservation.held.runs:
        for entry, block in enumerate(blocks, first_entry):
            if (entry + 1) * size <= end:
                positions = range(entry * size + 1, (entry + 1) * size + 1)
                runner.cells[group, block] = [digest(tokens[:n]) for n in positions]
