"""What the host's benchmark takes apart adds up to the step."""

import pytest

from benchmarks.host import PARTS, STEP, measure


@pytest.mark.parametrize("ahead", [False, True])
def test_every_part_of_a_step_is_measured(ahead: bool) -> None:
    times = measure(num_seqs=3, context=20, steps=4, ahead=ahead)
    other = PARTS["_scheduler.schedule" if ahead else "_scheduler.schedule_ahead"]
    assert {part for part, measured in times.items() if measured} == {STEP, *PARTS.values()} - {
        other
    }
    assert all(len(measured) == 4 for measured in times.values() if measured)
    assert sum(sum(times[part]) for part in PARTS.values()) <= sum(times[STEP])
