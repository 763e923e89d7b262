"""An ingress in a process of its own: it asks a decode worker, and waits."""

import asyncio
import json
import os
import sys

from cluster.session import SessionBackend
from decode_worker.answerer import LocalPrefill, PrefillCandidate, Route
from engine.request import GenerationRequest, RequestId
from engine.sampling import SamplingParams
from protos.rpc import Plane


async def ask(address: str, jobs: list[tuple[list[int], int, str]]) -> None:
    """Each job is a prompt, how many tokens it wants, and who computes it."""
    backend = SessionBackend(address, Plane())
    await backend.start()
    streams = []
    for number, (prompt, max_tokens, prefill) in enumerate(jobs):
        name = f"ingress {os.getpid()} {number}"
        params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
        request = GenerationRequest(RequestId(name), prompt, params, cache_salt=name)
        route = Route((PrefillCandidate(prefill),), (), LocalPrefill.NEVER)
        streams.append(backend.submit(request, route))
    await asyncio.Event().wait()


def main() -> None:
    asyncio.run(ask(*json.loads(sys.argv[1])))
