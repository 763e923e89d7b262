"""What a load report may say."""

import math

import pytest

from kv_transfer.errors import TransferError
from kv_transfer.load_messages import check_load
from protos.events_pb2 import LinkReport, LoadReport, StepTimes


def test_a_usual_report_is_believed() -> None:
    links = [LinkReport(bytes_per_s=1e10, latency_s=1e-4), LinkReport()]
    check_load(LoadReport(still_s=0.5, links=links, step_times=StepTimes(prompt_token_s=1e-3)))
    check_load(LoadReport())


@pytest.mark.parametrize("wrong", [math.nan, math.inf, -math.inf, -1e-9, 1e300])
@pytest.mark.parametrize(
    ("make", "field"),
    [
        (lambda x: LoadReport(still_s=x), "load.still_s"),
        (lambda x: LoadReport(step_times=StepTimes(base_s=x)), "load.step_times.base_s"),
        (
            lambda x: LoadReport(links=[LinkReport(), LinkReport(latency_s=x)]),
            "load.links.latency_s",
        ),
    ],
)
def test_a_number_that_cannot_be_is_named(make: object, field: str, wrong: float) -> None:
    assert callable(make)
    with pytest.raises(TransferError, match=field):
        check_load(make(wrong))
