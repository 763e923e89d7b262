"""What the load generator itself costs: its CPU time for each piece of an answer.

    python -m benchmarks.load_generator [--streams N ...] [--every MS]

The server is a process of its own that sends one piece on each stream at every tick, so that no
two pieces come in one read: the dearest case. Where the generator does not keep up, its rate is
what it saturates at.
"""

import argparse
import asyncio
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path

from benchmarks import machine
from benchmarks.servers import Server, free_port, module
from cluster.bench.arrivals import ClosedLoop
from cluster.bench.lengths import Fixed
from cluster.bench.load import Load, run_load
from cluster.bench.measure import summarise
from cluster.bench.workload import Synthetic

NUM_PIECES = 256
HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
PIECE = (
    b'{"id":"cmpl-0123456789abcdef","object":"text_completion","created":1700000000,'
    b'"model":"m","choices":[{"index":0,"text":" hello","logprobs":null,"finish_reason":null}]}'
)
USAGE = b'{"choices":[],"usage":{"prompt_tokens":16,"completion_tokens":%d}}' % NUM_PIECES


def chunk(event: bytes) -> bytes:
    data = b"data: " + event + b"\n\n"
    return b"%x\r\n%s\r\n" % (len(data), data)


async def serve(port: int, every_s: float) -> None:
    piece, end = chunk(PIECE), chunk(USAGE) + chunk(b"[DONE]") + b"0\r\n\r\n"
    left: dict[asyncio.StreamWriter, int] = {}

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                length = int(head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0])
                await reader.readexactly(length)
                writer.write(HEAD)
                left[writer] = NUM_PIECES
        except (asyncio.IncompleteReadError, ConnectionError):
            left.pop(writer, None)

    server = await asyncio.start_server(answer, "127.0.0.1", port)
    async with server:
        while True:
            next_s = time.perf_counter() + every_s
            for writer in list(left):
                writer.write(piece)
                left[writer] -= 1
                if not left[writer]:
                    del left[writer]
                    writer.write(end)
            await asyncio.sleep(max(0.0, next_s - time.perf_counter()))


def measure(port: int, num_streams: int) -> str:
    load = Load(
        f"http://127.0.0.1:{port}",
        Synthetic(Fixed(16), Fixed(NUM_PIECES)),
        ClosedLoop(num_streams),
        num_requests=2 * num_streams,
        model="m",
        token_ids=range(100, 1000),
    )
    cpu_s = time.process_time()
    outcome = asyncio.run(run_load(load))
    cpu_s = time.process_time() - cpu_s
    summary = summarise(outcome.records)
    assert summary.num_complete == 2 * num_streams, summary.failures
    num_pieces = 2 * num_streams * NUM_PIECES
    cells = (
        num_streams,
        f"{num_pieces / summary.span_s:,.0f}",
        f"{cpu_s / num_pieces * 1e6:.1f}",
        f"{cpu_s / summary.span_s:.0%}",
    )
    return "| " + " | ".join(map(str, cells)) + " |"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--streams", type=int, nargs="+", default=[16, 64, 256, 512])
    parser.add_argument("--every", type=float, metavar="MS", default=10.0, help="of a tick")
    parser.add_argument("--serve", type=int, metavar="PORT", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.serve is not None:
        asyncio.run(serve(arguments.serve, arguments.every / 1e3))
        return
    port = free_port()
    words = ["benchmarks.load_generator", "--serve", str(port), "--every", str(arguments.every)]
    print("machine:", ", ".join(f"{k} {v}" for k, v in machine.describe().items()))
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        server = stack.enter_context(Server(module(*words), {}, folder / "server.log"))
        server.wait_for_port(port)
        print("| streams | pieces/s | generator's CPU, us a piece | of one core |")
        print("|---------|----------|-----------------------------|-------------|")
        for num_streams in arguments.streams:
            print(measure(port, num_streams))


if __name__ == "__main__":
    main()
