"""One choice's tokens to the text that its reader may see, up to a stop string."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from engine.text.decoding import decoder_of
from engine.text.pieces import Pieces
from engine.text.stops import StopMatcher


@dataclass(frozen=True, slots=True)
class TextOptions:
    """What a request asks of its text; `min_tokens` must pass before a stop string counts."""

    stop: tuple[str, ...] = ()
    include_stop_str_in_output: bool = False
    min_tokens: int = 0
    track_offsets: bool = False


class TextDelta(NamedTuple):
    """`num_tokens` are the tokens used: fewer than pushed where a stop string ended the text."""

    text: str
    num_tokens: int
    stop: str | None = None


class Detokenizer:
    """Turns tokens into text as they come, O(1) each; single use.

    Characters are never split, and text that may be the beginning of a stop string is held
    back until it is known not to be. `context` are the tokens that the text goes on from.
    """

    def __init__(
        self, pieces: Pieces, context: Sequence[int] = (), options: TextOptions | None = None
    ) -> None:
        options = options or TextOptions()
        self._decoder = decoder_of(pieces, context)
        self._stops = StopMatcher(options.stop, include_stop=options.include_stop_str_in_output)
        self._min_tokens = options.min_tokens
        self._one_by_one = bool(options.stop) or options.track_offsets
        self._num_tokens = 0
        self._num_chars = 0
        self.offsets: list[int] | None = [] if options.track_offsets else None
        """Where each token's text begins, in the characters of the whole text (with those that
        a stop string cut off). Tokens that share a character begin at it."""

    def push(self, token_ids: Sequence[int]) -> TextDelta:
        if not self._one_by_one:
            return TextDelta(self._decoder.push(token_ids), len(token_ids))
        parts: list[str] = []
        for num_used, token_id in enumerate(token_ids, 1):
            text = self._decoder.push((token_id,))
            self._num_tokens += 1
            if self.offsets is not None:
                self.offsets.append(self._num_chars)
                self._num_chars += len(text)
            shown, stop = self._stops.push(text, may_stop=self._num_tokens > self._min_tokens)
            parts.append(shown)
            if stop is not None:
                return TextDelta("".join(parts), num_used, stop)
        return TextDelta("".join(parts), len(token_ids))

    def pass_over(self) -> None:
        """A token that belongs to the answer but not to its text."""
        if self.offsets is not None:
            self.offsets.append(self._num_chars)

    def last_offsets(self, num_tokens: int) -> list[int]:
        """Of the newest tokens; offsets must be tracked."""
        assert self.offsets is not None
        return self.offsets[len(self.offsets) - num_tokens :]

    def finish(self) -> TextDelta:
        """The rest of the text, when the tokens have ended without a stop string."""
        rest = self._decoder.finish()
        shown, stop = self._stops.push(rest, may_stop=self._num_tokens > self._min_tokens)
        if stop is None:
            shown += self._stops.finish()
        return TextDelta(shown, 0, stop)
