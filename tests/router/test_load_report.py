"""What a router reads from a worker's report."""

import pytest

from protos.events_pb2 import BlockCounts, LinkReport, LoadReport, StepTimes
from router.load_report import read_load
from router.workers import LinkSpeed, Load, StepCosts


def test_everything_arrives() -> None:
    report = LoadReport(
        num_steps=1,
        num_running=2,
        num_waiting=3,
        num_fetching=4,
        num_queued_tokens=5,
        num_context_tokens=6,
        blocks=[BlockCounts(total=10, free=2, held=5, cached=1, quarantined=2)],
        block_size=16,
        max_sequences=7,
        max_step_tokens=8,
        max_model_len=9,
        step_times=StepTimes(
            base_s=1.0, prompt_token_s=2.0, context_token_s=3.0, sequence_s=4.0, prompt_pair_s=5.0
        ),
        links=[LinkReport(peer_incarnation=9, bytes_per_s=1e9, latency_s=0.25)],
        draining=True,
        unhealthy="stuck",
        still_s=1.5,
        step_s=2.5,
    )
    assert read_load(report, 99.0) == Load(
        at=99.0,
        num_steps=1,
        num_running=2,
        num_waiting=3,
        num_fetching=4,
        num_queued_tokens=5,
        num_context_tokens=6,
        num_free_tokens=3 * 16,
        num_total_tokens=10 * 16,
        max_sequences=7,
        max_step_tokens=8,
        max_model_len=9,
        costs=StepCosts(
            step_s=1.0,
            prompt_token_s=2.0,
            prompt_pair_s=5.0,
            context_token_s=3.0,
            sequence_s=4.0,
        ),
        links={9: LinkSpeed(1e9, 0.25)},
        draining=True,
        unhealthy="stuck",
        still_s=1.5,
        step_s=2.5,
    )


@pytest.mark.parametrize(
    ("whole", "window", "num_free_tokens"),
    [
        (BlockCounts(total=100, free=50, held=50), BlockCounts(total=10, free=10), 800),
        (BlockCounts(total=100, free=50, held=50), BlockCounts(total=10, cached=1, held=9), 160),
    ],
)
def test_the_fullest_group_counts(
    whole: BlockCounts, window: BlockCounts, num_free_tokens: int
) -> None:
    load = read_load(LoadReport(blocks=[whole, window], block_size=16), 0.0)
    assert (load.num_free_tokens, load.num_total_tokens) == (num_free_tokens, 1600)


def test_an_engine_that_never_answered_has_no_room() -> None:
    load = read_load(LoadReport(block_size=16), 0.0)
    assert (load.num_free_tokens, load.num_total_tokens) == (0, 0)
