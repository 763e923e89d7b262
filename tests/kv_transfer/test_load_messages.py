"""What a load report may say."""

import math

import pytest

from kv_transfer.errors import TransferError
from kv_transfer.load_messages import LoadCheck, check_load
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


def test_each_field_that_cannot_be_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    check = LoadCheck("10.0.0.1:5")
    wrong = LoadReport(step_times=StepTimes(base_s=-1))
    for number in range(1, 5):
        assert not check.believes(LoadReport(still_s=-number))
        assert check.believes(LoadReport(still_s=number))
    assert not any(check.believes(wrong) for _ in range(3))
    assert [one.partition(", must")[0] for one in caplog.messages] == [
        "the reports of 10.0.0.1:5 are not believed: load.still_s: -1.0",
        "the reports of 10.0.0.1:5 are not believed: load.step_times.base_s: -1.0",
    ]
