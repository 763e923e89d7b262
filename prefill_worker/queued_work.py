"""What is still to be computed of other workers' prompts. Pure."""

from dataclasses import dataclass, field

from engine.step_times import StepShape, num_pairs


@dataclass(slots=True)
class QueuedWork:
    """Counts every prompt from its arrival to its end, and its tokens until they are computed."""

    num_tokens: int = 0
    _num_pairs: float = 0.0
    _lengths: list[int] = field(default_factory=list)

    def add(self, length: int) -> None:
        self._lengths.append(length)
        self.num_tokens += length
        self._num_pairs += num_pairs(0, length)

    def computed(self, start: int, end: int) -> None:
        """Tokens of one prompt."""
        self.num_tokens -= end - start
        self._num_pairs -= num_pairs(start, end)

    def ended(self, length: int) -> None:
        self._lengths.remove(length)

    def as_one_step(self) -> StepShape:
        return StepShape(self.num_tokens, 0, 1, self._num_pairs)

    def longest_step(self, chunk_tokens: int) -> StepShape:
        """The last chunk of the longest prompt."""
        end = max(self._lengths, default=0)
        end = max(end, chunk_tokens)
        return StepShape(chunk_tokens, 0, 1, num_pairs(end - chunk_tokens, end))
