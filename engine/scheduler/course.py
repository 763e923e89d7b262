"""How prompts were read: where their cache came from, and how long it took."""

from dataclasses import dataclass

from engine.request import PromptTimes


@dataclass(slots=True)
class Counts:
    """Since the last `reset`; the engine's thread writes them, any thread may read them."""

    num_computed: int = 0  # tokens of prompts that were read to their end
    num_cached: int = 0
    num_pulled: int = 0  # from other engines' caches
    num_drawn: int = 0  # tokens

    def reset(self) -> None:
        self.num_computed = self.num_cached = self.num_pulled = self.num_drawn = 0


@dataclass(slots=True)
class PromptCourse:
    """One prompt's, until its end. Times are of the clock that the scheduler is told."""

    arrived_s: float = 0.0
    began_s: float | None = None  # left the queue
    num_cached: int = 0
    num_pulled: int = 0
    elsewhere: PromptTimes = PromptTimes()  # of what was pulled
    whole: bool = False  # all of it was, so nothing is computed here

    def begin(self, now_s: float) -> None:
        if self.began_s is None:
            self.began_s = now_s

    def begin_again(self) -> None:
        """What came to nothing counts as waiting."""
        self.began_s = None

    def times(self, now_s: float) -> PromptTimes:
        """As of now, when it has been read."""
        began_s = now_s if self.began_s is None else self.began_s
        queued_s, prefill_s, transfer_s = self.elsewhere
        if not self.whole:
            prefill_s = max(0.0, now_s - began_s - transfer_s)
        return PromptTimes(max(0.0, began_s - self.arrived_s) + queued_s, prefill_s, transfer_s)

    def count(self, counts: Counts, num_prompt: int) -> None:
        counts.num_cached += self.num_cached
        counts.num_pulled += self.num_pulled
        counts.num_computed += num_prompt - self.num_cached - self.num_pulled
