"""What is unsent is counted, whatever it is, until it is taken or not wanted any more."""

from itertools import chain

from decode_worker.outbox import Outbox
from engine.errors import RequestError, StepError
from engine.request import ChoiceDelta, GenerationUpdate, PromptReport, RequestId
from engine.step import TokenLogprobs
from protos.limits import PART_BYTES

A, B, C = RequestId("a"), RequestId("\u1234" * 256), RequestId("c")
UPDATE = GenerationUpdate([ChoiceDelta(0, list(range(100)))])


def long_report() -> PromptReport:
    """In several messages."""
    top = tuple((100_000 + i, -float(i)) for i in range(20))
    return PromptReport(7, [None, *(TokenLogprobs(i, -1.5, 3, top) for i in range(1, 20_000))])


def test_no_less_is_counted_than_its_messages_take() -> None:
    errors = (RequestError("n" * 2000, "x" * 5000), StepError("\U0001f600" * 3000), StepError(""))
    for request_id in (A, B):
        for error in errors:
            outbox = Outbox()
            outbox.add(request_id, UPDATE)
            outbox.fail(request_id, error)
            counted = outbox.num_bytes
            steps = outbox.take()
            assert sum(step.ByteSize() for step in steps) <= counted + 2 * len(B.encode())
            assert counted < 20_000
            assert all(step.ByteSize() <= PART_BYTES for step in steps)
            assert outbox.num_bytes == 0


def test_what_is_discarded_does_not_count() -> None:
    outbox = Outbox()
    outbox.add(A, UPDATE)
    before = outbox.num_bytes
    outbox.add(B, UPDATE)
    outbox.fail(B, StepError("no more memory"))
    assert outbox.num_bytes > before
    outbox.discard(B)
    assert outbox.num_bytes == before
    outbox.fail(A, StepError("no more memory"))
    outbox.discard(A)
    outbox.discard(A)
    assert outbox.num_bytes == 0


def test_a_long_report_is_made_message_by_message_and_comes_before_what_is_newer() -> None:
    """A report of a whole prompt takes seconds to make: others have their turns in between."""
    outbox = Outbox()
    outbox.add(A, GenerationUpdate([ChoiceDelta(0, [1])], long_report()))
    (first,) = outbox.take()
    assert first.ByteSize() <= PART_BYTES
    assert not first.requests[0].prompt.complete
    outbox.add(B, GenerationUpdate([ChoiceDelta(0, [2])], PromptReport(0)))
    outbox.add(A, GenerationUpdate([ChoiceDelta(0, [3])]))
    rest = list(chain.from_iterable(iter(outbox.take_pressing, [])))
    *report, end, of_b = [news for step in rest for news in step.requests]
    assert {news.request_id for news in (*report, end)} == {A}
    assert list(end.deltas[0].token_ids) == [1]
    assert of_b.request_id == B
    (last,) = outbox.take()
    assert last.requests[0].deltas[0].token_ids == [3]
    assert outbox.take() == []


def test_the_rest_of_a_long_report_that_is_discarded_does_not_come() -> None:
    """Nor what waited behind it; but all that is others', or comes under the same id later."""
    outbox = Outbox()
    for request_id in (A, B, C):
        outbox.add(request_id, GenerationUpdate([ChoiceDelta(0, [1])], long_report()))
    outbox.take()
    outbox.discard(A)
    outbox.discard(C)
    outbox.add(A, GenerationUpdate([ChoiceDelta(0, [2])]))
    rest = list(chain.from_iterable(iter(outbox.take, [])))
    *of_b, last = [news for step in rest for news in step.requests]
    assert {news.request_id for news in of_b} == {B}
    assert of_b[-1].deltas
    assert (last.request_id, list(last.deltas[0].token_ids)) == (A, [2])
