"""What a worker's requests wait for, as its event loop knows it: no question to the engine."""

from collections import Counter


class UnderWay:
    """Prompts by where they are computed, and the sequences that run.

    A prompt counts in full until its request's first news.
    """

    def __init__(self) -> None:
        self.num_running = 0
        self._num_prompts: Counter[str | None] = Counter()
        self._num_tokens: Counter[str | None] = Counter()

    def begin(self, where: str | None, num_tokens: int, num_choices: int) -> "Share":
        """`where`: the prefill worker's address, None for here."""
        share = Share(self, where, num_tokens, num_choices)
        self._queue(share, 1)
        return share

    def num_queued_tokens(self, where: str | None) -> int:
        return self._num_tokens[where]

    @property
    def num_queued(self) -> int:
        """Prompts that are computed here."""
        return self._num_prompts[None]

    @property
    def num_fetched(self) -> int:
        return self._num_prompts.total() - self.num_queued

    def _queue(self, share: "Share", sign: int) -> None:
        for counter, amount in ((self._num_prompts, 1), (self._num_tokens, share.num_tokens)):
            counter[share.where] += sign * amount
            if not counter[share.where]:
                del counter[share.where]

    def _run(self, share: "Share", sign: int) -> None:
        self.num_running += sign * share.num_choices


class Share:
    """One request's part."""

    def __init__(
        self, total: UnderWay, where: str | None, num_tokens: int, num_choices: int
    ) -> None:
        self.where = where
        self.num_tokens = num_tokens
        self.num_choices = num_choices
        self._total = total
        self._queued, self._ended = True, False

    def run(self) -> None:
        """Its prompt has been read. Idempotent."""
        if self._queued and not self._ended:
            self._queued = False
            self._total._queue(self, -1)
            self._total._run(self, 1)

    def end(self) -> None:
        """Idempotent."""
        if not self._ended:
            self._ended = True
            leave = self._total._queue if self._queued else self._total._run
            leave(self, -1)
