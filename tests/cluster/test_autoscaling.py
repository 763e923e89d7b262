"""The autoscaling policy, decision by decision, and as Ray Serve calls it."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from ray import cloudpickle
from ray.exceptions import RpcError

from cluster import autoscaling
from cluster.autoscaling import (
    DECISIONS_KEY,
    IngressLoad,
    Load,
    Objectives,
    PoolSample,
    PoolState,
    WorkerLoad,
    decide,
    scale,
)

IDLE = WorkerLoad(0, 0, 0, 0, 0, 0, 0.01, 0, 5.0)
HOLD_S = Objectives().down_delay_s


def sample(target: int, *loads: Load, num_running: int | None = None, **more: Any) -> PoolSample:
    running = target if num_running is None else num_running
    return PoolSample(running, target, 1, 8, loads, Objectives(**more))


class Pool:
    """One pool's decisions, one after the other."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.state = PoolState()
        self.now = 1000.0

    def after(self, seconds: float, given: PoolSample, *ingresses: IngressLoad) -> int:
        """The last decision when the sample was seen every second for so long, with what waits at
        the ingresses, where there are any."""
        samples = {self.name: given}
        if ingresses:
            samples["ingress"] = sample(len(ingresses), *ingresses)
        for _ in range(max(1, int(seconds))):
            self.now += 1
            targets, states = decide(samples, {self.name: self.state}, self.now)
            self.state = states[self.name]
        return targets[self.name]


def busy(**more: float) -> WorkerLoad:
    return IDLE._replace(num_sequences=10, num_running=10, **more)


@pytest.mark.parametrize("num_workers", [1, 2])
@pytest.mark.parametrize(
    ("load", "reason"),
    [
        (busy(kv_use=0.95), "KV use 95%"),
        (busy(sequence_use=1.2), "sequences 120%"),
        (busy(step_load_s=0.1), "tokens every 110 ms of 100"),
        (busy(queued_s=2.5, busy=1.0), "prompts wait 2.5 s of 2"),
    ],
)
def test_whatever_is_short_adds_a_decode_worker_at_once(
    load: WorkerLoad, reason: str, num_workers: int
) -> None:
    """And what is told is of each worker, however many there are."""
    pool, more = Pool("decode"), num_workers + 1
    assert pool.after(1, sample(num_workers, *[load] * num_workers)) == more
    assert pool.state.change == f"{num_workers} -> {more}: {reason}"


def test_prompts_that_wait_add_prefill_workers() -> None:
    pool = Pool("prefill")
    assert pool.after(1, sample(1, busy(queued_s=1.9, busy=1.0))) == 1
    assert pool.after(1, sample(1, busy(queued_s=9.0, busy=1.0))) > 1
    assert pool.state.why.startswith("prompts wait 9 s of 2")


def test_one_long_prompt_is_not_shared() -> None:
    alone = IDLE._replace(num_sequences=1, queued_s=30.0, busy=1.0)
    assert Pool("prefill").after(1, sample(1, alone)) == 1


def test_a_queue_that_will_be_gone_before_help_could_come_adds_none() -> None:
    draining = busy(queued_s=4.0, busy=0.5)
    pool = Pool("prefill")
    pool.state = PoolState(at=pool.now, queued_s=4.5, demand=0.0)
    assert pool.after(1, sample(1, draining._replace(startup_s=5.0))) == 1


def test_replicas_that_are_starting_count() -> None:
    pool = Pool("decode")
    first = pool.after(1, sample(1, busy(kv_use=0.95)))
    assert first == 2
    assert pool.after(30, sample(2, busy(kv_use=0.95), num_running=1)) == 2


def test_those_that_have_not_reported_yet_do_not_thin_the_load() -> None:
    full = busy(kv_use=0.85)
    two_of_four = sample(4, full, full)._replace(num_running=4)
    assert Pool("decode").after(10 * HOLD_S, two_of_four) == 4
    all_four = sample(4, full, full, IDLE, IDLE)
    assert Pool("decode").after(HOLD_S + 1, all_four) == 3


def test_nothing_is_decided_without_reports() -> None:
    pool = Pool("prefill")
    assert pool.after(10 * HOLD_S, sample(3)) == 3
    assert pool.state.why == "no replica has reported"


def test_an_idle_pool_shrinks_to_its_least_one_hold_a_time() -> None:
    pool = Pool("decode")
    assert pool.after(HOLD_S, sample(8, *[IDLE] * 8)) == 8
    assert pool.after(1, sample(8, *[IDLE] * 8)) == 6
    assert pool.after(HOLD_S + 1, sample(3, *[IDLE] * 3)) == 2
    assert pool.after(HOLD_S + 1, sample(2, IDLE, IDLE)) == 1
    assert pool.after(10 * HOLD_S, sample(1, IDLE)) == 1
    least_of_three = sample(3, *[IDLE] * 3)._replace(least=3)
    assert Pool("decode").after(10 * HOLD_S, least_of_three) == 3


def test_a_hold_outlasts_two_starts() -> None:
    slow = IDLE._replace(startup_s=100.0)
    pool = Pool("decode")
    assert pool.after(200, sample(2, slow, slow)) == 2
    assert pool.after(1, sample(2, slow, slow)) == 1


def test_one_slow_start_does_not_make_the_hold() -> None:
    """As of a pool's first replica, which had to compile, or shared its cores with all others."""
    pool, first, later = Pool("decode"), IDLE._replace(startup_s=120.0), IDLE
    assert pool.after(HOLD_S, sample(2, first, later)) == 2
    assert pool.after(1, sample(2, first, later)) == 1


@pytest.mark.parametrize(("came_after_s", "hold_s"), [(20, HOLD_S), (90, 180), (3600, 1200)])
def test_a_hold_outlasts_what_came_late_too(came_after_s: int, hold_s: float) -> None:
    """A replica of 5 s may wait for a machine much longer; not the next one, where it was hours."""
    pool = Pool("decode")
    assert pool.after(1, sample(1, busy(kv_use=0.95))) == 2
    pool.after(came_after_s - 1, sample(2, busy(kv_use=0.95), num_running=1))
    assert pool.after(hold_s, sample(2, IDLE, IDLE)) == 2
    assert pool.after(1, sample(2, IDLE, IDLE)) == 1


def test_one_that_came_late_is_no_reason_to_ask_for_none() -> None:
    """There may be a machine for the next."""
    pool, late = Pool("prefill"), busy(queued_s=100.0, busy=1.0)
    first = pool.after(1, sample(1, late))
    pool.after(600, sample(first, late, num_running=1))
    assert pool.after(1, sample(2, late, late)) == Pool("prefill").after(1, sample(2, late, late))


def test_one_that_never_came_makes_no_hold_of_the_next() -> None:
    pool = Pool("decode")
    assert pool.after(1, sample(1, busy(kv_use=0.95))) == 2
    assert pool.after(HOLD_S + 1, sample(2, IDLE, num_running=1)) == 1
    pool.after(3600, sample(1, IDLE))
    assert pool.after(1, sample(1, busy(kv_use=0.95))) == 2
    pool.after(1, sample(2, IDLE, IDLE))
    assert pool.state.startup_s == 1.0


def test_workers_that_were_held_up_once_are_not_full_for_ever() -> None:
    pool = Pool("prefill")
    held_up = busy(queued_s=8.0, busy=0.02)
    pool.after(20, sample(4, *[held_up] * 4))
    assert pool.state.capacity < 0.05
    target = 4
    for _ in range(3600):
        calm = busy(queued_s=0.02, busy=0.6 / target)
        target = pool.after(1, sample(target, *[calm] * target))
    assert target == 1


@pytest.mark.parametrize("jump_s", [-3600, 3600])
def test_a_clock_that_is_set_begins_the_hold_anew(jump_s: int) -> None:
    pool = Pool("decode")
    pool.after(HOLD_S // 2, sample(2, IDLE, IDLE))
    pool.now += jump_s
    assert pool.after(HOLD_S, sample(2, IDLE, IDLE)) == 2
    assert pool.after(1, sample(2, IDLE, IDLE)) == 1


def test_one_that_is_replaced_was_not_asked_for() -> None:
    """In an upgrade a replica that drains runs no more, long before the new one does."""
    pool = Pool("decode")
    pool.after(500, sample(2, busy(kv_use=0.95), num_running=1))
    assert pool.after(HOLD_S, sample(2, IDLE, IDLE)) == 2
    assert pool.after(1, sample(2, IDLE, IDLE)) == 1


def test_a_peak_begins_the_hold_anew() -> None:
    pool = Pool("decode")
    assert pool.after(HOLD_S - 1, sample(2, IDLE, IDLE)) == 2
    assert pool.after(1, sample(2, *[busy(kv_use=0.5)] * 2)) == 2
    assert pool.after(HOLD_S, sample(2, IDLE, IDLE)) == 2
    assert pool.after(1, sample(2, IDLE, IDLE)) == 1


@pytest.mark.parametrize(("use", "stays"), [(0.53, 3), (0.55, 4)])
def test_what_is_left_must_fit_into_fewer(use: float, stays: int) -> None:
    """Four at 53 % are three at 71 %, of 90 % with a fifth to spare; four at 55 % are not."""
    one = IDLE._replace(num_sequences=10, kv_use=use)
    assert Pool("decode").after(HOLD_S + 1, sample(4, *[one] * 4)) == stays


def test_fewer_decode_workers_have_slower_steps_and_so_more_sequences() -> None:
    """Half full, with steps that are nearly all for their sequences: one of two workers cannot
    make the same tokens a second, though it has the slots."""
    half = IDLE._replace(
        num_sequences=8, num_running=8, sequence_use=0.3, step_base_s=0.001, step_load_s=0.05
    )
    assert Pool("decode").after(10 * HOLD_S, sample(2, half, half)) == 2
    light = half._replace(step_base_s=0.05, step_load_s=0.001)
    assert Pool("decode").after(HOLD_S + 1, sample(2, light, light)) == 1


@pytest.mark.parametrize(("use", "stays"), [(0.35, 3), (0.4, 4)])
def test_fewer_decode_workers_need_places_for_as_many_more_sequences(
    use: float, stays: int
) -> None:
    """Four spend half of each step on their sequences; three would spend two thirds, so that each
    sequence is there half as long again: 1.4 workers full of them are 2.1, and 1.6 are 2.4."""
    one = busy(sequence_use=use, step_base_s=0.01, step_load_s=0.01)
    assert Pool("decode").after(HOLD_S + 1, sample(4, *[one] * 4)) == stays


BUSY = busy(queued_s=1.0, busy=1.0)._replace(num_sequences=2)  # as full as routers make a worker
EMPTY = IngressLoad(0, 2.0)
# 498 prompts, half a second of work each.
BACKLOG = EMPTY._replace(num_requests=500, prefill_prompts=498, prefill_queued_s=255)


def test_one_sequence_that_never_ends_is_no_reason_for_two_decode_workers() -> None:
    """Whose step is hardly more than its own part of it: one worker does as well as two."""
    one = IDLE._replace(step_base_s=0.001, step_load_s=0.005, num_sequences=0.5, num_running=0.5)
    pool = Pool("decode")
    assert pool.after(HOLD_S + 1, sample(2, one, one)) == 1
    two = one._replace(step_load_s=0.01, num_sequences=1.0, num_running=1.0)
    assert Pool("decode").after(HOLD_S + 1, sample(2, two, two)) == 2


def test_prompts_that_wait_at_the_router_add_as_many_prefill_workers_as_they_take() -> None:
    pool = Pool("prefill")
    assert pool.after(120, sample(1, BUSY), EMPTY) == 1
    assert pool.after(1, sample(1, BUSY), BACKLOG) == 8
    assert pool.state.change.startswith("1 -> 8: prompts wait 256 s of 2, 498 at the router")


def test_a_queue_that_grew_while_nobody_reported_did_not_grow_in_a_second() -> None:
    """As when the only replica is replaced: what it could not do in a minute is not asked of many
    at once."""
    pool, slow = Pool("prefill"), BUSY._replace(busy=0.8, startup_s=60)
    assert pool.after(120, sample(1, slow), EMPTY) == 1
    assert pool.after(60, sample(1, num_running=0), EMPTY) == 1
    waiting = EMPTY._replace(num_requests=48, prefill_prompts=48, prefill_queued_s=48)
    assert pool.after(1, sample(1, slow), waiting) <= 3


def test_what_waits_is_summed_over_ingresses() -> None:
    third = EMPTY._replace(prefill_prompts=10, prefill_queued_s=5)
    assert Pool("prefill").after(1, sample(1, BUSY), third, EMPTY, EMPTY) == 2
    pool = Pool("prefill")
    assert pool.after(1, sample(1, BUSY), third, third, third) == 4
    assert "30 at the router" in pool.state.change


def test_a_long_prompt_at_the_router_is_not_shared_either() -> None:
    """One at a worker, and one that waits for it."""
    alone = IDLE._replace(num_sequences=1, queued_s=30.0, busy=1.0)
    waiting = EMPTY._replace(prefill_prompts=1, prefill_queued_s=30)
    assert Pool("prefill").after(1, sample(1, alone), waiting) == 2


def test_each_pool_grows_for_what_waits_for_it() -> None:
    full = busy(kv_use=0.5, sequence_use=0.8)
    samples = {"prefill": sample(1, BUSY), "decode": sample(1, full)}

    def targets(ingress: IngressLoad) -> tuple[int, int]:
        given = {**samples, "ingress": sample(1, ingress)}
        found, _ = decide(given, {}, 1.0)
        return found["prefill"], found["decode"]

    assert targets(EMPTY) == (1, 1)
    assert targets(BACKLOG) == (8, 1)
    assert targets(EMPTY._replace(decode_prompts=498, decode_queued_s=255)) == (1, 8)
    assert targets(EMPTY._replace(num_sequences=40, sequence_use=3.2, kv_use=1.0)) == (1, 5)


FEW = EMPTY._replace(num_sequences=30)


@pytest.mark.parametrize(
    ("load", "waiting", "target", "reason"),
    [
        (busy(kv_use=0.95), FEW._replace(kv_use=4.0), 6, "KV use 495%, 30"),
        (busy(sequence_use=0.95), FEW._replace(sequence_use=2.5), 4, "sequences 345%, 30"),
        (busy(step_load_s=0.09), FEW, 4, "tokens every 370 ms of 100, 30"),
        (
            busy(busy=1.0),
            EMPTY._replace(decode_prompts=30, decode_queued_s=25),
            5,
            "prompts wait 25 s of 2, 30",
        ),
    ],
)
def test_those_without_a_place_add_as_many_decode_workers_as_they_take(
    load: WorkerLoad, waiting: IngressLoad, target: int, reason: str
) -> None:
    pool = Pool("decode")
    assert pool.after(1, sample(1, load), waiting) == target
    assert pool.state.change == f"1 -> {target}: {reason} at the router"


def test_what_waits_at_the_router_keeps_a_pool_from_shrinking() -> None:
    idle = sample(2, IDLE, IDLE)
    waiting = EMPTY._replace(prefill_prompts=8, prefill_queued_s=3)
    assert Pool("prefill").after(10 * HOLD_S, idle, waiting) == 2
    assert Pool("prefill").after(HOLD_S + 1, idle, EMPTY) == 1


def test_without_a_word_of_the_ingresses_nothing_is_decided() -> None:
    pool = Pool("prefill")
    silent = {"prefill": sample(2, IDLE, IDLE), "ingress": sample(1)}
    for second in range(int(10 * HOLD_S)):
        targets, states = decide(silent, {"prefill": pool.state}, float(second))
        pool.state = states["prefill"]
        assert targets["prefill"] == 2
    assert pool.state.why == "no ingress has reported"


def test_ingress_replicas_follow_requests() -> None:
    full, idle = IngressLoad(300, 2.0), IngressLoad(10, 2.0)
    assert Pool("ingress").after(1, sample(1, full)) == 2
    assert Pool("ingress").after(HOLD_S + 1, sample(2, idle, idle)) == 1


def test_the_bounds_hold() -> None:
    crowded = busy(kv_use=40.0)._replace(num_sequences=1000)
    assert Pool("decode").after(1, sample(1, crowded)) == 8
    below = sample(1, IDLE)._replace(least=3)
    assert Pool("decode").after(1, below) == 3


def test_up_may_be_told_to_wait() -> None:
    pool = Pool("decode")
    given = sample(1, busy(kv_use=0.95), up_delay_s=3.0)
    assert pool.after(3, given) == 1
    assert pool.after(1, given) == 2


def test_coming_back_soon_makes_it_patient() -> None:
    pool = Pool("decode")
    for _ in range(3):
        assert pool.after(1, sample(1, busy(kv_use=1.5))) == 2
        for _ in range(100):
            if pool.after(HOLD_S, sample(2, IDLE, IDLE)) == 1:
                break
    assert pool.state.patience >= 4


# As Serve calls it.


def context(pool: str, target: int, metrics: Mapping[str, Mapping[str, float]]) -> Any:
    return SimpleNamespace(
        deployment_name=pool,
        app_name="kvrelay",
        current_num_replicas=target,
        target_num_replicas=target,
        capacity_adjusted_min_replicas=1,
        capacity_adjusted_max_replicas=4,
        policy_state={},
        aggregated_metrics=metrics,
    )


def recorded(loads: Mapping[str, Load], **objectives: float) -> dict[str, dict[str, float]]:
    found: dict[str, dict[str, float]] = {}
    for replica, load in loads.items():
        numbers = {**load._asdict(), **Objectives(**objectives)._asdict()}
        for name, value in numbers.items():
            found.setdefault(name, {})[replica] = value
    return found


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What was put into Ray's store."""
    store: dict[str, Any] = {}
    module = ModuleType("internal_kv")

    def put(key: str, value: str, *, overwrite: bool) -> None:
        assert overwrite
        store[key] = json.loads(value)

    module._internal_kv_put = put  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "ray.experimental.internal_kv", module)
    return store


def test_serve_gets_replicas_and_states_and_the_user_the_reason(
    told: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "ray.serve")
    decode = context("decode", 1, recorded({"a": busy(kv_use=0.5)}, most_kv_use=0.25))
    prefill = context("prefill", 1, recorded({"b": IDLE}))
    targets, states = scale({"d": decode, "p": prefill})
    assert targets == {"d": 2, "p": 1}
    assert states["d"]["change"] == "1 -> 2: KV use 50%"
    assert caplog.messages == ["kvrelay scales decode: 1 -> 2: KV use 50%"]
    words = told[DECISIONS_KEY + "kvrelay"]
    assert words["decode"]["target"] == 2
    assert words["prefill"]["why"].startswith("prompts wait 0 s")
    # What Serve keeps comes back, with notes of Serve's own.
    decode.policy_state = {**states["d"], "__decision_counter": 1}
    prefill.policy_state = states["p"]
    told.clear()
    assert scale({"d": decode, "p": prefill})[0] == {"d": 1, "p": 1}
    assert not told


def test_who_cannot_be_told_does_not_stop_it(
    told: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise RpcError("no store")  # type: ignore[no-untyped-call]

    store = sys.modules["ray.experimental.internal_kv"]
    monkeypatch.setattr(store, "_internal_kv_put", fail)
    targets, states = scale({"d": context("decode", 1, recorded({"a": busy(kv_use=0.95)}))})
    assert targets == {"d": 2}
    assert states["d"]["at"] is not None


def test_what_waits_at_the_ingresses_comes_from_their_records(told: dict[str, Any]) -> None:
    """One of them is of an older version, which does not tell it."""
    half = EMPTY._replace(num_requests=300, prefill_prompts=10, prefill_queued_s=5)
    records = recorded({"new": half, "newer": half, "old": EMPTY})
    for name in IngressLoad._field_defaults:
        del records[name]["old"]
    contexts = {
        "p": context("prefill", 1, recorded({"a": BUSY})),
        "i": context("ingress", 3, records),
    }
    targets, states = scale(contexts)
    assert targets == {"p": 3, "i": 3}
    assert states["p"]["change"].startswith("1 -> 3: prompts wait 11 s of 2, 20 at the router")
    words = told[DECISIONS_KEY + "kvrelay"]
    assert words["ingress"]["num_reporting"] == 3
    assert "20 at the router" in words["prefill"]["why"]


def test_a_number_that_is_none_is_no_report(told: dict[str, Any]) -> None:
    broken = busy(kv_use=math.nan)
    half = recorded({"a": busy(kv_use=0.95), "b": broken})
    del half["queued_s"]["a"]
    targets, _ = scale({"d": context("decode", 2, half)})
    assert targets == {"d": 2}
    assert told[DECISIONS_KEY + "kvrelay"]["decode"]["num_reporting"] == 0


def test_its_copy_needs_nothing_but_the_standard_library(tmp_path: Path) -> None:
    """Serve's controller has no code of ours; what fails there is seen in its log alone."""
    package = tmp_path / "ray"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "cloudpickle").symlink_to(Path(cloudpickle.__file__).parent)
    cloudpickle.register_pickle_by_value(autoscaling)  # type: ignore[no-untyped-call]
    try:
        copy = cloudpickle.dumps(scale)  # type: ignore[no-untyped-call]
    finally:
        cloudpickle.unregister_pickle_by_value(autoscaling)  # type: ignore[no-untyped-call]
    (tmp_path / "copy").write_bytes(copy)
    program = f"""
import sys
sys.path.insert(0, {str(tmp_path)!r})
from ray import cloudpickle
scale = cloudpickle.loads(open({str(tmp_path / "copy")!r}, "rb").read())
space = scale.__globals__
load = space["WorkerLoad"](9, 9, 0.95, 0, 0, 0, 0.01, 0, 5)
sample = space["PoolSample"](1, 1, 1, 4, [load])
print(space["decide"]({{"decode": sample}}, {{}}, 1.0)[0])
assert scale({{}}) == ({{}}, {{}})
strange = [name for name in sys.modules if name.split(".")[0] not in sys.stdlib_module_names]
assert all(name.split(".")[0] in ("ray", "__main__") for name in strange), strange
"""
    command = [sys.executable, "-S", "-I", "-c", program]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ended.stdout == "{'decode': 2}\n", ended.stderr
