"""How many replicas each pool should have: the application's autoscaling policy.

`decide` is the policy, a pure function; `scale` is what Ray Serve calls, in its controller. That
has none of our code: Serve copies this module there by value, and no other, so it is all in one
file and imports the standard library only. What it is told travels as plain numbers that replicas
record: `WorkerLoad` or `IngressLoad` with `Objectives`.

All load is counted in replicas: 2.3 is what two replicas cannot hold within the objectives.
Up at once and as far as needed; down after a hold in which fewer would always have held the load.
"""

import importlib
import json
import logging
import math
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

PREFILL, DECODE, INGRESS = "prefill", "decode", "ingress"
PERIOD_S = 1.0  # Serve calls ten times as often
DECISIONS_KEY = "kvrelay:autoscaling:"  # in Ray's key-value store; the application's name follows
# Fewer replicas must hold the load with so much to spare.
_FIT = 0.8
# Of decode workers' time for their sequences: beyond it, chance arrivals pile up.
_MOST_SHARE = 0.7
_DEMAND_MEMORY_S = 10.0
_CAPACITY_MEMORY_S = 1800.0  # what held workers up once is over some time
_SATURATED_S = 8.0  # a queue that lasts longer than what is averaged over
_LEAST_CAPACITY = 0.1
_HOLD_STARTS = 2.0  # starts of a replica that a hold outlasts
_LONGEST_START_S = 600.0  # one that waited longer for a machine is not what the next one takes
_MOST_PATIENCE = 16.0
_SOON_HOLDS = 8.0
_LONGEST_PAUSE_S = 60.0  # after which, as after a clock set back, no time goes on since before
_SHRINK = 4  # at most a quarter of a pool goes at a time

logger = logging.getLogger("ray.serve")


class Objectives(NamedTuple):
    """What replicas should keep to. Shares are of 1."""

    ttft_s: float = 2.0
    inter_token_s: float = 0.1
    most_kv_use: float = 0.9
    most_sequence_use: float = 0.9
    most_requests: float = 256.0  # at once in an ingress replica
    up_delay_s: float = 0.0
    down_delay_s: float = 60.0


class WorkerLoad(NamedTuple):
    """One worker, as it is now."""

    num_sequences: float  # that run, wait or are being fetched
    num_running: float
    kv_use: float  # share of the blocks that sequences hold
    sequence_use: float  # sequences as a share of the most that run at once
    queued_s: float  # that the prompts in its queue take to compute
    busy: float  # share of its time that it spent in steps
    step_base_s: float  # of a step, whatever is in it
    step_load_s: float  # of a step, for the sequences that are in it
    startup_s: float


class IngressLoad(NamedTuple):
    """Of its requests, some may wait for workers: none of that is in a `WorkerLoad`. Uses are in
    workers, seconds are of one worker's time. An ingress of an older version tells nothing of it.
    """

    num_requests: float
    startup_s: float
    prefill_prompts: float = 0.0  # that prefill workers are to compute, once they have time
    prefill_queued_s: float = 0.0
    decode_prompts: float = 0.0  # the same, where decode workers compute prompts
    decode_queued_s: float = 0.0
    num_sequences: float = 0.0  # for which no decode worker has room
    sequence_use: float = 0.0
    kv_use: float = 0.0


Load = WorkerLoad | IngressLoad


class PoolSample(NamedTuple):
    """One pool as it is now. Replicas that are starting are in `target` and not `running`;
    some that run may not have reported yet."""

    num_running: int
    target: int
    least: int
    most: int
    loads: Sequence[Load] = ()
    objectives: Objectives = Objectives()


class PoolState(NamedTuple):
    """What a pool's next decision knows of the last ones. Times are the caller's, in seconds."""

    at: float | None = None  # of the last decision
    queued_s: float = 0.0
    late_since: float | None = None  # prompts wait too long, without a pause
    demand: float | None = None  # prompts that come, in seconds of work a second
    estimated_at: float | None = None  # it was, with what was queued then
    capacity: float = 1.0  # of a worker that is never without work, in the same measure
    starting_since: float | None = None
    asked_at: float | None = None  # for more than `running_then`, of whom none has come yet
    running_then: int = 0
    startup_s: float = 0.0  # that the last took to come which was asked for
    high_since: float | None = None
    low_since: float | None = None
    peak: int = 0  # of the fewest replicas that would do, since fewer than there are would
    patience: float = 1.0  # times the usual hold: learnt from going down too soon
    went_down_at: float | None = None
    why: str = ""
    changed_at: float | None = None
    change: str = ""


class _Waiting(NamedTuple):
    """What waits at the ingresses for one pool. Seconds are of its workers' time."""

    num_prompts: float = 0.0
    queued_s: float = 0.0
    num_sequences: float = 0.0
    sequence_use: float = 0.0
    kv_use: float = 0.0

    @classmethod
    def of(cls, pool: str, loads: Iterable[Load]) -> "_Waiting":
        told = [load for load in loads if isinstance(load, IngressLoad)]
        if pool == PREFILL:
            return cls(
                sum(load.prefill_prompts for load in told),
                sum(load.prefill_queued_s for load in told),
            )
        if pool == DECODE:
            return cls(
                sum(load.decode_prompts for load in told),
                sum(load.decode_queued_s for load in told),
                sum(load.num_sequences for load in told),
                sum(load.sequence_use for load in told),
                sum(load.kv_use for load in told),
            )
        return cls()


class _Need(NamedTuple):
    """What there is to do, in replicas; and how many at least can do it with room to spare."""

    reason: str
    load: float
    fewest: int = 0


def decide(
    samples: Mapping[str, PoolSample], states: Mapping[str, PoolState], now: float
) -> tuple[dict[str, int], dict[str, PoolState]]:
    targets, after = {}, {}
    for pool, sample in samples.items():
        before = _going_on(states.get(pool, PoolState()), now)
        target, state = _decide(pool, sample, samples.get(INGRESS), before, now)
        if target != sample.target:
            change = f"{sample.target} -> {target}: {state.why}"
            state = state._replace(changed_at=now, change=change)
        if target > sample.target and state.asked_at is None:
            state = state._replace(asked_at=now, running_then=sample.num_running)
        targets[pool], after[pool] = target, state._replace(at=now)
    return targets, after


def _going_on(state: PoolState, now: float) -> PoolState:
    if state.at is None or 0 <= now - state.at <= _LONGEST_PAUSE_S:
        return state
    return state._replace(
        late_since=None,
        starting_since=None,
        asked_at=None,
        high_since=None,
        low_since=None,
        went_down_at=None,
    )


def _decide(
    pool: str, sample: PoolSample, ingress: PoolSample | None, state: PoolState, now: float
) -> tuple[int, PoolState]:
    """`ingress`: where work may wait that workers do not know of."""
    state = _watch_starts(sample, state, now)
    if not sample.loads or (ingress is not None and not ingress.loads):
        who = "ingress" if sample.loads else "replica"
        unknown = state._replace(low_since=None, high_since=None, why=f"no {who} has reported")
        return _within(sample, sample.target), unknown
    waiting = _Waiting.of(pool, ingress.loads if ingress is not None else ())
    state = _estimate_demand(sample, waiting, state, now)
    needs = _NEEDS[pool](sample, waiting, state, now)
    most = max(needs, key=lambda need: need.load)
    wanted = _within(sample, math.ceil(most.load))
    if wanted > sample.target:
        return _go_up(sample, state, now, wanted, most.reason)
    return _go_down(sample, state._replace(high_since=None), now, needs)


def _go_up(
    sample: PoolSample, state: PoolState, now: float, wanted: int, why: str
) -> tuple[int, PoolState]:
    since = now if state.high_since is None else state.high_since
    state = state._replace(high_since=since, low_since=None, peak=0, why=why)
    if now - since < sample.objectives.up_delay_s:
        return _within(sample, sample.target), state
    if state.went_down_at is not None:
        # Whoever comes back soon was sent away too soon: a load that swings is not followed.
        soon = now - state.went_down_at < _SOON_HOLDS * _hold_s(sample, state)
        patience = 2 * state.patience if soon else state.patience / 2
        patience = min(max(1.0, patience), _MOST_PATIENCE)
        state = state._replace(patience=patience, went_down_at=None)
    return wanted, state._replace(high_since=None)


def _go_down(
    sample: PoolSample, state: PoolState, now: float, needs: Sequence[_Need]
) -> tuple[int, PoolState]:
    most = max(needs, key=lambda need: need.fewest)
    # A replica that does not report is taken to be as busy as the others.
    unheard = max(1.0, sample.num_running / len(sample.loads))
    peak = max(math.ceil(most.fewest * unheard), state.peak)
    fewest, state = _within(sample, peak), state._replace(why=most.reason)
    if fewest >= sample.target:
        return _within(sample, sample.target), state._replace(low_since=None, peak=0)
    since = now if state.low_since is None else state.low_since
    if now - since < _hold_s(sample, state):
        return _within(sample, sample.target), state._replace(low_since=since, peak=peak)
    fewer = max(fewest, sample.target - max(1, sample.target // _SHRINK))
    return fewer, state._replace(low_since=None, peak=0, went_down_at=now)


def _hold_s(sample: PoolSample, state: PoolState) -> float:
    start_s = max(_startup_s(sample), state.startup_s)
    return max(sample.objectives.down_delay_s, _HOLD_STARTS * start_s) * state.patience


def _startup_s(sample: PoolSample) -> float:
    """Of a replica that comes now, where there is a machine for it: a pool's first one may have had
    all to load and to compile."""
    return statistics.median_low(load.startup_s for load in sample.loads)


def _within(sample: PoolSample, wanted: int) -> int:
    return max(1, sample.least, min(sample.most, wanted))


def _watch_starts(sample: PoolSample, state: PoolState, now: float) -> PoolState:
    if state.asked_at is not None and sample.num_running > state.running_then:
        startup_s = min(now - state.asked_at, _LONGEST_START_S)
        state = state._replace(asked_at=None, startup_s=startup_s)
    if sample.num_running >= sample.target:
        return state._replace(starting_since=None, asked_at=None)
    return state._replace(
        starting_since=now if state.starting_since is None else state.starting_since
    )


def _estimate_demand(
    sample: PoolSample, waiting: _Waiting, state: PoolState, now: float
) -> PoolState:
    """Work that comes: what is done, and what the queue grows by."""
    workers = [load for load in sample.loads if isinstance(load, WorkerLoad)]
    queued_s = waiting.queued_s + sum(load.queued_s for load in workers)
    busy = sum(load.busy for load in workers)
    demand, capacity = busy, state.capacity
    if state.estimated_at is not None and state.demand is not None and now > state.estimated_at:
        passed_s = now - state.estimated_at
        comes = max(0.0, busy + (queued_s - state.queued_s) / passed_s)
        demand = comes + (state.demand - comes) * math.exp(-passed_s / _DEMAND_MEMORY_S)
        capacity = 1.0 + (capacity - 1.0) * math.exp(-passed_s / _CAPACITY_MEMORY_S)
    state = state._replace(queued_s=queued_s, demand=demand, capacity=capacity, estimated_at=now)
    if queued_s <= sample.objectives.ttft_s * sample.num_running:
        return state._replace(late_since=None)
    if state.late_since is None:
        return state._replace(late_since=now)
    if now - state.late_since < _SATURATED_S:
        return state
    return state._replace(capacity=max(load.busy for load in workers))


def _prefill_needs(
    sample: PoolSample, waiting: _Waiting, state: PoolState, now: float
) -> list[_Need]:
    workers = [load for load in sample.loads if isinstance(load, WorkerLoad)]
    num_prompts = waiting.num_prompts + sum(load.num_sequences for load in workers)
    demand = state.demand or 0.0
    reason = f"{_wait(sample, waiting, state)}, workers {round(demand, 2):g} busy"
    busy = max(demand, sum(load.busy for load in workers))
    load = max(
        busy / max(state.capacity, _LEAST_CAPACITY), state.queued_s / sample.objectives.ttft_s
    )
    return [_Need(reason, _prompts_load(sample, num_prompts, state, now), _fewest(load))]


def _wait(sample: PoolSample, waiting: _Waiting, state: PoolState) -> str:
    wait_s = state.queued_s / max(1, sample.num_running)
    told = f"{wait_s:.0f}" if wait_s >= 10 else f"{wait_s:.2g}"
    at_routers = _at_routers(waiting.num_prompts)
    return f"prompts wait {told} s of {sample.objectives.ttft_s:g}{at_routers}"


def _at_routers(number: float) -> str:
    return f", {number:.0f} at the router" if number >= 0.5 else ""


def _prompts_load(sample: PoolSample, num_prompts: float, state: PoolState, now: float) -> float:
    """For the wait of a prompt that comes now; none if it goes by before help could come."""
    objective_s, startup_s = sample.objectives.ttft_s, _startup_s(sample)
    demand = state.demand or 0.0
    late_s = state.queued_s - _soon_done_s(sample, state, now, demand, startup_s)
    if late_s <= objective_s * sample.target:
        return 0.0
    # Those who come, and what is late, within the time that it takes to help at all.
    wanted = max(sample.target + 1.0, demand + late_s / (objective_s + startup_s))
    # One prompt is computed by one worker.
    return min(wanted, math.ceil(num_prompts))


def _soon_done_s(
    sample: PoolSample, state: PoolState, now: float, demand: float, startup_s: float
) -> float:
    """Of the queue, before a replica that is asked for now could begin: by what runs, beyond
    what comes; and what those that are starting would have done, had they been there."""
    done_s = max(0.0, sample.num_running * state.capacity - demand) * startup_s
    if state.starting_since is not None:
        passed_s = min(now - state.starting_since, startup_s)
        done_s += (sample.target - sample.num_running) * passed_s
    return done_s


def _decode_needs(
    sample: PoolSample, waiting: _Waiting, state: PoolState, now: float
) -> list[_Need]:
    workers = [load for load in sample.loads if isinstance(load, WorkerLoad)]
    total = _Decoding.of(workers, waiting)
    objectives, num_workers = sample.objectives, total.num_workers
    step_s = total.base_s + total.load_s * total.joined / num_workers
    at_routers = _at_routers(waiting.num_sequences)
    told = (
        f"KV use {total.kv_use / num_workers:.0%}{at_routers}",
        f"sequences {total.sequence_use / num_workers:.0%}{at_routers}",
        f"tokens every {step_s * 1e3:.3g} ms of {objectives.inter_token_s * 1e3:g}{at_routers}",
        _wait(sample, waiting, state),
    )
    # One sequence is decoded by one worker.
    enough = math.ceil(total.num_sequences)
    prompts = _prompts_load(sample, total.num_sequences, state, now)
    loads = (*total.loads(objectives)[:3], prompts)
    most = min(sample.target, max(1, enough))
    fewest = [_fewest_decoding(total, objectives, which, most) for which in range(4)]
    return [
        _Need(reason, min(load, enough), fewest)
        for reason, load, fewest in zip(told, loads, fewest, strict=True)
    ]


class _Decoding(NamedTuple):
    """All workers of a decode pool together, and who waits for them."""

    num_workers: int
    num_sequences: float
    num_running: float
    kv_use: float
    sequence_use: float
    queued_s: float
    base_s: float  # of a step, whatever is in it
    load_s: float  # of all their steps, for what is in them
    joined: float  # times that, with those for whom there is no room yet

    @classmethod
    def of(cls, workers: Sequence[WorkerLoad], waiting: _Waiting) -> "_Decoding":
        num_running = sum(load.num_running for load in workers)
        num_waiting = waiting.num_prompts + waiting.num_sequences
        return cls(
            len(workers),
            num_waiting + sum(load.num_sequences for load in workers),
            num_running,
            waiting.kv_use + sum(load.kv_use for load in workers),
            waiting.sequence_use + sum(load.sequence_use for load in workers),
            waiting.queued_s + sum(load.queued_s for load in workers),
            sum(load.step_base_s for load in workers) / len(workers),
            sum(load.step_load_s for load in workers),
            1.0 + waiting.num_sequences / num_running if num_running > 0 else 1.0,
        )

    def loads(self, objectives: Objectives) -> tuple[float, float, float, float]:
        left_s = objectives.inter_token_s - self.base_s  # where more workers are of any help
        return (
            self.kv_use / objectives.most_kv_use,
            self.sequence_use / objectives.most_sequence_use,
            self.load_s * self.joined / left_s if left_s > 0 else 0.0,
            self.queued_s / objectives.ttft_s,
        )

    def growth(self, num_workers: int) -> float:
        """Times as many sequences, if so many workers made the same tokens a second: fuller
        steps are slower ones, and whoever waits longer is there longer."""
        if self.num_running <= 0:
            return 1.0
        each_s = self.load_s / self.num_running
        step_s = self.base_s + each_s * max(1.0, self.num_running / self.num_workers)
        if step_s <= 0:
            return 1.0
        tokens = self.num_running / step_s
        share = tokens * each_s / num_workers
        if share >= _MOST_SHARE:
            return math.inf
        num_running = tokens * max(self.base_s / (1 - share), self.base_s + each_s)
        return max(1.0, num_running / self.num_running)


def _fewest_decoding(total: _Decoding, objectives: Objectives, which: int, most: int) -> int:
    load = total.loads(objectives)[which]
    for num_workers in range(1, most):
        if load * total.growth(num_workers) <= num_workers * _FIT:
            return num_workers
    return most


def _fewest(load: float) -> int:
    return math.ceil(load / _FIT)


def _ingress_needs(
    sample: PoolSample, waiting: _Waiting, state: PoolState, now: float
) -> list[_Need]:
    loads = [load for load in sample.loads if isinstance(load, IngressLoad)]
    num_requests = sum(load.num_requests for load in loads)
    load = num_requests / sample.objectives.most_requests
    return [_Need(f"{num_requests:.0f} requests", load, _fewest(load))]


_NEEDS: dict[str, Callable[[PoolSample, _Waiting, PoolState, float], list[_Need]]] = {
    PREFILL: _prefill_needs,
    DECODE: _decode_needs,
    INGRESS: _ingress_needs,
}


def scale(contexts: Mapping[Any, Any]) -> tuple[dict[Any, int], dict[Any, dict[str, Any]]]:
    """For Serve: deployments' contexts in, replicas and states of each out."""
    pools = {context.deployment_name: key for key, context in contexts.items()}
    states = {pool: _state_of(contexts[key]) for pool, key in pools.items()}
    now = time.time()
    targets = {pool: int(contexts[key].target_num_replicas) for pool, key in pools.items()}
    if _is_due(states.values(), now):
        samples = {pool: _sample_of(pool, contexts[key]) for pool, key in pools.items()}
        targets, states = decide(samples, states, now)
        _tell(contexts, samples, targets, states)
    return (
        {key: targets[pool] for pool, key in pools.items()},
        {key: states[pool]._asdict() for pool, key in pools.items()},
    )


def _is_due(states: Iterable[PoolState], now: float) -> bool:
    return any(state.at is None or not 0 <= now - state.at < PERIOD_S for state in states)


def _state_of(context: Any) -> PoolState:
    """Serve keeps notes of its own beside ours."""
    kept = context.policy_state or {}
    return PoolState(**{name: kept[name] for name in PoolState._fields if name in kept})


def _sample_of(pool: str, context: Any) -> PoolSample:
    recorded = context.aggregated_metrics or {}
    names = {name for values in recorded.values() for name in values}
    kind: type[Load] = IngressLoad if pool == INGRESS else WorkerLoad
    loads, objectives = [], Objectives()
    for name in sorted(names, key=str):
        told = {metric: values[name] for metric, values in recorded.items() if name in values}
        wanted = (*kind._fields, *Objectives._fields)
        numbers = {**kind._field_defaults, **told}
        if not all(math.isfinite(numbers.get(metric, math.nan)) for metric in wanted):
            continue
        loads.append(kind(**{metric: numbers[metric] for metric in kind._fields}))
        objectives = Objectives(**{metric: numbers[metric] for metric in Objectives._fields})
    return PoolSample(
        int(context.current_num_replicas),
        int(context.target_num_replicas),
        int(context.capacity_adjusted_min_replicas),
        int(context.capacity_adjusted_max_replicas),
        loads,
        objectives,
    )


def _tell(
    contexts: Mapping[Any, Any],
    samples: Mapping[str, PoolSample],
    targets: Mapping[str, int],
    states: Mapping[str, PoolState],
) -> None:
    """What was decided, for `kvrelay status` on any machine; changes also in Serve's log."""
    for pool, state in states.items():
        if targets[pool] != samples[pool].target:
            logger.info("kvrelay scales %s: %s", pool, state.change)
    told = {
        pool: {
            "at": states[pool].at,
            "num_running": sample.num_running,
            "target": targets[pool],
            "least": sample.least,
            "most": sample.most,
            "num_reporting": len(sample.loads),
            "why": states[pool].why,
            "changed_at": states[pool].changed_at,
            "change": states[pool].change,
        }
        for pool, sample in samples.items()
    }
    # Where this runs, Ray is there; where it is tested, it need not be.
    store = importlib.import_module("ray.experimental.internal_kv")
    errors = importlib.import_module("ray.exceptions")
    for name in {context.app_name for context in contexts.values()}:
        try:
            store._internal_kv_put(DECISIONS_KEY + name, json.dumps(told), overwrite=True)
        except errors.RayError as error:  # what was decided holds, whoever hears of it
            logger.warning("kvrelay's scaling could not be told: %s", error)
