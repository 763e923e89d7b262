"""Two schedulers with fake runners: one reads prompts, the other answers; reads take their time."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from engine.errors import StepError
from engine.handoff import (
    ComputeHere,
    Delivered,
    FetchFailed,
    FetchOutcome,
    PromptChunk,
    PromptEnd,
    Refetch,
    Reservation,
    UnfinishedReads,
)
from engine.request import HandOver, RemotePrefix, RequestId
from engine.scheduler.outbox import StepOutput
from engine.step import TokenLogprobs
from kv_cache.transfers import TransferHold
from tests.engine.scheduler.fake_runner import TOLD
from tests.engine.scheduler.prefixes import PrefixPlan, PrefixTransfer
from tests.engine.scheduler.test_scheduler import BLOCK, Bench

OUTCOMES: dict[str, FetchOutcome] = {
    "refetch": Refetch(),
    "here": ComputeHere(),
    "failed": FetchFailed(StepError(TOLD)),
}


@dataclass(frozen=True)
class Plan:
    """What becomes of one reservation."""

    ends_with: str = "delivered"  # or "refetch", "here", "failed"
    after: int = 0  # ticks, for those that are not delivered
    stuck: int = 0  # blocks whose read does not end, of those
    delay: int = 0  # ticks between a chunk and its read
    draw: bool = True
    prefix: int = 0  # blocks of the prompt that the prefill side may have from elsewhere


@dataclass
class Transfer:
    reservation: Reservation
    plan: Plan
    name: str  # of the request at the prefill side
    age: int = 0
    due: list[tuple[int, PromptChunk]] = field(default_factory=list)  # read at that age
    chunks: list[PromptChunk] = field(default_factory=list)
    end: PromptEnd | None = None
    failed: bool = False


class BenchPair:
    def __init__(
        self,
        prefill: Bench,
        decode: Bench,
        plans: Sequence[Plan],
        prefix_plans: Sequence[PrefixPlan] = (),
    ) -> None:
        self.prefill = prefill
        self.decode = decode
        self.plans = list(plans)
        self.prefix_plans = list(prefix_plans)
        self.prefixes: list[tuple[Bench, PrefixTransfer]] = []
        self.transfers: list[Transfer] = []
        self.stuck: list[tuple[int, TransferHold]] = []  # until that tick
        self.num_fetches: dict[str, int] = {}
        self.ticks = 0

    @property
    def is_busy(self) -> bool:
        benches = (self.prefill, self.decode)
        moving = bool(self.transfers or self.stuck or self.prefixes)
        return moving or any(b.has_work for b in benches)

    def tick(self) -> None:
        self.ticks += 1
        self.scribble()
        computed = [bench.step() for bench in (self.prefill, self.decode)]
        self.begin_prefixes(self.prefill, computed[0])
        self.begin_prefixes(self.decode, computed[1])
        self.begin(computed[1])
        self.receive(computed[0])
        self.go_on_with_prefixes()
        for transfer in list(self.transfers):
            self.go_on(transfer)
        for until, hold in list(self.stuck):
            if self.ticks >= until:
                self.stuck.remove((until, hold))
                self.decode.cache.transfers.end_quarantine(hold)
        self.check()

    def begin_prefixes(self, bench: Bench, output: StepOutput | None) -> None:
        for reservation in output.reservations if output else ():
            self.check_reservation(bench, reservation)
            if reservation.of_prefix:
                plan = self.prefix_plans.pop(0) if self.prefix_plans else PrefixPlan()
                self.prefixes.append((bench, PrefixTransfer(reservation, plan, bench.runner)))

    def go_on_with_prefixes(self) -> None:
        for bench, transfer in list(self.prefixes):
            outcome = transfer.go_on()
            if outcome is not None:
                self.prefixes.remove((bench, transfer))
                output, _ = bench.scheduler.end_fetch(transfer.reservation, outcome)
                bench.take(output)
                if bench is self.prefill:
                    self.receive(output)

    def begin(self, output: StepOutput | None) -> None:
        for reservation in output.reservations if output else ():
            if reservation.of_prefix:
                continue
            plan = self.plans.pop(0) if self.plans else Plan()
            name = f"fetch-{reservation.attempt}"
            self.transfers.append(Transfer(reservation, plan, name))
            request = reservation.request_id
            self.num_fetches[request] = self.num_fetches.get(request, 0) + 1
            self.prefill.add(
                name,
                list(reservation.token_ids),
                hand_over=HandOver(reservation.held.start, plan.draw and reservation.draw),
                prefix=prefix_of(list(reservation.token_ids), plan.prefix),
                n=reservation.params.n,
                prompt_logprobs=reservation.params.prompt_logprobs,
            )

    def check_reservation(self, bench: Bench, reservation: Reservation) -> None:
        """Nobody can find the blocks that are to be filled."""
        for run in reservation.held.runs:
            labels = bench.cache._pools[run.group].labels
            assert not any(labels[block] for block in run.blocks)

    def receive(self, output: StepOutput | None) -> None:
        for transfer in self.transfers:
            request_id = RequestId(transfer.name)
            for news in output.hand_overs.get(request_id, ()) if output else ():
                if isinstance(news, PromptEnd):
                    transfer.end = news
                    continue
                before = transfer.chunks[-1].held.end if transfer.chunks else None
                assert news.held.start == (before or transfer.reservation.held.start)
                transfer.chunks.append(news)
                transfer.due.append((transfer.age + transfer.plan.delay, news))
            if output and request_id in output.failures:
                transfer.failed = True

    def go_on(self, transfer: Transfer) -> None:
        while transfer.due and transfer.due[0][0] <= transfer.age:
            self.read(transfer, transfer.due.pop(0)[1])
        transfer.age += 1
        plan = transfer.plan
        if transfer.failed:
            self.finish(transfer, "here" if self.num_fetches_of(transfer) > 2 else "refetch")
        elif plan.ends_with != "delivered" and transfer.age > plan.after:
            self.finish(transfer, plan.ends_with)
        elif transfer.end is not None and not transfer.due:
            self.finish(transfer, "delivered")

    def num_fetches_of(self, transfer: Transfer) -> int:
        return self.num_fetches[transfer.reservation.request_id]

    def read(self, transfer: Transfer, chunk: PromptChunk) -> None:
        places = {
            (run.group, run.first_entry + i): block
            for run in transfer.reservation.held.runs
            for i, block in enumerate(run.blocks)
        }
        for run in chunk.held.runs:
            for i, block in enumerate(run.blocks):
                cell = self.prefill.runner.cells[run.group, block]
                place = places.pop((run.group, run.first_entry + i))
                self.decode.runner.cells[run.group, place] = list(cell)

    def finish(self, transfer: Transfer, how: str) -> None:
        self.transfers.remove(transfer)
        self.prefill.scheduler.abort(RequestId(transfer.name))
        for chunk in transfer.chunks:
            for hold in chunk.held.holds:
                self.prefill.cache.transfers.drop(hold)
        reservation = transfer.reservation
        unfinished: list[UnfinishedReads] = []
        outcome: FetchOutcome
        if how == "delivered":
            assert transfer.end is not None
            entries: list[TokenLogprobs] = []
            for chunk in transfer.chunks:
                entries += chunk.prompt_logprobs
            num_cached = transfer.end.num_cached_tokens
            outcome = Delivered(transfer.end.first_tokens, entries, num_cached_tokens=num_cached)
        else:
            outcome = OUTCOMES[how]
            for run in reservation.held.runs:
                blocks = run.blocks[: transfer.plan.stuck]
                unfinished += [UnfinishedReads(run.group, blocks)] if blocks else []
        output, stuck = self.decode.scheduler.end_fetch(reservation, outcome, unfinished)
        assert [(h.group, h.blocks) for h in stuck] == [tuple(reads) for reads in unfinished]
        self.stuck += [(self.ticks + 5, hold) for hold in stuck]
        self.decode.take(output)

    def scribble(self) -> None:
        """Whoever sees a block that is not confirmed, or taken too soon, sees nonsense."""
        holds = [hold for _, hold in self.stuck]
        for hold in holds:
            self.write_nonsense(hold.group, hold.blocks)
        for transfer in self.transfers:
            if not transfer.chunks:
                for run in transfer.reservation.held.runs:
                    self.write_nonsense(run.group, run.blocks)

    def write_nonsense(self, group: int, blocks: Sequence[int]) -> None:
        for block in blocks:
            self.decode.runner.cells[group, block] = [-1] * BLOCK

    def check(self) -> None:
        for bench in (self.prefill, self.decode):
            bench.scheduler.check_integrity()
            bench.check_flight()

    def check_idle(self) -> None:
        for bench in (self.prefill, self.decode):
            stats = bench.cache.stats()
            assert all(group.held == group.quarantined == 0 for group in stats.groups)
            assert bench.cache.transfers.num_active == 0
            assert bench.scheduler.stats().num_swapped_blocks == 0


def prefix_of(prompt: list[int], num_blocks: int, above: int = 0) -> RemotePrefix | None:
    num_tokens = min(num_blocks, len(prompt) // BLOCK) * BLOCK
    return RemotePrefix(num_tokens, above) if num_tokens else None
