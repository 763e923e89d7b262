from prefill_worker.reporting import ANSWER_S
from protos.judging import SILENT_AFTER_S
from router.subscriber import PERIOD_MS


def test_a_worker_that_is_at_a_long_step_is_not_taken_for_silent() -> None:
    """Between two reports it may ask its engine for events, for a snapshot and for its load."""
    assert PERIOD_MS / 1000 + 3 * ANSWER_S < SILENT_AFTER_S - PERIOD_MS / 2000
