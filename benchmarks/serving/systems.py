"""The systems under measure: how each is started, as its own users start it."""

import json
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from benchmarks.machine import cores
from benchmarks.pairs import vllm_pair
from benchmarks.servers import Server, ServerError, free_port, kvrelay, module
from benchmarks.serving.processes import Family
from benchmarks.sides import KV_BYTES, Vllm, vllm
from benchmarks.workloads import MAX_LEN, ModelShape

FIRST_TOKEN_S = 300.0  # a first start compiles the model
_CLOSE_S = 30.0
# Five of the ten beginnings of the part `routing`, and what is being computed.
_FEW_BYTES = 104 << 20
# Of the part `overload`: what the router is told, and what goodput is counted by.
TTFT_OBJECTIVE_S, TPOT_OBJECTIVE_S = 1.0, 0.1
_RAY_LLM_NAME = "llama"  # it makes names of deployments of it


@dataclass(frozen=True)
class Place:
    """What every system is given. `vllm` is of an environment that has Ray, too."""

    shape: ModelShape
    model: Path
    logs: Path
    vllm: Vllm | None


@dataclass(frozen=True)
class Running:
    url: str
    model_name: str
    vocab_size: int
    family: Family
    start_s: float  # from the first process to the first token


@dataclass(frozen=True)
class System:
    """`start` gives the URL, once its port is open. `announced`: the file that tells when its front
    is what it will be, and that its engines' caches have been touched; a token may come sooner."""

    name: str
    num_engines: int
    start: Callable[[Place, Family], AbstractContextManager[str]]
    needs_vllm: bool = False
    served_name: str | None = None  # None: the model's path
    announced: str | None = None

    @contextmanager
    def running(self, place: Place) -> Iterator[Running]:
        family = Family()
        name = self.served_name or str(place.model)
        began = time.perf_counter()
        try:
            with self.start(place, family) as url:
                _await_first_token(url, name)
                start_s = time.perf_counter() - began
                if self.announced is not None:
                    log = place.logs / self.announced
                    _await_words(log, _ANNOUNCED, 1)
                    _await_words(log, _TOUCHED, self.num_engines)
                yield Running(url, name, place.shape.vocab_size, family, start_s)
                family.look()
        finally:
            family.end()


_OUR_LOG, _ANNOUNCED, _TOUCHED = "kvrelay-serve.log", " is served at ", " of cache touched in "


def _ours(
    *words: str, kv_bytes: int = KV_BYTES, **router: str | float
) -> Callable[[Place, Family], AbstractContextManager[str]]:
    @contextmanager
    def start(place: Place, family: Family) -> Iterator[str]:
        port = free_port()
        flags = [*words, "--dtype", "bfloat16", "--kv-cache-memory-bytes", str(kv_bytes)]
        if router:
            config = place.logs / "router.yaml"
            config.write_text(json.dumps({"router": router}))
            flags += ["--config", str(config)]
        command = kvrelay("serve", str(place.model), "--port", str(port), *flags)
        with serving(command, family.environment, place.logs / _OUR_LOG, port) as url:
            yield url

    return start


def _two_by_two(policy: str) -> Callable[[Place, Family], AbstractContextManager[str]]:
    pools = ["--prefill-replicas", "2", "--decode-replicas", "2"]
    return _ours(*pools, kv_bytes=_FEW_BYTES, policy=policy)


def _in_time() -> Callable[[Place, Family], AbstractContextManager[str]]:
    return _ours(ttft_objective_s=TTFT_OBJECTIVE_S, inter_token_objective_s=TPOT_OBJECTIVE_S)


@contextmanager
def _vllm(place: Place, family: Family) -> Iterator[str]:
    assert place.vllm
    port = free_port()
    command = [str(place.vllm.python), "-m", "vllm.entrypoints.cli.main", "serve"]
    command += [str(place.model), "--port", str(port), "--max-model-len", str(MAX_LEN)]
    command += ["--dtype", place.vllm.dtype, "--kv-cache-memory-bytes", str(KV_BYTES)]
    environment = {**vllm(place.vllm, cores()).environment, **family.environment}
    with serving(command, environment, place.logs / "vllm.log", port) as url:
        yield url


@contextmanager
def _vllm_pair(place: Place, family: Family) -> Iterator[str]:
    assert place.vllm
    with vllm_pair(place.vllm, place.model, place.logs, family.environment) as url:
        yield url


@contextmanager
def _ray_llm(place: Place, family: Family) -> Iterator[str]:
    assert place.vllm
    port, (first, second, *_) = free_port(), cores()
    command = [str(place.vllm.python), "-m", "benchmarks.peers.ray_llm", str(port)]
    command += [str(place.model), _RAY_LLM_NAME, f"{first},{second}", str(KV_BYTES), str(MAX_LEN)]
    command.append(place.vllm.dtype)
    environment = {
        **vllm(place.vllm, [first]).environment,
        **family.environment,
        "RAY_USAGE_STATS_ENABLED": "0",
    }
    # Ray's own processes would be bound to it, and all engines under them to that one core.
    del environment["VLLM_CPU_OMP_THREADS_BIND"]
    with serving(command, environment, place.logs / "ray-llm.log", port) as url:
        yield url


@contextmanager
def _empty_ingress(place: Place, family: Family) -> Iterator[str]:
    port = free_port()
    command = module("benchmarks.serving.empty_ingress", str(port))
    log = place.logs / "empty-ingress.log"
    with serving(command, family.environment, log, port) as url:
        yield url


@contextmanager
def serving(command: list[str], environment: dict[str, str], log: Path, port: int) -> Iterator[str]:
    with ExitStack() as stack:
        server = stack.enter_context(Server(command, environment, log))
        stack.callback(_stop, server)
        server.wait_for_port(port)
        yield f"http://127.0.0.1:{port}"


def _stop(server: Server) -> None:
    """By a signal to the process alone, which ends what it has started in its own order."""
    server.process.send_signal(signal.SIGTERM)
    try:
        server.process.wait(timeout=_CLOSE_S)
    except subprocess.TimeoutExpired:
        print(f"did not end within {_CLOSE_S:.0f} s: {server.process.args!r}", file=sys.stderr)


def _await_words(log: Path, words: str, times: int) -> None:
    deadline = time.monotonic() + FIRST_TOKEN_S
    while log.read_text().count(words) < times:
        if time.monotonic() > deadline:
            raise ServerError(f"{log} does not say {words!r} within {FIRST_TOKEN_S:.0f} s")
        time.sleep(0.05)


def _await_first_token(url: str, model_name: str) -> None:
    body = {"model": model_name, "prompt": [5, 6, 7], "max_tokens": 1, "stream": True}
    data = json.dumps(body).encode()
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(f"{url}/v1/completions", data, headers)
    deadline, last = time.monotonic() + FIRST_TOKEN_S, ""
    while time.monotonic() < deadline:
        try:
            with urllib.request.urlopen(request, timeout=FIRST_TOKEN_S) as answer:
                if b'"text"' in answer.read():
                    return
                last = "an answer without a token"
        except urllib.error.HTTPError as error:
            last = f"HTTP {error.code} {error.read()[:300]!r}"
        except OSError as error:
            last = str(error)
        time.sleep(0.05)
    raise ServerError(f"no token within {FIRST_TOKEN_S:.0f} s: {last}")


AUTO, NEVER, COLOCATED = "kvrelay", "kvrelay, strictly remote", "kvrelay colocated"
VLLM, VLLM_PAIR, RAY_LLM = "vLLM colocated", "vLLM 1P1D", "Ray Serve LLM 1P1D"
EMPTY = "empty ingress"
BY_COST, IN_TURN = "2 + 2, by cost", "2 + 2, round robin"
IN_TIME = "kvrelay with objectives"

SYSTEMS = {
    "kvrelay": System(AUTO, 2, _ours(), announced=_OUR_LOG),
    "kvrelay-never": System(NEVER, 2, _ours("--local-prefill", "never"), announced=_OUR_LOG),
    "kvrelay-colocated": System(COLOCATED, 1, _ours("--colocated"), announced=_OUR_LOG),
    "vllm": System(VLLM, 1, _vllm, needs_vllm=True),
    "vllm-pair": System(VLLM_PAIR, 2, _vllm_pair, needs_vllm=True),
    "ray-llm": System(RAY_LLM, 2, _ray_llm, needs_vllm=True, served_name=_RAY_LLM_NAME),
    "kvrelay-2x2": System(BY_COST, 4, _two_by_two("cost"), announced=_OUR_LOG),
    "kvrelay-2x2-round-robin": System(IN_TURN, 4, _two_by_two("round-robin"), announced=_OUR_LOG),
    "kvrelay-objectives": System(IN_TIME, 2, _in_time(), announced=_OUR_LOG),
    "empty-ingress": System(EMPTY, 0, _empty_ingress),
}
