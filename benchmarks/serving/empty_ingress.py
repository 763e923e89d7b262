"""An application of Serve's that answers completions with nothing behind them.

    python -m benchmarks.serving.empty_ingress PORT

On the path that `kvrelay serve` uses, HAProxy and one ingress replica: what is left of the path's
rate when no token has to be made, routed or read. One chunk a token, each a write of its own.
"""

import asyncio
import json
import signal
import sys
import threading
from collections.abc import AsyncIterator
from typing import Any

from ray import serve
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import StreamingResponse
from starlette.routing import Route

from cluster.front_address import FrontAddress
from cluster.ray_cluster import own_ray_cluster, start_front

_MANY = 1_000_000
_PIECE = (
    b'data: {"id":"cmpl-0123456789abcdef","object":"text_completion","created":1700000000,'
    b'"model":"m","choices":[{"index":0,"text":" w1","logprobs":null,"finish_reason":null}]}\n\n'
)


async def _completions(request: Request) -> StreamingResponse:
    asked: dict[str, Any] = json.loads(await request.body())
    num_output = int(asked["max_tokens"])
    counts = {"prompt_tokens": len(asked["prompt"]), "completion_tokens": num_output}
    usage = json.dumps({"choices": [], "usage": counts})

    async def answer() -> AsyncIterator[bytes]:
        for _ in range(num_output):
            yield _PIECE
            await asyncio.sleep(0)
        yield f"data: {usage}\n\ndata: [DONE]\n\n".encode()

    return StreamingResponse(answer(), media_type="text/event-stream")


def _application() -> serve.Application:
    app = Starlette(routes=[Route("/v1/completions", _completions, methods=["POST"])])

    class Empty:
        pass

    deployed = serve.deployment(name="empty", max_ongoing_requests=_MANY)
    return deployed(serve.ingress(app)(Empty)).bind()


def main() -> None:
    stop = threading.Event()
    with own_ray_cluster(4, lambda _: stop.set()):
        start_front(FrontAddress("127.0.0.1", int(sys.argv[1])))
        serve.run(_application(), name="empty")
        signal.signal(signal.SIGTERM, lambda *_: stop.set())
        stop.wait()


if __name__ == "__main__":
    main()
