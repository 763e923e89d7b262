"""What is unsent is counted, whatever it is, until it is taken or not wanted any more."""

from decode_worker.outbox import Outbox
from engine.errors import RequestError, StepError
from engine.request import ChoiceDelta, GenerationUpdate, RequestId
from protos.limits import PART_BYTES

A, B = RequestId("a"), RequestId("\u1234" * 256)
UPDATE = GenerationUpdate([ChoiceDelta(0, list(range(100)))])


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
