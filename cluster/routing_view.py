"""What a router knows and has decided lately, as JSON for whoever wonders why."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from router.ask import Placement, Source, Terms
from router.ledger import Account
from router.router import Decision, Router
from router.workers import Leg, Worker

Json = dict[str, Any]


def routing_view(router: Router, now: float, caller: str) -> Json:
    """Ages and waits in seconds; no token of any prompt. Whose a choice was is told to that
    caller alone."""
    stats = router.stats
    return {
        "policy": router.config.policy,
        "num_waiting": router.num_waiting,
        "backlog": {name: _short(one) for name, one in router.backlog(now)._asdict().items()},
        "num_under_way": router.num_under_way,
        "num_submitted": stats.num_submitted,
        "num_expired": stats.num_expired,
        "placed": dict(stats.placed),
        "refused": dict(stats.refused),
        "workers": list(_workers(router, now)),
        "decisions": [_decision(one, now, caller) for one in reversed(router.decisions)],
    }


def placement_fields(placement: Placement) -> Json:
    """For a line of a log."""
    best = placement.considered[0]
    return {
        "decode": placement.decode.address,
        "prefill": best.prefill.address if best.prefill else None,
        "reason": placement.reason,
        "cached_tokens": best.num_cached,
        "first_token_s": _short(best.first_token_s),
    }


def _workers(router: Router, now: float) -> Iterator[Json]:
    for leg in Leg:
        for account in router.accounts(leg):
            yield _worker(leg, account, router, now)


def _worker(leg: Leg, account: Account, router: Router, now: float) -> Json:
    load = account.standing.load
    fields: Json = {
        "leg": leg.value,
        **_named(account.worker),
        "takes_new": account.takes_new(now),
        "wait_s": _short(account.wait_s(now)),
        "index_blocks": len(router.index.of(account.worker)),
        "step_costs": {name: cost for name, cost in account.costs._asdict().items() if cost},
    }
    if load is not None:
        fields |= {
            "report_age_s": _short(now - load.at),
            "num_queued_tokens": load.num_queued_tokens,
            "num_running": load.num_running,
            "num_waiting": load.num_waiting,
            "num_fetching": load.num_fetching,
            "num_free_tokens": load.num_free_tokens,
            "draining": load.draining,
            "unhealthy": load.unhealthy,
        }
    if leg is Leg.DECODE:
        fields["num_sequences"] = account.seats.num_sequences
        fields["num_context_tokens"] = round(account.seats.num_context_tokens)
    return fields


def _decision(one: Decision, now: float, caller: str) -> Json:
    whose = {"request_id": one.request_id, "tenant": one.tenant} if one.tenant == caller else {}
    return {
        **whose,
        "age_s": _short(now - one.at),
        "num_tokens": one.num_tokens,
        "priority": one.priority,
        "waited_s": _short(one.waited_s),
        "reason": one.placement.reason,
        "considered": [_terms(terms) for terms in one.placement.considered],
    }


def _terms(terms: Terms) -> Json:
    """What it would cost, and of what that is made."""
    fields: Json = {}
    for name, value in terms._asdict().items():
        match value:
            case Worker():
                fields[name] = value.address
            case Source():
                fields[name] = {**_named(value.worker), "num_tokens": value.num_tokens}
            case float():
                fields[name] = _short(value)
            case _:
                fields[name] = value
    return fields


def _named(worker: Worker) -> Json:
    return {"address": worker.address, "incarnation": f"{worker.incarnation:x}"}


def _short(seconds: float) -> float:
    return round(seconds, 6)
