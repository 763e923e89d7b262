"""One answer in the making on a decode worker."""

from collections.abc import Sequence as Several
from dataclasses import dataclass
from enum import Enum, auto

from benchmarks.simulate.flight import Flight
from benchmarks.simulate.prefill import Job
from benchmarks.simulate.worker import SimulatedWorker
from kv_cache.names import BlockName
from kv_cache.sequence import SequenceBlocks


class Stage(Enum):
    WAITING = auto()  # for room, or for its turn to be computed here
    FETCHED = auto()  # a prefill worker has its prompt
    COMPUTED = auto()  # here, chunk by chunk
    RUNNING = auto()
    ENDED = auto()


@dataclass(slots=True, eq=False)
class Sequence:
    """`num_prompt` tokens come before the next one, those of the answer that are known already
    among them; `num_left` are to come after it began to run, the first of them included."""

    flight: Flight
    names: Several[BlockName]
    num_prompt: int
    num_left: int
    candidates: list[SimulatedWorker]  # prefill workers, the next one to ask first
    holder: SimulatedWorker | None  # of a prefix, beyond what the workers have themselves
    stage: Stage = Stage.WAITING
    blocks: SequenceBlocks | None = None
    job: Job | None = None
    prefiller: SimulatedWorker | None = None
    num_computed: int = 0
    num_fetched: int = 0
    joined_step: int = 0  # the worker's number of decode steps then
    turn: int = 0  # of running; what was planned in an earlier one does not count

    def num_generated(self, num_steps: int, num_more: int) -> int:
        """Since it began to run, after so many of the worker's decode steps, and the ones of the
        span under way: who joins after it has none of them."""
        if self.stage is not Stage.RUNNING:
            return 0
        return 1 + num_steps + num_more - self.joined_step if self.turn else 1

    @property
    def num_uncomputed(self) -> int:
        return self.num_prompt - self.num_computed
