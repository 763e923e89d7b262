"""A cluster's status for people. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from cluster.status.view import Pool, Replica, Status

_HEAD = ("pool", "replica", "state", "at", "running", "waiting", "queued", "KV", "hits", "")


def as_text(status: Status, now: float) -> str:
    lines = [f"{status.url}  {_state(status)}  on Ray at {status.ray_address}"]
    if status.message:
        lines.append(status.message)
    rows = [_HEAD, *(_row(pool, one) for pool in status.pools for one in pool.replicas)]
    lines += ["", *_aligned(rows), ""]
    if status.pools:
        lines += _aligned([_target(pool, now) for pool in status.pools])
    links = [link for pool in status.pools for one in pool.replicas for link in _links(one)]
    if links:
        lines += ["", *_aligned(links)]
    return "\n".join(lines)


def _state(status: Status) -> str:
    state = status.state.lower()
    if status.answers == (status.state == "RUNNING"):
        return state
    return f"{state}, but can answer" if status.answers else f"{state}, but cannot answer"


def _row(pool: Pool, one: Replica) -> Sequence[str]:
    where = one.address or (f"{one.node} pid {one.pid}" if one.pid else "")
    head = (pool.name, one.id, one.state.lower(), where)
    load = one.load
    if one.ingress is not None:
        num_waiting = one.ingress.num_waiting
        numbers = (str(one.ingress.num_open - num_waiting), str(num_waiting))
        return (*head, *numbers, "", "", "", one.ingress.problem)
    if load is None:
        silent = "" if one.address is None else "does not answer"
        return (*head, "", "", "", "", "", one.refusal or silent)
    remarks = ["draining"] if load.draining else []
    if load.unhealthy:
        remarks.append(f"unhealthy: {load.unhealthy}")
    return (
        *head,
        str(load.num_running),
        str(load.num_waiting + load.num_fetching),
        f"{load.num_queued_tokens} tok",
        f"{load.kv_use:.0%}",
        "-" if load.hit_rate is None else f"{load.hit_rate:.0%}",
        ", ".join(remarks),
    )


def _target(pool: Pool, now: float) -> Sequence[str]:
    num_running = sum(one.state.upper() == "RUNNING" for one in pool.replicas)
    if pool.target is None:
        why = "Serve lists no pools while it builds a new version, nor when that has failed"
        return (pool.name, f"{num_running} known", why, "")
    counts = f"{num_running} of {pool.target}"
    # Last, as it may be long.
    remark = f"{pool.state.lower()}: {in_one_line(pool.message)}" if pool.message else ""
    return (pool.name, counts, _scaling(pool, now), remark)


def _scaling(pool: Pool, now: float) -> str:
    if not pool.is_scaled:
        return "fixed"
    scaling = pool.scaling
    if scaling is None:
        return "a range; no policy of ours has looked at it yet"
    words = f"{scaling.least}-{scaling.most}; {_ago(now - scaling.at)}: {scaling.why}"
    if scaling.changed_at is not None:
        words += f"; {_ago(now - scaling.changed_at)}: {scaling.change}"
    return words


def in_one_line(message: str) -> str:
    """The last line of a traceback says what was wrong."""
    lines = [line.strip() for line in message.splitlines() if line.strip()]
    return " ".join([lines[0], lines[-1]] if len(lines) > 1 else lines)


def _links(one: Replica) -> Iterator[Sequence[str]]:
    for link in one.load.links if one.load else ():
        speed = f"{link.bytes_per_s / 1e9:.2f} GB/s"
        how = f"{link.connector} ({link.transport})"
        yield (f"{one.address} from {link.peer}", how, speed, f"{link.latency_s * 1e3:.2f} ms")


def _ago(seconds: float) -> str:
    if seconds < 90:
        return f"{max(0.0, seconds):.0f} s ago"
    return f"{seconds / 60:.0f} min ago" if seconds < 5400 else f"{seconds / 3600:.0f} h ago"


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return [
        "  ".join(word.ljust(width) for word, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]
