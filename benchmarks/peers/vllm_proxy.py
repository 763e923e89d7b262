"""The two-phase proxy that vLLM's prefill and decode servers need in front of them.

    python -m benchmarks.peers.vllm_proxy PORT PREFILL_URL DECODE_URL

First the prompt to the prefill server, for one token; then, with the transfer parameters that
came back, to the decode server, whose stream is the answer. Runs in vLLM's environment.
"""

import sys
import uuid
from collections.abc import AsyncIterator
from typing import Any

import httpx
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import StreamingResponse
from starlette.routing import Route

ASK_FOR_PREFILL = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}


def make_app(prefill_url: str, decode_url: str) -> Starlette:
    client = httpx.AsyncClient(timeout=None, limits=httpx.Limits(max_connections=None))

    async def completions(request: Request) -> StreamingResponse:
        body: dict[str, Any] = await request.json()
        headers = {"X-Request-Id": uuid.uuid4().hex}
        prefill = body | {"max_tokens": 1, "stream": False, "kv_transfer_params": ASK_FOR_PREFILL}
        prefill.pop("stream_options", None)
        first = await client.post(f"{prefill_url}/v1/completions", json=prefill, headers=headers)
        first.raise_for_status()
        decode = body | {"kv_transfer_params": first.json()["kv_transfer_params"]}

        async def answer() -> AsyncIterator[bytes]:
            async with client.stream(
                "POST", f"{decode_url}/v1/completions", json=decode, headers=headers
            ) as response:
                async for piece in response.aiter_raw():
                    yield piece

        return StreamingResponse(answer(), media_type="text/event-stream")

    return Starlette(routes=[Route("/v1/completions", completions, methods=["POST"])])


if __name__ == "__main__":
    port, prefill, decode = sys.argv[1:4]
    uvicorn.run(make_app(prefill, decode), port=int(port), log_level="warning")
