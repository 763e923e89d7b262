"""What is drawn for a request: each process draws its own, though it was forked from another."""

import subprocess
import sys

# In a process that has no threads: a fork of one with gRPC's may wait for them for ever.
FORK = """
import os
from cluster.openai.completion_request import CompletionRequest
from cluster.drawn import new_request_id
from engine.generation_defaults import GenerationDefaults

child = os.fork()
if child:
    os.waitpid(child, 0)
request, defaults = CompletionRequest(prompt="x"), GenerationDefaults()
print(new_request_id(), request.sampling_params(defaults, max_tokens=1, logprobs=None).seed)
"""


def test_a_forked_process_draws_other_ids_and_seeds() -> None:
    done = subprocess.run([sys.executable, "-c", FORK], capture_output=True, text=True, check=True)
    (its_id, its_seed), (own_id, own_seed) = map(str.split, done.stdout.splitlines())
    assert its_id != own_id
    assert its_seed != own_seed
