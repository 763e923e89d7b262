"""What a client has of its answer, for whoever goes on with it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

from engine.request import ChoiceSoFar, GenerationRequest, GenerationUpdate


@dataclass(slots=True)
class Sent:
    """What the client has of each choice."""

    token_ids: list[list[int]]
    finished: list[bool]

    @classmethod
    def of(cls, request: GenerationRequest) -> Self:
        before = request.sent or [ChoiceSoFar([])] * request.params.n
        return cls([list(one.token_ids) for one in before], [one.finished for one in before])

    @property
    def is_whole(self) -> bool:
        return all(self.finished)

    @property
    def num_left(self) -> int:
        return self.finished.count(False)

    @property
    def most_tokens(self) -> int:
        return max(map(len, self.token_ids), default=0)

    @property
    def num_tokens(self) -> int:
        return sum(map(len, self.token_ids))

    def add(self, update: GenerationUpdate) -> list[int]:
        """How long the choices are that it ends."""
        ended: list[int] = []
        for delta in update.deltas:
            self.token_ids[delta.choice] += delta.token_ids
            if delta.finish_reason is not None:
                self.finished[delta.choice] = True
                ended.append(len(self.token_ids[delta.choice]))
        return ended

    def so_far(self) -> tuple[ChoiceSoFar, ...]:
        """Nothing where nothing has begun: such a request is like a new one."""
        if not any(self.finished) and not any(self.token_ids):
            return ()
        pairs = zip(self.token_ids, self.finished, strict=True)
        return tuple(ChoiceSoFar(list(tokens), finished) for tokens, finished in pairs)
