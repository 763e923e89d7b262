"""Workers of both pools killed, stopped and hung under load, and clients that leave.

    python -m benchmarks.soak_router --seconds 240

Two prefill and two decode workers behind an ingress's router. Every few seconds one of them is
killed, stopped for a while, or its engine hangs; a part of the clients hangs up at a random moment.
Every answer is compared token by token with an undisturbed engine's. Exits with 1 if an answer was
wrong or failed, or if anything was left behind.
"""

import argparse
import asyncio
import signal
import sys
import tempfile
import time
from collections import Counter
from itertools import count
from pathlib import Path
from random import Random

from cluster.relay import Relay, RelayConfig
from engine.errors import EngineError
from engine.request import GenerationRequest, RequestId
from engine.sampling import SamplingParams
from engine.scheduler.outbox import StepOutput
from router.workers import Leg
from tests.engine.models_on_disk import make_tiny
from tests.engine.pair import Answer, make_engine
from tests.engine.test_exact import random_prompts
from tests.faults.fleet import Fleet, Job, undisturbed
from tests.faults.workers import ENGINE, Worker

NUM_CLIENTS = 12
NUM_TOKENS = 160
HANG_UP_SHARE = 0.2
QUIET_S = (2.0, 5.0)  # between one fault's end and the next
STOPPED_S = 4.0
STUCK_S = 7.0
CONFIG = RelayConfig(stall_s=2.0)
PROMPTS = random_prompts(16, 40, 250, seed=4)
JOBS = {
    str(number): Job(
        prompt,
        SamplingParams(
            temperature=0.9 * (number % 2), seed=number, max_tokens=NUM_TOKENS, ignore_eos=True
        ),
    )
    for number, prompt in enumerate(PROMPTS)
}


class Soak:
    """Clients of one relay, and what came of their requests."""

    def __init__(self, relay: Relay, expected: dict[str, Answer], random: Random) -> None:
        self.relay = relay
        self.counts: Counter[str] = Counter()
        self.problems: list[str] = []
        self.ending = False
        self.longest_pause_s = 0.0  # of an answer that had begun
        self._expected = expected
        self._random = random
        self._serial = count()

    async def client(self) -> None:
        while not self.ending:
            name = self._random.choice(list(JOBS))
            if self._random.random() < HANG_UP_SHARE:
                await self._hang_up(name, self._random.expovariate(3.0))
            else:
                await self._ask(name)

    async def _hang_up(self, name: str, after_s: float) -> None:
        asked = asyncio.ensure_future(self._read(name, Answer()))
        done, _ = await asyncio.wait({asked}, timeout=after_s)
        asked.cancel()
        await asyncio.wait({asked})
        if done and asked.exception() is not None:
            self._fail(f"{asked.exception()!r}")
        self.counts["answered before they left" if done else "left"] += 1

    async def _ask(self, name: str) -> None:
        answer = Answer()
        try:
            await self._read(name, answer)
        except EngineError as error:
            self._fail(f"{type(error).__name__}: {error}")
            return
        if answer.tokens == self._expected[name].tokens:
            self.counts["right"] += 1
        else:
            self._fail(f"a wrong answer to {name}")

    async def _read(self, name: str, answer: Answer) -> None:
        job, request_id = JOBS[name], RequestId(f"{next(self._serial)}")
        # every other one may go on from what is cached
        salt = request_id if self._random.random() < 0.5 else ""
        request = GenerationRequest(
            request_id, job.prompt, job.params, cache_salt=salt, timeout_s=60.0
        )
        stream = self.relay.submit(request)
        came = None
        try:
            async for update in stream:
                now = time.monotonic()
                self.longest_pause_s = max(self.longest_pause_s, now - (came or now))
                came = now
                answer.take(StepOutput({request_id: update}, {}), request_id)
        finally:
            stream.close()

    def _fail(self, what: str) -> None:
        self.counts["WRONG OR FAILED"] += 1
        self.problems.append(what)


class Faults:
    def __init__(self, fleet: Fleet, random: Random) -> None:
        self._fleet = fleet
        self._random = random
        self.counts: Counter[str] = Counter()

    async def one(self) -> None:
        leg = self._random.choice(list(Leg))
        victim = self._random.choice(self._fleet.pools[leg])
        what = self._random.choice([self._kill, self._kill, self._stop, self._hang])
        await what(victim)
        self.counts[f"{leg} {what.__name__.strip('_')}"] += 1

    async def _kill(self, victim: Worker) -> None:
        victim.send(signal.SIGKILL)
        await victim.died()
        await self._fleet.mend()

    async def _stop(self, victim: Worker) -> None:
        victim.send(signal.SIGSTOP)
        await asyncio.sleep(STOPPED_S)
        victim.go_on()

    async def _hang(self, victim: Worker) -> None:
        """Its engine, from the next hand-off on."""
        victim.set_faults("source.open=stuck worker.reserved=stuck")
        await asyncio.sleep(STUCK_S)
        victim.set_faults("")


async def soak(seconds: float, seed: int, folder: Path) -> bool:
    random = Random(seed)
    model = make_tiny("llama", folder / "model", max_position_embeddings=512).folder
    expected = undisturbed(make_engine(str(model), **ENGINE), JOBS)
    prefill, decode = ([Worker(folder, model, str(leg), "auto") for _ in range(2)] for leg in Leg)
    fleet = Fleet(prefill, decode)
    await fleet.start()
    faults = Faults(fleet, random)
    try:
        async with fleet.ingress(CONFIG) as relay:
            this = Soak(relay, expected, random)
            clients = [asyncio.ensure_future(this.client()) for _ in range(NUM_CLIENTS)]
            end = time.monotonic() + seconds
            while time.monotonic() < end:
                await asyncio.sleep(random.uniform(*QUIET_S))
                await faults.one()
            this.ending = True
            await asyncio.gather(*clients)
            await asyncio.sleep(1.0)
            left = [left for worker in fleet.living if (left := await worker.leftovers())]
        await fleet.check_settled()
    finally:
        await fleet.end()
    show(this, faults, left)
    return not (this.problems or left)


def show(this: Soak, faults: Faults, left: list[dict[str, int | str]]) -> None:
    rows: list[tuple[str, object]] = [
        *sorted(faults.counts.items()),
        *sorted(this.counts.items()),
        *((f"re-routed: {what}", number) for what, number in sorted(this.relay.reroutes.items())),
        *((f"placed: {why}", n) for why, n in sorted(this.relay.router.stats.placed.items())),
        ("longest pause of an answer", f"{this.longest_pause_s:.1f} s"),
        ("left behind, a second after the last request", left or "nothing"),
    ]
    for what, number in rows:
        print(f"| {what} | {number} |")
    for problem in this.problems:
        print(problem)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=240.0)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        well = asyncio.run(soak(arguments.seconds, arguments.seed, Path(folder)))
    print("all is well" if well else "NOT WELL")
    return 0 if well else 1


if __name__ == "__main__":
    sys.exit(main())
