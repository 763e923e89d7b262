"""The prompts that one worker has to compute, in seconds of its time. Pure."""

from typing import NamedTuple


class Prompt(NamedTuple):
    num_tokens: int  # to be computed
    seconds: float


class PromptQueue:
    """The prompts that wait for their computing at one worker, in seconds of its time.

    The first of ours that is left is taken to be in progress since the one before it was done.
    """

    def __init__(self) -> None:
        self._own: dict[str, Prompt] = {}
        self._own_s = 0.0
        self._own_tokens = 0
        self._first_s = 0.0
        self._since = 0.0
        self._backlog_s = 0.0  # as the last report had it, with what we gave after it
        self._at = 0.0

    def __len__(self) -> int:
        return len(self._own)

    @property
    def num_tokens(self) -> int:
        return self._own_tokens

    def give(self, request_id: str, prompt: Prompt, now: float) -> None:
        self._backlog_s = max(0.0, self._backlog_s - (now - self._at)) + prompt.seconds
        self._at = now
        self._own[request_id] = prompt
        self._own_s += prompt.seconds
        self._own_tokens += prompt.num_tokens
        if len(self._own) == 1:
            self._first_s = prompt.seconds
            self._since = now

    def release(self, request_id: str, now: float) -> None:
        """It is computed, or need not be."""
        prompt = self._own.pop(request_id, None)
        if prompt is None:
            return
        before_s = self._own_left_s(now)
        self._own_tokens -= prompt.num_tokens
        first = next(iter(self._own.values()), None)
        # A sum of floats that were added and taken away again is not zero of itself.
        self._own_s = self._own_s - prompt.seconds if first else 0.0
        self._first_s = first.seconds if first else 0.0
        self._since = now
        # What it was expected to take yet, it does not.
        self._backlog_s -= max(0.0, before_s - self._own_s)

    def report(self, num_tokens: int, token_s: float, now: float) -> None:
        """What the worker counts beyond ours is others'; ours are known better."""
        own_s = self._own_left_s(now)
        if self._own_s > 0:
            token_s = self._own_s / self._own_tokens
            num_tokens -= round(self._own_tokens * own_s / self._own_s)
        self._backlog_s = own_s + max(0, num_tokens) * token_s
        self._at = now

    def left_s(self, now: float) -> float:
        backlog_s = self._backlog_s - (now - self._at)
        if not self._own:
            return backlog_s if backlog_s > 0.0 else 0.0
        own_s = self._own_left_s(now)
        return backlog_s if backlog_s > own_s else own_s

    def _own_left_s(self, now: float) -> float:
        done_s = now - self._since
        return self._own_s - (done_s if done_s < self._first_s else self._first_s)
