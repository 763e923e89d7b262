"""What a replica knows of its load as the numbers that the autoscaling policy looks at."""

from __future__ import annotations

from dataclasses import dataclass

from cluster.autoscaling import IngressLoad, WorkerLoad
from engine.step_times import whole_prompt_token_s
from protos.events_pb2 import BlockCounts, LoadReport
from router.router import Router


@dataclass(slots=True)
class LoadMeter:
    """Of one worker; its reports come one after the other. Reads no clock."""

    max_num_seqs: int
    startup_s: float
    _steps_s: float | None = None
    _at: float = 0.0

    def read(self, report: LoadReport, steps_s: float, now: float) -> WorkerLoad:
        """`steps_s`: that all of its steps have taken, with the one under way so far: one may take
        longer than it is from one reading to the next."""
        times = report.step_times
        token_s = whole_prompt_token_s(
            times.base_s, times.prompt_token_s, times.sequence_s, times.prompt_pair_s
        )
        num_sequences = report.num_running + report.num_waiting + report.num_fetching
        load_s = times.sequence_s * report.num_running
        return WorkerLoad(
            num_sequences=num_sequences,
            num_running=report.num_running,
            kv_use=max((_use(blocks) for blocks in report.blocks), default=0.0),
            sequence_use=num_sequences / self.max_num_seqs,
            queued_s=report.num_queued_tokens * token_s,
            busy=self._busy(steps_s, now),
            step_base_s=times.base_s,
            step_load_s=load_s + times.context_token_s * report.num_context_tokens,
            startup_s=self.startup_s,
        )

    def _busy(self, steps_s: float, now: float) -> float:
        before, passed_s = self._steps_s, now - self._at
        self._steps_s, self._at = steps_s, now
        if before is None or passed_s <= 0:
            return 0.0
        return min(1.0, max(0.0, steps_s - before) / passed_s)


def ingress_load(router: Router, num_requests: int, startup_s: float, now: float) -> IngressLoad:
    """Of an ingress with so many requests, of which some may wait at its router."""
    backlog = router.backlog(now)
    return IngressLoad(
        num_requests=num_requests,
        startup_s=startup_s,
        prefill_prompts=backlog.num_prefill_prompts,
        prefill_queued_s=backlog.prefill_s,
        decode_prompts=backlog.num_decode_prompts,
        decode_queued_s=backlog.decode_s,
        num_sequences=backlog.num_sequences,
        sequence_use=backlog.sequence_use,
        kv_use=backlog.kv_use,
    )


def _use(blocks: BlockCounts) -> float:
    """The share that nobody else can have now."""
    return (blocks.held + blocks.quarantined) / max(1, blocks.total)
