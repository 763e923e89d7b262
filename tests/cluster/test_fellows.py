"""Ingresses that ask each other who there is."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from ray.exceptions import RayActorError

from cluster.membership import Replicas
from cluster.replicas import fellows
from cluster.replicas.fellows import METHOD, Fellows
from tests.waiting import until


class Answers:
    """Of one broadcast."""

    def __init__(self, given: Callable[[], Awaitable[list[Any]]]) -> None:
        self._given = given

    async def results_async(self, *, timeout_s: float, return_exceptions: bool) -> list[Any]:
        assert return_exceptions
        async with asyncio.timeout(timeout_s):
            return await self._given()


class Handle:
    """Of a deployment whose replicas are what the test says."""

    def __init__(self) -> None:
        self.replicas: list[tuple[str, dict[str, str]] | Exception] = []
        self.stopped = asyncio.Event()
        self.num_asked = 0

    def broadcast(self, method: str) -> Answers:
        assert method == METHOD
        self.num_asked += 1

        async def give() -> list[Any]:
            if self.stopped.is_set():
                await asyncio.Event().wait()
            return list(self.replicas)

        return Answers(give)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fellows, "PERIOD_S", 0.001)
    monkeypatch.setattr(fellows, "ANSWER_S", 0.05)


async def test_who_answers_is_there_and_who_is_silent_is_not_forgotten() -> None:
    handle, published = Handle(), list[Replicas]()
    handle.replicas = [("a", {"metrics": "1"})]
    one = Fellows(handle, published.append)  # type: ignore[arg-type]
    one.start()
    await until(lambda: bool(published))
    assert published[-1] == {"a": {"metrics": "1"}}
    handle.replicas = [("a", {"metrics": "1"}), ("b", {"metrics": "2"})]
    await until(lambda: len(published[-1]) == 2)
    handle.replicas = [("b", {"metrics": "2"}), RayActorError()]
    await until(lambda: published[-1] == {"b": {"metrics": "2"}})
    handle.stopped.set()
    known, num_asked = len(published), handle.num_asked
    await until(lambda: handle.num_asked >= num_asked + 3)
    assert published[-1] == {"b": {"metrics": "2"}}
    assert len(published) <= known + 1
    handle.stopped.clear()
    handle.replicas = [("c",)]  # type: ignore[list-item]  # of a version that says less
    num_asked = handle.num_asked
    await until(lambda: handle.num_asked >= num_asked + 3)
    handle.replicas = [("c", {"metrics": "3"})]
    await until(lambda: published[-1] == {"c": {"metrics": "3"}})
    await one.stop()
