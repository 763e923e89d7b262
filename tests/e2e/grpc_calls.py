"""Calls of the gRPC service, right and wrong, and how each ended: a table.

python -m tests.e2e.grpc_calls ADDRESS [rate]     with the key in KVRELAY_API_KEYS, if there is one
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import grpc

from protos.failures import FAILURE_KEY
from protos.generation_pb2 import Failure, SamplingParams
from protos.ingress_pb2 import GenerateRequest, GenerateUpdate, ListModels, ReadyRequest
from protos.ingress_pb2_grpc import GenerationStub

Metadata = tuple[tuple[str, str | bytes], ...]
TIMEOUT_S = 60.0
MANY = 200  # short calls, more than the rate that the server is to have


def main() -> None:
    address = sys.argv[1]
    keys = os.environ.get("KVRELAY_API_KEYS", "")
    key: Metadata = (("authorization", f"Bearer {keys}"),) if keys else ()
    _say("| call | status | answer |\n| --- | --- | --- |")
    with grpc.insecure_channel(address, [("grpc.enable_retries", 0)]) as channel:
        for name, call in _calls(GenerationStub(channel), key):
            status, said = _outcome(call)
            _say(f"| {name} | {status} | {said} |")
            if "failed to connect" in said:
                break


def _calls(stub: GenerationStub, key: Metadata) -> Iterator[tuple[str, Callable[[], str]]]:
    wrong: Metadata = (("authorization", "Bearer sk-of-nobody"),)

    def stream(metadata: Metadata = key, /, **said: Any) -> Callable[[], str]:
        return lambda: _tokens(
            stub.Generate(_request(**said), timeout=TIMEOUT_S, metadata=metadata)
        )

    def whole(metadata: Metadata = key, /, **said: Any) -> Callable[[], str]:
        return lambda: _tokens(
            [stub.GenerateWhole(_request(**said), timeout=TIMEOUT_S, metadata=metadata)]
        )

    yield "`Ready`, no key", lambda: str(stub.Ready(ReadyRequest(), timeout=TIMEOUT_S))
    yield (
        "`Models`",
        lambda: ", ".join(
            one.name for one in stub.Models(ListModels(), timeout=TIMEOUT_S, metadata=key).models
        ),
    )
    yield "`Generate`", stream()
    yield "`GenerateWhole`", whole()
    yield "`application: kvrelay`", stream((*key, ("application", "kvrelay")))
    yield "`application: other`", stream((*key, ("application", "other")))
    yield "no key", stream(())
    yield "no key, whole", whole(())
    yield "a wrong key", stream(wrong)
    yield "`max_tokens` of a million", stream(max_tokens=10**6)
    yield "a token id beyond the vocabulary", whole(token_ids=[10**9])
    yield "another `model`", stream(model="other")
    yield "`timeout_ms: 1`", stream(timeout_ms=1, max_tokens=1000)
    yield "more bytes than `max_body_bytes`", stream(token_ids=[5] * 200_000)
    if sys.argv[2:]:
        yield "more calls than the key's rate", lambda: _again(stream(max_tokens=1))


def _request(
    token_ids: Sequence[int] = (5, 6, 7), max_tokens: int = 8, **said: Any
) -> GenerateRequest:
    params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
    return GenerateRequest(token_ids=token_ids, params=params, **said)


def _tokens(updates: Iterable[GenerateUpdate]) -> str:
    said = list(updates)
    tokens = [token for update in said for delta in update.deltas for token in delta.token_ids]
    return f"{len(tokens)} tokens in {len(said)} messages: {tokens}"


def _again(call: Callable[[], str]) -> str:
    for _ in range(MANY):
        call()
    return f"{MANY} calls went through"


def _outcome(call: Callable[[], str]) -> tuple[str, str]:
    try:
        return "`OK`", call().strip()
    except grpc.RpcError as error:
        trailing: dict[str, Any] = dict(error.trailing_metadata() or ())  # type: ignore[arg-type]
        failure = Failure.FromString(trailing.get(FAILURE_KEY, b""))
        said = [f"`{failure.field}`" if failure.field else "", (error.details() or "")[:100]]
        if "retry-after" in trailing:
            said.append(f"retry-after {trailing['retry-after']}")
        return f"`{error.code().name}`", "; ".join(word for word in said if word)


def _say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
