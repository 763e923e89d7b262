"""A worker's load report as a router counts with it."""

from collections.abc import Sequence

from protos.cores import Cores
from protos.events_pb2 import BlockCounts, LinkReport, LoadReport, StepTimes
from router.workers import LinkSpeed, Load, StepCosts


def read_load(report: LoadReport, now: float) -> Load:
    num_free_tokens, num_total_tokens = _room(report.blocks, report.block_size)
    return Load(
        at=now,
        num_steps=report.num_steps,
        num_running=report.num_running,
        num_waiting=report.num_waiting,
        num_fetching=report.num_fetching,
        num_queued_tokens=report.num_queued_tokens,
        num_context_tokens=report.num_context_tokens,
        num_free_tokens=num_free_tokens,
        num_total_tokens=num_total_tokens,
        max_sequences=report.max_sequences,
        max_step_tokens=report.max_step_tokens,
        max_model_len=report.max_model_len,
        costs=_costs(report.step_times),
        links={link.peer_incarnation: _speed(link) for link in report.links},
        cores=Cores.read(report.cores),
        draining=report.draining,
        unhealthy=report.unhealthy,
        still_s=report.still_s,
        step_s=report.step_s,
    )


def _room(groups: Sequence[BlockCounts], block_size: int) -> tuple[int, int]:
    """Tokens for which there is room, and for which there would be in an empty cache. A window
    group's pool is smaller, since a long sequence needs no more of it than a short one: what
    counts is the share that is left in the group which is fullest."""
    num_total = max((group.total for group in groups), default=0) * block_size
    free = [num_total * (one.free + one.cached) // one.total for one in groups if one.total]
    return min(free, default=0), num_total


def _costs(times: StepTimes) -> StepCosts:
    return StepCosts(
        step_s=times.base_s,
        prompt_token_s=times.prompt_token_s,
        prompt_pair_s=times.prompt_pair_s,
        context_token_s=times.context_token_s,
        sequence_s=times.sequence_s,
    )


def _speed(link: LinkReport) -> LinkSpeed:
    return LinkSpeed(link.bytes_per_s, link.latency_s)
