"""Which workers an ingress may use while Serve replaces them."""

import pytest

from cluster.published import metadata_of
from cluster.succession import Succession
from router.workers import Leg, Worker


def replica(release: str, number: int) -> dict[str, dict[str, str]]:
    worker = Worker(f"127.0.0.1:{number}", number, "weights")
    return {f"{release} {number}": metadata_of(worker, release)}


@pytest.fixture
def succession() -> Succession:
    return Succession("ours")


@pytest.mark.parametrize("leg", Leg)
def test_the_last_ones_stay_while_only_another_model_s_are_there(
    succession: Succession, leg: Leg
) -> None:
    two = {**replica("ours", 1), **replica("ours", 2)}
    assert succession.update(leg, {**two, **replica("theirs", 3)}) == two
    assert succession.update(leg, replica("ours", 2)) == replica("ours", 2)
    assert succession.update(leg, replica("theirs", 3)) == replica("ours", 2)
    assert succession.update(leg, {}) == replica("ours", 2)


@pytest.mark.parametrize("leg", Leg)
def test_a_new_one_of_the_model_takes_their_place(succession: Succession, leg: Leg) -> None:
    succession.update(leg, replica("ours", 1))
    succession.update(leg, {})
    assert succession.update(leg, replica("ours", 2)) == replica("ours", 2)


def test_one_pool_s_workers_are_not_the_other_s(succession: Succession) -> None:
    succession.update(Leg.PREFILL, replica("ours", 1))
    assert succession.update(Leg.DECODE, {}) == {}


def test_who_has_said_nothing_yet_is_nobody(succession: Succession) -> None:
    assert succession.update(Leg.DECODE, {"silent": {}}) == {}
