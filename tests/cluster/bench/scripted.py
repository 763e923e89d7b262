"""A server and a clock that move in step: time passes only where the server's script says so."""

from collections.abc import Iterator, Sequence

from cluster.bench.answer import Tally
from engine.request import FinishReason, GenerationRequest, GenerationUpdate
from tests.cluster.fakes import Script, Step, delta, prompt_report, small_tokenizer
from tests.waiting import until


class HandClock:
    """Moved by hand, by whoever makes others wait."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def in_step(
    clock: HandClock, tally: Tally, delays_s: Sequence[float], tokens_per_piece: int = 1
) -> Script:
    """Before each piece time passes; the next one waits until the client has this one."""

    def script(request: GenerationRequest) -> Iterator[Step]:
        ids = small_tokenizer().encode("a b c d e f g h i j k l m n o p q r s t u v w x y z")
        seen = tally.num_chunks
        for number, delay_s in enumerate(delays_s):
            clock.now += delay_s
            first = number * tokens_per_piece
            finish = FinishReason.LENGTH if number == len(delays_s) - 1 else None
            piece = delta(request, 0, ids[first : first + tokens_per_piece], finish)
            yield GenerationUpdate([piece], None if number else prompt_report(request))
            told = seen + number + 1
            yield until(lambda told=told: tally.num_chunks >= told)  # type: ignore[misc]

    return script
