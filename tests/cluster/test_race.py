"""Who ends an exchange's work, and what is told of it."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from cluster.http_exchange import Disconnected, HttpExchange
from cluster.openai.errors import ApiError
from tests.waiting import until

FAILED = ApiError(503, "the server stops")


class Racing:
    def __init__(self) -> None:
        self.left = asyncio.Event()
        self.ended_by: list[BaseException] = []
        self.exchange = HttpExchange({"path": "/", "headers": []}, self.receive, self.send)

    async def receive(self) -> dict[str, Any]:
        await self.left.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Any) -> None:
        raise AssertionError(message)

    async def work(self) -> None:
        try:
            await asyncio.Event().wait()
        except BaseException as error:
            await asyncio.sleep(0)  # to clean up takes a while
            self.ended_by.append(error)
            raise


@asynccontextmanager
async def racing(timeout_s: float = 60) -> AsyncIterator[tuple[Racing, asyncio.Task[int]]]:
    """The task gives how often it is still being cancelled, once it has caught what it was told."""
    one = Racing()

    async def run() -> int:
        with pytest.raises((ApiError, Disconnected)) as raised:
            await one.exchange.race(one.work(), timeout_s)
        one.ended_by.append(raised.value)
        task = asyncio.current_task()
        assert task is not None
        return task.cancelling()

    task = asyncio.create_task(run())
    await asyncio.sleep(0)
    yield one, task
    assert isinstance(one.ended_by[0], asyncio.CancelledError), "the work was to clean up"
    await until(lambda: len(asyncio.all_tasks()) == 1)


async def test_a_client_who_leaves() -> None:
    async with racing() as (one, task):
        one.left.set()
        assert await task == 0
    assert isinstance(one.ended_by[1], Disconnected)


async def test_a_failure_from_outside_counts_once() -> None:
    async with racing() as (one, task):
        one.exchange.fail(FAILED)
        one.exchange.fail(ApiError(500, "too late"))
        one.left.set()
        assert await task == 0
    assert one.ended_by[1] is FAILED
    one.exchange.fail(ApiError(500, "too late, too"))


async def test_the_end_of_its_time() -> None:
    async with racing(0.01) as (one, task):
        assert await task == 0
    error = one.ended_by[1]
    assert isinstance(error, ApiError)
    assert error.status == 408


async def test_whoever_runs_the_server_is_obeyed() -> None:
    async with racing() as (one, task):
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task


@pytest.mark.parametrize("fails_first", [True, False])
async def test_whoever_runs_the_server_is_obeyed_beside_a_failure(fails_first: bool) -> None:
    async with racing() as (one, task):
        ends: list[Callable[[], object]] = [lambda: one.exchange.fail(FAILED), task.cancel]
        for end in ends if fails_first else ends[::-1]:
            end()
        with pytest.raises(asyncio.CancelledError):
            await task


@pytest.mark.parametrize("error", [TimeoutError("its own"), ValueError("a bug")])
async def test_what_the_work_raises_is_not_taken_for_an_end(error: Exception) -> None:
    async def work() -> None:
        await asyncio.sleep(0)
        raise error

    with pytest.raises(type(error)) as raised:
        await Racing().exchange.race(work(), 60)
    assert raised.value is error
    await until(lambda: len(asyncio.all_tasks()) == 1)


async def long_pieces() -> AsyncIterator[bytes]:
    for _ in range(2):
        yield b"x" * (1 << 20)


@pytest.mark.parametrize("is_stream", [True, False])
async def test_an_answer_whose_header_is_not_taken_in_time_has_not_begun(is_stream: bool) -> None:
    """Of a client that asks again before it reads what it asked first."""
    taken, sent = asyncio.Event(), list[Any]()

    async def send(message: Any) -> None:
        await taken.wait()
        sent.append(message)

    exchange = HttpExchange({"path": "/", "headers": []}, Racing().receive, send)
    work = exchange.start_events() if is_stream else exchange.send_long_json(long_pieces())
    with pytest.raises(ApiError) as raised:
        await exchange.race(work, 0.01)
    assert exchange.status is None
    taken.set()
    await exchange.send_error(raised.value)
    assert [message["type"] for message in sent] == ["http.response.start", "http.response.body"]
    assert sent[0]["status"] == exchange.status == 408
