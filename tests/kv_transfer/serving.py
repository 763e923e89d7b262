"""A server with some services on loopback."""

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import grpc.aio

from protos.rpc import Plane


@asynccontextmanager
async def serving(*adders: Callable[[grpc.aio.Server], None]) -> AsyncIterator[grpc.aio.Channel]:
    plane = Plane()
    server = plane.server()
    for add in adders:
        add(server)
    address = plane.listen(server, "127.0.0.1:0")
    await server.start()
    try:
        async with plane.channel(address) as channel:
            yield channel
    finally:
        await server.stop(None)
