"""What a holder has promised on one stream, from the ask to the stream's end."""

from enum import Enum, auto
from typing import NamedTuple

from kv_cache.handover import HeldRange
from kv_cache.transfers import TransferHold


class LeaseState(Enum):
    """
    ask ---> OPEN ---- the last range and the first tokens are out ----> OFFERED
              |                                                            | commit
              |                                                            v
              |                                                        COMMITTED
              +---------- the stream ends, for whatever reason ----------> | ---> ENDED

    A puller that has read the last range may say so before the first tokens are out; its commit
    counts once they are. Until ENDED the holds of every range that went out belong to the lease;
    nobody else lets go of them. ENDED holds nothing.
    """

    OPEN = auto()
    OFFERED = auto()
    COMMITTED = auto()
    ENDED = auto()


class HeldVerdict(NamedTuple):
    """The answer to a commit; `reason` says why not."""

    held: bool
    reason: str = ""


class Lease:
    """Knows which tokens were announced and who holds their blocks; pure.

    Ranges follow each other without a gap. What is taken from it by `release_early` is gone
    for the puller too: no commit succeeds any more.
    """

    def __init__(self, first_token: int, end: int) -> None:
        """`end` of the prompt."""
        self.state = LeaseState.OPEN
        self.announced_to = first_token
        self._end = end
        self._holds: list[TransferHold] = []
        self._broken = ""

    def announce(self, held: HeldRange) -> None:
        assert self.state is LeaseState.OPEN, f"announced while {self.state.name}"
        assert held.start == self.announced_to, "ranges follow each other"
        self.announced_to = held.end
        self._holds += held.holds

    @property
    def complete(self) -> bool:
        """All blocks are out, so a puller may have read them all."""
        return self.state is LeaseState.OFFERED or self.announced_to == self._end

    def offer(self) -> None:
        """Everything is out; the puller may commit."""
        assert self.state is LeaseState.OPEN
        self.state = LeaseState.OFFERED

    def commit(self) -> HeldVerdict:
        """Whether every announced block was held from its announcement until now."""
        if self._broken:
            return HeldVerdict(False, self._broken)
        if self.state is not LeaseState.OFFERED:
            return HeldVerdict(False, f"a commit while the lease is {self.state.name}")
        self.state = LeaseState.COMMITTED
        return HeldVerdict(True)

    def release_early(self, reason: str) -> list[TransferHold]:
        """The holds, before the stream's end; the lease remembers that it was broken."""
        self._broken = reason
        return self._take()

    def end(self) -> list[TransferHold]:
        """The stream has ended: what is to be let go of, once."""
        self.state = LeaseState.ENDED
        return self._take()

    def _take(self) -> list[TransferHold]:
        holds, self._holds = self._holds, []
        return holds
