"""A request on its way through the cluster, and what is written down of it."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from benchmarks.simulate.traffic import Request

if TYPE_CHECKING:
    from benchmarks.simulate.decode import DecodeWorker


class Owner(Protocol):
    """Who is told what became of a request."""

    def began(self, flight: "Flight") -> None: ...
    def ended(self, flight: "Flight") -> None: ...


@dataclass(slots=True, eq=False)
class Flight:
    """Times are the clock's.

    `num_sent` tokens of the answer have reached the client from workers that died since; the
    worker that has the request now knows of the others.
    """

    request: Request
    owner: Owner
    num_sent: int = 0
    num_attempts: int = 0
    worker: "DecodeWorker | None" = None
    first_at: float | None = None
    end_at: float | None = None
    refused: bool = False
    num_computed: int = 0  # prompt tokens, those of dead workers among them
    num_own_cached: int = 0  # prompt tokens that were in the cache of whoever computed the rest
    num_fetched: int = 0  # prompt tokens that another worker had
    num_prefill_workers: int = 0  # that were asked
    num_begun: int = 0  # computations of its prompt
    num_preemptions: int = 0

    @property
    def request_id(self) -> str:
        return str(self.request.number)

    @property
    def num_prompt(self) -> int:
        """Of the prompt as the next worker sees it: with what the client has of the answer."""
        return self.request.num_tokens + self.num_sent

    @property
    def num_left(self) -> int:
        return self.request.num_output - self.num_sent
