"""What is believed of what a holder says beside the blocks."""

import math
from dataclasses import replace

import pytest

from engine.handoff import Reservation
from engine.request import RequestId
from engine.sampling import SamplingParams
from kv_cache.handover import HeldRange
from kv_transfer.errors import TransferError
from kv_transfer.puller import Pulled
from prefill_worker.asks import read_prompt
from protos.generation_pb2 import TokenLogprobs
from protos.handoff_pb2 import FirstToken

VOCAB = 10
RESERVATION = Reservation(
    RequestId("r"),
    1,
    [1, 2, 3],
    HeldRange(0, 3, (), ()),
    SamplingParams(logprobs=1, prompt_logprobs=1),
    draw=True,
)
GOOD = TokenLogprobs(token_id=9, top_token_ids=[9], top_logprobs=[-0.1])
ALIEN = TokenLogprobs(token_id=9, top_token_ids=[10], top_logprobs=[-0.1])
TWO = TokenLogprobs(token_id=9, top_token_ids=[9, 8], top_logprobs=[-0.1, -3.0])
NO_NUMBER = TokenLogprobs(token_id=9, logprob=math.nan)
CERTAIN_AND_MORE = TokenLogprobs(token_id=9, top_token_ids=[9], top_logprobs=[1.0])
NEVER = TokenLogprobs(token_id=9, logprob=-math.inf)
MANY = TokenLogprobs(token_id=9, top_token_ids=[1] * 30, top_logprobs=[0.0] * 30)


def pulled(token_id: int, logprobs: TokenLogprobs | None, prompt: TokenLogprobs) -> Pulled:
    return Pulled(3, [FirstToken(token_id=token_id, logprobs=logprobs)], [prompt] * 2, 0)


def test_an_answer_is_read() -> None:
    delivered = read_prompt(pulled(9, GOOD, NEVER), RESERVATION, VOCAB)
    assert [token.token_id for token in delivered.first_tokens] == [9]
    assert len(delivered.prompt_logprobs) == 2


@pytest.mark.parametrize(
    "answer",
    [
        pulled(10, GOOD, GOOD),
        pulled(9, ALIEN, GOOD),
        pulled(9, GOOD, ALIEN),
        pulled(8, GOOD, GOOD),
        pulled(9, TWO, GOOD),
        pulled(9, MANY, GOOD),
        pulled(9, GOOD, MANY),
        pulled(9, None, GOOD),
        pulled(9, NO_NUMBER, GOOD),
        pulled(9, GOOD, CERTAIN_AND_MORE),
    ],
)
def test_what_cannot_be_is_the_holders_failure(answer: Pulled) -> None:
    """Another holder is asked then; the request does not fail for it."""
    with pytest.raises(TransferError, match="makes no sense"):
        read_prompt(answer, RESERVATION, VOCAB)


def test_logprobs_that_nobody_asked_for_are_the_holders_failure() -> None:
    unasked = replace(RESERVATION, params=SamplingParams(prompt_logprobs=1))
    with pytest.raises(TransferError, match="makes no sense"):
        read_prompt(pulled(9, GOOD, GOOD), unasked, VOCAB)


@pytest.mark.parametrize(
    ("answer", "match"),
    [
        (Pulled(3, [FirstToken(token_id=9, logprobs=GOOD)] * 2, [GOOD] * 2, 0), "2 first tokens"),
        (Pulled(3, [FirstToken(token_id=9, logprobs=GOOD)], [GOOD], 0), "1 prompt logprobs"),
        (Pulled(3, [FirstToken(token_id=9, logprobs=GOOD)], [GOOD] * 2, 4), "4 tokens of the"),
    ],
)
def test_more_or_less_than_was_asked_for_is_the_holders_failure(answer: Pulled, match: str) -> None:
    with pytest.raises(TransferError, match=match):
        read_prompt(answer, RESERVATION, VOCAB)
