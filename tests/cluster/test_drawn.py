"""What is drawn for a request: each process draws its own, though it was forked from another."""

import os

from cluster.openai.completion_request import CompletionRequest
from cluster.request_ids import new_request_id
from engine.generation_defaults import GenerationDefaults


def drawn_seed() -> str:
    request = CompletionRequest(prompt="x")
    defaults = GenerationDefaults()
    return str(request.sampling_params(defaults, max_tokens=1, logprobs=None).seed)


def test_a_forked_process_draws_other_ids_and_seeds() -> None:
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.write(writer, f"{new_request_id()} {drawn_seed()}".encode())
        finally:
            os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as said:
        its_id, its_seed = said.read().split()
    os.waitpid(child, 0)
    assert its_id != new_request_id()
    assert its_seed != drawn_seed()
