"""The formulas, by hand; and what is assumed of who has not measured."""

import pytest

from router.costs import (
    DOUBT,
    GUESS,
    Measured,
    exposed_s,
    full_step_s,
    num_steps,
    prefill_s,
    prompt_token_s,
    step_s,
    transfer_s,
)
from router.pairing import TIE
from router.workers import Leg, LinkSpeed, Load, StepCosts

COSTS = StepCosts(0.01, 0.001, 1e-6, 1e-5, 0.002)


def test_a_prompt_pays_for_its_steps_its_tokens_and_its_pairs() -> None:
    # 1500 tokens after 200: two steps; 1500 * 200 + 1500 * 750 = 1,425,000 pairs.
    assert prefill_s(COSTS, 1000, 1500, 200) == pytest.approx(0.02 + 1.5 + 1.425)


def test_a_step_of_unknown_size_takes_the_whole_prompt() -> None:
    assert num_steps(5000, 0) == 1
    assert prefill_s(COSTS, 0, 100, 0) == pytest.approx(0.01 + 0.1 + 0.005)


def test_full_steps_are_full() -> None:
    assert num_steps(1000, 1000) == 1
    assert num_steps(1001, 1000) == 2
    assert full_step_s(COSTS, 1000) == pytest.approx(1.01)
    assert prompt_token_s(COSTS, 1000) == pytest.approx(0.00101)


def test_a_decode_step_reads_the_context_of_all() -> None:
    assert step_s(COSTS, 4000, 3) == pytest.approx(0.01 + 0.04 + 0.006)


def test_a_transfer_takes_its_latency_and_its_bytes() -> None:
    assert transfer_s(LinkSpeed(1000.0, 0.5), 2000) == pytest.approx(2.5)
    assert transfer_s(LinkSpeed(1000.0, 0.5), 0) == 0
    assert transfer_s(None, 2000) == 0


@pytest.mark.parametrize(
    ("whole_s", "computing_s", "steps", "left_s"),
    [
        (0.4, 10.0, 1, 0.4),  # nothing is announced before the only step
        (0.4, 10.0, 4, 0.1),  # the last step's quarter
        (9.0, 4.0, 4, 6.0),  # three steps of a second each have hidden three seconds
    ],
)
def test_a_transfer_hides_behind_the_steps(
    whole_s: float, computing_s: float, steps: int, left_s: float
) -> None:
    assert exposed_s(whole_s, computing_s, steps) == pytest.approx(left_s)


MANY = 10**9  # of which those of late count


def note(
    measured: Measured,
    leg: Leg,
    incarnation: int,
    costs: StepCosts,
    num_steps: int = 0,
    at: float = 0.0,
) -> None:
    measured.note(leg, incarnation, Load(at, num_steps=num_steps, costs=costs))


def test_who_has_measured_nothing_takes_the_mean_of_its_leg() -> None:
    measured = Measured()
    note(measured, Leg.PREFILL, 1, StepCosts(0.01, 0.001))
    note(measured, Leg.PREFILL, 2, StepCosts(0.03, 0.003))
    note(measured, Leg.DECODE, 3, StepCosts(0.5, 0.5, 0.0, 0.5, 0.5))
    filled = measured.of(Leg.PREFILL, 4)
    assert filled[:2] == pytest.approx((0.02, 0.002))


def test_a_part_that_its_leg_never_measured_is_taken_from_the_other() -> None:
    """A decode worker that has computed no prompt yet is not infinitely fast at it."""
    measured = Measured()
    note(measured, Leg.PREFILL, 1, StepCosts(0.01, 0.001, 1e-6))
    own = StepCosts(0.004, 0.0, 0.0, 1e-5, 1e-4)
    note(measured, Leg.DECODE, 2, own)
    assert measured.of(Leg.DECODE, 2) == StepCosts(0.004, 0.001, 1e-6, 1e-5, 1e-4)


OTHERS = StepCosts(0.01, 0.001, 1e-6, 1e-5, 1e-4)
SLOW = StepCosts(0.4, 0.04, 4e-5, 4e-4, 4e-3)


def test_its_own_figures_stand_even_if_one_is_zero() -> None:
    measured = Measured()
    note(measured, Leg.DECODE, 1, OTHERS)
    own = StepCosts(0.0, 0.002, 0.0, 2e-5, 0.0)
    note(measured, Leg.DECODE, 2, own, MANY)
    found = measured.of(Leg.DECODE, 2)
    assert found.step_s < OTHERS.step_s / 1000
    assert found.prompt_token_s == pytest.approx(own.prompt_token_s, rel=0.01)


@pytest.mark.parametrize("leg", Leg)
def test_a_few_slow_steps_say_little_of_a_worker(leg: Leg) -> None:
    measured = Measured()
    note(measured, leg, 1, OTHERS, MANY)
    note(measured, leg, 2, SLOW, int(0.1 * DOUBT[leg]))
    assert measured.of(leg, 2).step_s < 5 * OTHERS.step_s
    assert measured.of(leg, 1) == pytest.approx(OTHERS, rel=0.2)


@pytest.mark.parametrize("num_steps", [5, 300])
@pytest.mark.parametrize("leg", Leg)
def test_who_has_made_no_steps_but_its_first_costs_what_the_others_cost(
    leg: Leg, num_steps: int
) -> None:
    """Nearer than what is a tie, or it would be given nothing where sequences are free."""
    measured = Measured()
    note(measured, leg, 1, OTHERS, num_steps)
    note(measured, leg, 2, SLOW)
    for found in (measured.of(leg, 1), measured.of(leg, 2), measured.mean(leg)):
        assert found == pytest.approx(OTHERS, rel=TIE / 2)


def test_a_worker_that_was_slow_and_is_given_nothing_is_tried_again() -> None:
    """Its own figures can change only by steps."""
    measured = Measured()
    note(measured, Leg.DECODE, 2, SLOW, MANY)
    for second in range(0, 601):
        note(measured, Leg.DECODE, 1, OTHERS, 80 * second, at=second)
        note(measured, Leg.DECODE, 2, SLOW, MANY, at=second)
        if second == 1:
            assert measured.of(Leg.DECODE, 2).step_s > 20 * OTHERS.step_s
    assert measured.of(Leg.DECODE, 2) == pytest.approx(OTHERS, rel=0.2)
    assert measured.of(Leg.DECODE, 1) == pytest.approx(OTHERS, rel=0.2)


def test_a_worker_that_goes_on_being_slow_counts_as_slow() -> None:
    measured = Measured()
    for second in range(60):
        note(measured, Leg.DECODE, 1, OTHERS, 80 * second, at=second)
        note(measured, Leg.DECODE, 2, SLOW, 20 * second, at=second)
    assert measured.of(Leg.DECODE, 2).step_s > 30 * OTHERS.step_s


def test_prefill_workers_that_made_no_steps_are_hoped_to_be_as_fast_as_anyone() -> None:
    """They warm up while all of a machine's workers start, and look slow by that until they are
    given something."""
    measured = Measured()
    slow = OTHERS._replace(prompt_token_s=3e-3, prompt_pair_s=3e-6)
    note(measured, Leg.PREFILL, 1, slow)
    note(measured, Leg.DECODE, 2, OTHERS, 1000)
    for found in (measured.of(Leg.PREFILL, 1), measured.mean(Leg.PREFILL)):
        assert found[1:3] == pytest.approx(OTHERS[1:3], rel=0.01)
    note(measured, Leg.PREFILL, 1, slow, 30)
    note(measured, Leg.DECODE, 2, OTHERS, 2000)
    assert measured.of(Leg.PREFILL, 1)[1:3] == pytest.approx(slow[1:3], rel=0.15)
    for second in range(300):  # it is given nothing for long
        note(measured, Leg.PREFILL, 1, slow, 30, at=second)
        note(measured, Leg.DECODE, 2, OTHERS, 2000 + second, at=second)
    assert measured.of(Leg.PREFILL, 1)[1:3] == pytest.approx(OTHERS[1:3], rel=0.25)


def test_who_looks_faster_than_anyone_is_taken_at_its_word() -> None:
    measured = Measured()
    fast = OTHERS._replace(prompt_token_s=1e-4, prompt_pair_s=1e-7)
    note(measured, Leg.PREFILL, 1, fast)
    note(measured, Leg.DECODE, 2, OTHERS, 1000)
    assert measured.of(Leg.PREFILL, 1)[1:3] == fast[1:3]


def test_nobody_has_measured_anything() -> None:
    assert Measured().of(Leg.DECODE, 1) == GUESS


def test_what_was_measured_by_who_is_gone_is_the_guess_for_who_comes() -> None:
    measured = Measured()
    note(measured, Leg.PREFILL, 1, StepCosts(0.01, 0.001))
    measured.forget(Leg.PREFILL, 1)
    assert measured.mean(Leg.PREFILL)[:2] == (0.01, 0.001)
    note(measured, Leg.PREFILL, 2, StepCosts(0.03, 0.003))
    assert measured.mean(Leg.PREFILL)[:2] == (0.03, 0.003)


def test_the_mean_follows_what_is_measured() -> None:
    measured = Measured()
    note(measured, Leg.PREFILL, 1, StepCosts(0.01, 0.001))
    assert measured.mean(Leg.PREFILL).step_s == pytest.approx(0.01)
    note(measured, Leg.PREFILL, 1, StepCosts(0.03, 0.001))
    assert measured.mean(Leg.PREFILL).step_s == pytest.approx(0.03)


def test_the_usual_link_is_between_those_that_were_measured() -> None:
    assert Measured().link is None
    measured = Measured()
    measured.note(Leg.DECODE, 1, Load(0.0, links={7: LinkSpeed(100.0, 0.1), 8: LinkSpeed(0.0)}))
    assert measured.link == LinkSpeed(100.0, 0.1)
    measured.note(Leg.DECODE, 1, Load(0.0, links={7: LinkSpeed(200.0, 0.2)}))
    assert measured.link is not None
    assert 100.0 < measured.link.bytes_per_s < 200.0
