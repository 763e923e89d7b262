"""Who gets the next request while there is nothing better to go by."""

import pytest

from router.least_loaded import for_decode, for_prefill
from router.workers import SILENT_AFTER_S, Load, Standing, Worker

NOW = 100.0


def standing(
    name: str,
    load: Load | None = None,
    fingerprint: str = "f",
    num_given: int = 0,
    num_given_tokens: int = 0,
    leaving: bool = False,
) -> Standing:
    worker = Worker(name, 1, fingerprint)
    return Standing(worker, load or Load(NOW), num_given, num_given_tokens, leaving)


def names(standings: list[Standing]) -> list[str]:
    return [one.worker.address for one in standings]


def test_the_fewest_sequences_come_first() -> None:
    busy, idle = standing("busy", Load(NOW, num_sequences=3)), standing("idle")
    assert names(for_decode([busy, idle], NOW)) == ["idle", "busy"]


def test_what_was_given_counts_before_the_worker_says_so() -> None:
    """A burst between two reports does not all go to one worker."""
    given, idle = standing("given", num_given=1), standing("idle")
    assert names(for_decode([given, idle], NOW)) == ["idle", "given"]
    tokens = standing("tokens", num_given_tokens=10)
    assert names(for_prefill([tokens, idle], "f", NOW)) == ["idle", "tokens"]


def test_prompts_go_by_tokens_not_by_requests() -> None:
    long = standing("long", Load(NOW, num_sequences=1, num_queued_tokens=9000))
    many = standing("many", Load(NOW, num_sequences=5, num_queued_tokens=500))
    assert names(for_prefill([long, many], "f", NOW)) == ["many", "long"]


def test_only_equal_fingerprints_make_a_pair() -> None:
    other = standing("other", fingerprint="g")
    assert for_prefill([other], "f", NOW) == []


@pytest.mark.parametrize(
    "unusable",
    [
        Standing(Worker("unheard", 1, "f")),
        standing("silent", Load(NOW - SILENT_AFTER_S - 0.1)),
        standing("draining", Load(NOW, draining=True)),
        standing("unhealthy", Load(NOW, unhealthy="quarantine")),
        standing("leaving", leaving=True),
    ],
)
def test_who_may_not_answer_gets_nothing_new(unusable: Standing) -> None:
    assert for_decode([unusable], NOW) == []
    assert for_prefill([unusable], "f", NOW) == []
