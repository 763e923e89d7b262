"""Who asks a cluster while something happens to it: a few prompts, greedily, again and again."""

from __future__ import annotations

import json
import threading
import uuid
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, TypeVar

import grpc
import httpx
import openai

from tests.e2e.cluster import Cluster, http
from tests.e2e.tokens import TokenClient

PROMPTS = [f"def function_{number}(argument, other):\n    " for number in range(8)]
NUM_TOKENS = 256  # enough that what is done to a worker meanwhile finds them under way
MORE_TOKENS = 800  # which outlast a page of metrics, on which it is seen who is at work
MANY_TOKENS = 1200  # under way for as long as is needed: who asks for them leaves or is cut off
NUM_UNREAD = 4  # long prompts at a time
_LONG_TEXT = "".join(
    f"def function_{number}(argument, other):\n    return\n" for number in range(90)
)
MOST_ASKED_AGAIN = 2  # of the hundreds of requests of a rollout
# Between two requests of one asker, so that those who start meanwhile have cores to start on: they
# give way to those who answer.
PAUSE_S, LONG_PAUSE_S = 1.0, 3.0  # after a short answer, and after a long one
NUM_ASKERS = 2  # of long answers, in a rollout


def body(prompt: str | list[str], **more: Any) -> dict[str, Any]:
    return {
        "model": "mine",
        "prompt": prompt,
        "temperature": 0,
        "max_tokens": NUM_TOKENS,
        "ignore_eos": True,
        **more,
    }


T = TypeVar("T")


asked_again: list[str] = []  # requests that had to be, and why


class NotHeardError(Exception):
    """HAProxy was replaced before it had the request's whole header."""


def asked(ask: Callable[[], T]) -> T:
    """Once more where the connection was closed before a word of an answer, as it may be when
    HAProxy is replaced by another one at that moment, or where that one had not heard all of the
    question; OpenAI's client does so, too, and gRPC's of a call that a server has not begun."""
    try:
        return ask()
    except NotHeardError as error:
        asked_again.append(str(error))
    except httpx.RemoteProtocolError as error:
        if "without sending a response" not in str(error):
            raise
        asked_again.append(str(error))
    except grpc.RpcError as error:
        if "Stream removed (GOAWAY received" not in str(error):
            raise
        asked_again.append(str(error))
    return ask()


def heard(response: httpx.Response) -> httpx.Response:
    """Our own 408 is JSON."""
    if response.status_code == 408 and response.headers["content-type"].startswith("text/html"):
        raise NotHeardError(response.read())
    return response


@contextmanager
def all_along(stop: threading.Event, *asks: Callable[[], None]) -> Iterator[None]:
    """Each in a thread of its own, which ends by itself once `stop` is set; what one raised is
    raised here."""
    with ThreadPoolExecutor(len(asks)) as threads:
        asking = [threads.submit(ask) for ask in asks]
        try:
            yield
        finally:
            stop.set()
        for one in asking:
            one.result(120)


@contextmanager
def hardly_any_asked_again() -> Iterator[None]:
    asked_again.clear()
    yield
    assert len(asked_again) <= MOST_ASKED_AGAIN, asked_again


def streamed(
    url: str, prompt: str, begun: threading.Event | None = None, **more: Any
) -> tuple[str, int]:
    """The whole text and the number of tokens."""
    options = {"stream": True, "stream_options": {"include_usage": True}, **more}
    return asked(lambda: _streamed(url, body(prompt, **options), begun))


def _streamed(url: str, said: dict[str, Any], begun: threading.Event | None) -> tuple[str, int]:
    text, usage = "", {"completion_tokens": 0}
    with http.stream("POST", f"{url}/v1/completions", json=said, timeout=120) as response:
        assert heard(response).status_code == 200, response.read()
        for line in response.iter_lines():
            if not line.startswith("data: ") or line == "data: [DONE]":
                continue
            event = json.loads(line.removeprefix("data: "))
            assert "error" not in event, event
            text += "".join(choice["text"] for choice in event["choices"])
            usage = event.get("usage") or usage
            if begun is not None and text:
                begun.set()
    return text, usage["completion_tokens"]


def all_at_once(cluster: Cluster, prompts: Sequence[str]) -> list[tuple[str, int]]:
    with ThreadPoolExecutor(len(prompts)) as threads:
        return list(threads.map(lambda prompt: streamed(cluster.url, prompt), prompts))


class Load:
    """All prompts at once, each begun when it is entered."""

    def __init__(self, cluster: Cluster, num_tokens: int = NUM_TOKENS) -> None:
        self._threads = ThreadPoolExecutor(len(PROMPTS))
        begun = [threading.Event() for _ in PROMPTS]
        self.answers: list[Future[tuple[str, int]]] = [
            self._threads.submit(streamed, cluster.url, prompt, event, max_tokens=num_tokens)
            for prompt, event in zip(PROMPTS, begun, strict=True)
        ]
        assert all(event.wait(60) for event in begun)

    def results(self) -> list[tuple[str, int]]:
        return [answer.result(120) for answer in self.answers]

    def kept(self) -> list[tuple[str, int] | None]:
        """None for those that broke off."""
        lost = [isinstance(one.exception(120), httpx.HTTPError) for one in self.answers]
        return [
            None if is_lost else answer.result()
            for is_lost, answer in zip(lost, self.answers, strict=True)
        ]


def unread_prompt() -> str:
    """Long, and no worker has seen it."""
    return f"# {uuid.uuid4()}\n{_LONG_TEXT}"


def short_answer(cluster: Cluster, prompt: str) -> str:
    said, url = body(prompt, max_tokens=4), f"{cluster.url}/v1/completions"
    response = asked(lambda: heard(http.post(url, json=said, timeout=60)))
    assert response.status_code == 200, response.text
    text: str = response.json()["choices"][0]["text"]
    return text


@contextmanager
def asking_to_read(cluster: Cluster) -> Iterator[dict[str, str]]:
    """Unread prompts, several at any moment; the answers are there at the end."""
    answers: dict[str, str] = {}
    stop = threading.Event()

    def ask() -> None:
        while not stop.is_set():
            prompt = unread_prompt()
            answers[prompt] = short_answer(cluster, prompt)

    with all_along(stop, *[ask] * NUM_UNREAD):
        yield answers


@contextmanager
def idle_meanwhile(cluster: Cluster) -> Iterator[None]:
    """Clients that ask once and, when all is over, once more, and would do so on the connections
    that they have: those were of a front that knows none of the ingresses that are there."""
    forever = httpx.Limits(keepalive_expiry=None)
    with ExitStack() as stack:
        clients = [stack.enter_context(httpx.Client(limits=forever, timeout=60)) for _ in range(4)]

        def ask() -> None:
            for client in clients:
                said = body(PROMPTS[0], max_tokens=2)
                assert client.post(f"{cluster.url}/v1/completions", json=said).status_code == 200

        ask()
        yield
        ask()


@contextmanager
def keep_asking(cluster: Cluster, num_askers: int = NUM_ASKERS) -> Iterator[list[tuple[str, int]]]:
    """Some of the prompts, again and again, and short requests, of which some come at any moment;
    every request must succeed. The short ones' answers are left out."""
    answers: list[tuple[str, int]] = []
    stop = threading.Event()

    def ask(prompt: str) -> None:
        while not stop.is_set():
            answers.append(streamed(cluster.url, prompt))
            stop.wait(LONG_PAUSE_S)

    def ask_shortly(prompt: str) -> None:
        short = body(prompt, max_tokens=2)
        while not stop.is_set():
            answer = asked(
                lambda: heard(http.post(f"{cluster.url}/v1/completions", json=short, timeout=20))
            )
            assert answer.status_code == 200, answer.text
            stop.wait(PAUSE_S)

    asks = [partial(ask, prompt) for prompt in PROMPTS[:num_askers]]
    with all_along(stop, *asks, partial(ask_shortly, PROMPTS[4])):
        yield answers


@contextmanager
def keep_asking_otherwise(cluster: Cluster, text: str, num_tokens: int) -> Iterator[Counter[str]]:
    """For the first prompt's answer: by gRPC over one connection, and by the official client,
    which asks again by itself where it is not answered."""
    counts: Counter[str] = Counter()
    stop = threading.Event()

    def ask_for_tokens() -> None:
        client = TokenClient(cluster.grpc_address, cluster.url)
        request = client.request(PROMPTS[0], num_tokens)
        while not stop.is_set():
            assert client.text(asked(lambda: client.tokens(request))) == text
            counts["tokens"] += 1
            stop.wait(LONG_PAUSE_S)

    def ask_officially() -> None:
        with openai.OpenAI(base_url=f"{cluster.url}/v1", api_key="none") as client:
            while not stop.is_set():
                raw = client.completions.with_raw_response.create(
                    model="mine", prompt=PROMPTS[0], temperature=0, max_tokens=4
                )
                asked_again.extend(["official"] * raw.retries_taken)
                answer = raw.parse()
                assert text.startswith(answer.choices[0].text)
                counts["official"] += 1
                stop.wait(PAUSE_S)

    with all_along(stop, ask_for_tokens, ask_officially):
        yield counts
