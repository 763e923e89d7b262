"""Ideal assumptions to compare policies under: prefill queues and nothing else.

One server for each prefill worker that computes one whole prompt after the other, loads known as
they change, transfers and decoding that take no time.
"""

from dataclasses import replace

from benchmarks.simulate.cluster import ClusterPlan
from benchmarks.simulate.device import Device
from benchmarks.simulate.feed import Delays
from router.workers import LinkSpeed

SPEED = 4.5
_NOTHING = 1e-12


def equal_device(device: Device) -> Device:
    """A step is its arithmetic and 4 ms."""
    return replace(
        device,
        weight_bytes=0.0,
        head_parameters=0.0,
        bytes_per_s=1e30,
        decode_step_s=_NOTHING,
        link=LinkSpeed(1e30, 0.0),
    )


def equal_plan(plan: ClusterPlan) -> ClusterPlan:
    return replace(
        plan,
        num_decode=1,
        prefill_step_tokens=None,
        message_s=0.0,
        delays=Delays(events_s=0.0, reports_s=0.0, at_once=True),
        endless_decode=True,
    )
