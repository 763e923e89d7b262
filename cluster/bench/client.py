"""Asks an OpenAI-compatible server, and takes what it answers."""

import asyncio
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from cluster.bench.answer import Failure, FailureKind, Reception
from cluster.bench.connection import Address, Clock, Connections, TakeBody
from cluster.bench.errors import BrokenAnswerError, ProtocolError


class EndpointKind(StrEnum):
    COMPLETIONS = "completions"
    CHAT = "chat"

    @property
    def path(self) -> str:
        return "/v1/completions" if self is EndpointKind.COMPLETIONS else "/v1/chat/completions"


@dataclass(frozen=True)
class Asking:
    """What is the same in all requests."""

    model: str
    endpoint: EndpointKind = EndpointKind.COMPLETIONS
    ignore_eos: bool = True
    temperature: float = 0.0
    return_token_ids: bool = False
    extra: Mapping[str, Any] = field(default_factory=dict)

    def body(self, prompt: str, num_output: int) -> bytes:
        """`prompt` is a member of the object already; see `prompts.py`."""
        fields: dict[str, Any] = {
            "model": self.model,
            "max_tokens": num_output,
            "temperature": self.temperature,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if self.ignore_eos:
            fields["ignore_eos"] = True
        if self.return_token_ids:
            fields["return_token_ids"] = True
        fields.update(self.extra)
        return f"{json.dumps(fields)[:-1]},{prompt}}}".encode()


class Client:
    """HTTP to one server; owns the connections. Used on one event loop."""

    def __init__(
        self, address: Address, clock: Clock, *, api_key: str | None = None, timeout_s: float
    ) -> None:
        self._address = address
        self._authorization = f"Authorization: Bearer {api_key}\r\n" if api_key else ""
        self._timeout_s = timeout_s
        self._connections = Connections(address, clock)

    async def ask(self, path: str, body: bytes, reception: Reception) -> Failure | None:
        """Never raises for what the server or the network does."""
        try:
            async with asyncio.timeout(self._timeout_s):
                status = await self._exchange("POST", path, body, reception.take)
        except TimeoutError:
            return Failure(FailureKind.TIMEOUT, f"no complete answer in {self._timeout_s:g} s")
        except ProtocolError as error:
            return Failure(FailureKind.PROTOCOL, str(error))
        except BrokenAnswerError as error:
            return Failure(FailureKind.BROKEN, str(error))
        except ConnectionResetError as error:
            return Failure(FailureKind.BROKEN, str(error))
        except OSError as error:
            return Failure(FailureKind.NOT_CONNECTED, str(error))
        return reception.failure(status)

    async def fetch(self, method: str, path: str, fields: Any = None) -> tuple[int, bytes]:
        """One short answer and its status."""
        parts: list[bytes] = []
        body = b"" if fields is None else json.dumps(fields).encode()
        async with asyncio.timeout(self._timeout_s):
            status = await self._exchange(
                method, path, body, lambda now, status, part: parts.append(part)
            )
        return status, b"".join(parts)

    def close(self) -> None:
        self._connections.close()

    async def _exchange(self, method: str, path: str, body: bytes, take: TakeBody) -> int:
        head = (
            f"{method} {self._address.path}{path} HTTP/1.1\r\n"
            f"Host: {self._address.header}\r\n"
            f"{self._authorization}"
            "Content-Type: application/json\r\n"
            f"Content-Length: {len(body)}\r\n\r\n"
        )
        return await self._connections.exchange(head.encode("latin-1") + body, take)
