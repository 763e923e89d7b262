"""A covering array leaves out no pair, and most of the cases."""

from itertools import combinations, product

import pytest

from tests.covering import covering


@pytest.mark.parametrize(
    ("sizes", "num_chosen"),
    [((24, 3, 4), 96), ((16, 3, 2), 48), ((4, 3, 2), 12), ((3, 2, 2), 6), ((5,), 0)],
)
def test_every_two_values_meet(sizes: tuple[int, ...], num_chosen: int) -> None:
    cases = list(product(*map(range, sizes)))
    chosen = [cases[number] for number in covering(cases)]
    assert len(chosen) == num_chosen
    for one, other in combinations(range(len(sizes)), 2):
        met = {(case[one], case[other]) for case in chosen}
        assert met == set(product(range(sizes[one]), range(sizes[other])))


def test_pairs_that_no_case_has_are_not_asked_for() -> None:
    assert covering([("a", "x"), ("a", "y"), ("b", "y"), ("b", "y")]) == [0, 1, 2]
