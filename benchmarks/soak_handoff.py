"""Workers killed and stopped under traffic, round after round; whether the others live on.

    python -m benchmarks.soak_handoff --rounds 20 --connector nixl

A round ends one worker in the middle of a transfer, in turn: the decode worker is killed while
it reads, the prefill worker is stopped and continued, the prefill worker is killed. Exits with 1
if an answer was wrong, if a worker died that nobody killed, or if anything was left behind.
"""

import argparse
import asyncio
import sys
import tempfile
from collections import Counter
from itertools import count
from pathlib import Path
from typing import Any

from engine.errors import UnavailableError
from engine.sampling import SamplingParams
from tests.engine.models_on_disk import make_tiny
from tests.engine.pair import Answer, make_engine
from tests.engine.test_exact import random_prompts
from tests.engine.test_hand_over import answer
from tests.faults.workers import ENGINE, Relay, Worker

# A prompt's blocks take 8 MiB, so that a READ is under way for a while.
MODEL: dict[str, Any] = {
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "initializer_range": 0.1,
    "max_position_embeddings": 512,
}
POOL: dict[str, Any] = {"kv_cache_memory_bytes": 64 << 20, "max_num_batched_tokens": 512}
PARAMS = SamplingParams(temperature=1.0, seed=5, max_tokens=6, ignore_eos=True)
NUM_CLIENTS = 3


class Soak:
    """A relay under traffic, and what came of it."""

    def __init__(self, relay: Relay, prompts: list[list[int]], expected: list[Answer]) -> None:
        self.relay = relay
        self.counts: Counter[str] = Counter()
        self._prompts = prompts
        self._expected = expected
        self._serial = count()

    async def client(self) -> None:
        while True:
            await self.ask()

    async def ask(self) -> None:
        number = next(self._serial)
        which = number % len(self._prompts)
        try:
            told = await self.relay.ask(self._prompts[which], PARAMS, salt=f"soak {number}")
        except UnavailableError:
            self.counts["failed, and said so"] += 1
            await asyncio.sleep(0.02)
            return
        right = told.tokens == self._expected[which].tokens
        self.counts["right answers" if right else "WRONG ANSWERS"] += 1

    async def kill_reader(self) -> None:
        relay = self.relay
        relay.decode.set_faults("puller.reading=kill")
        await relay.decode.died()
        self._check_alive("holders that survived their reader", relay.first, relay.second)
        await relay.decode.restart()
        await relay.reconnect()

    async def stop_holder(self) -> None:
        holder = self.relay.first
        holder.set_faults("holder.finished=stop")
        await holder.stopped()
        await asyncio.sleep(1.5)  # until it has been given up, mostly
        holder.go_on()
        self._check_alive("stopped and continued", holder, self.relay.decode)

    async def kill_holder(self) -> None:
        relay = self.relay
        relay.first.set_faults("holder.finished=kill")
        await relay.first.died()
        self._check_alive("readers that survived their holder", relay.second, relay.decode)
        await relay.first.restart()

    def _check_alive(self, what: str, *workers: Worker) -> None:
        alive = all(worker.child.returncode is None for worker in workers)
        self.counts[what if alive else "DIED WITHOUT BEING KILLED"] += 1

    @property
    def well(self) -> bool:
        return not any(name.isupper() for name in self.counts)


async def soak(rounds: int, connector: str, folder: Path) -> bool:
    model = make_tiny("llama", folder / "model", **MODEL).folder
    prompts = random_prompts(4, 480, 500, seed=3)
    engine = make_engine(str(model), **{**ENGINE, **POOL})
    expected = [answer(engine, prompt, PARAMS) for prompt in prompts]
    roles = ("prefill", "prefill", "decode")
    relay = Relay(*(Worker(folder, model, role, connector, **POOL) for role in roles))
    await relay.start()
    this = Soak(relay, prompts, expected)
    try:
        clients = [asyncio.ensure_future(this.client()) for _ in range(NUM_CLIENTS)]
        for number in range(rounds):
            async with asyncio.timeout(60):
                await (this.kill_reader, this.stop_holder, this.kill_holder)[number % 3]()
            print(f"round {number + 1}: {dict(this.counts)}", flush=True)
        for client in clients:
            client.cancel()
        await asyncio.gather(*clients, return_exceptions=True)
        for worker in relay.workers:
            await worker.check_settled()
    finally:
        await relay.end()
    return this.well


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument(
        "--connector", choices=["nixl", "socket", "collective", "auto"], default="nixl"
    )
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        well = asyncio.run(soak(arguments.rounds, arguments.connector, Path(folder)))
    print("all is well" if well else "NOT WELL")
    return 0 if well else 1


if __name__ == "__main__":
    sys.exit(main())
