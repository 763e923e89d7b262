"""Tests that go through models and connectors, or types and formats, need not go through all of
their products."""

from collections import defaultdict

import pytest

from tests.covering import covering

MARKER = (
    "crossed(*fixtures): of the cases that these multiply, each test and all of its other "
    "parameters meet every value of each, and these meet each other, but not all at once"
)


def leave_out_crossed(items: list[pytest.Item]) -> None:
    modules = defaultdict(list)
    for item in items:
        if isinstance(item, pytest.Function) and item.get_closest_marker("crossed"):
            modules[item.path].append(item)
    for crossed in modules.values():
        chosen = {crossed[number] for number in covering([axes(item) for item in crossed])}
        left_out = set(crossed) - chosen
        items[:] = [item for item in items if item not in left_out]


def axes(item: pytest.Function) -> tuple[str, ...]:
    """The test with what is its own, and the value of each fixture that it uses."""
    marker = item.get_closest_marker("crossed")
    assert marker is not None
    params = dict(item.callspec.params) if hasattr(item, "callspec") else {}
    crossed = tuple(str(params.pop(name, "")) for name in marker.args)
    return (f"{item.originalname} {params}", *crossed)
