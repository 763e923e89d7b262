"""The routes beside generation, and what the HTTP side may import."""

import asyncio
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace

from engine.errors import EngineError, UnavailableError
from engine.request import GenerationRequest
from tests.cluster.conftest import Server, make_server
from tests.cluster.fakes import MAX_MODEL_LEN, Step, say, small_tokenizer


async def test_models(server: Server) -> None:
    models = (await server.client.get("/v1/models")).json()
    assert [model["id"] for model in models["data"]] == ["small", "tiny"]
    card = (await server.client.get("/v1/models/small")).json()
    assert card == models["data"][0]
    assert (card["object"], card["max_model_len"]) == ("model", MAX_MODEL_LEN)


async def test_tokenize_and_back(server: Server) -> None:
    text = "Köln 🦊"
    answer = await server.ok("/tokenize", prompt=text, return_token_strs=True)
    ids = small_tokenizer().encode(text)
    assert (answer["tokens"], answer["count"]) == (ids, len(ids))
    assert answer["token_strs"] == [small_tokenizer().token(i) for i in ids]
    assert answer["max_model_len"] == MAX_MODEL_LEN
    assert await server.ok("/detokenize", tokens=ids) == {"prompt": text}


async def test_an_answer_of_many_tokens_is_the_same_in_pieces(server: Server) -> None:
    text = 'é"\n' * 5000
    long = replace(server.model, max_model_len=10**6)
    answer = await make_server(model=long).ok("/tokenize", prompt=text, return_token_strs=True)
    assert answer["tokens"] == small_tokenizer().encode(text)
    assert answer["count"] == len(answer["token_strs"]) > 10_000


async def test_tokenize_messages(server: Server) -> None:
    messages = [{"role": "user", "content": "Hi"}]
    answer = await server.ok("/tokenize", messages=messages)
    prompt = (await server.ok("/detokenize", tokens=answer["tokens"]))["prompt"]
    assert prompt == "<s><|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    response = await server.post("/tokenize", messages=messages, prompt="x")
    assert response.status_code == 400
    assert (await server.post("/tokenize")).status_code == 400


async def test_tokenize_takes_what_chat_takes_of_the_last_message(server: Server) -> None:
    chat = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "I am"}]
    body = {"messages": chat, "continue_final_message": True}
    tokens = (await server.ok("/tokenize", **body))["tokens"]
    await server.ok("/v1/chat/completions", **body)
    assert tokens == list(server.backend.last.prompt_token_ids)
    for path in ("/tokenize", "/v1/chat/completions"):
        response = await server.post(path, **body, add_generation_prompt=True)
        assert response.status_code == 400


async def test_health_follows_the_engine(server: Server) -> None:
    assert (await server.client.get("/health")).status_code == 200
    server.backend.dead = "the engine died: out of memory"
    response = await server.client.get("/health")
    assert response.status_code == 503
    assert "out of memory" in response.json()["error"]["message"]


async def test_ready_means_that_tokens_were_generated(server: Server) -> None:
    failures: list[EngineError] = [UnavailableError("still loading"), EngineError("step failed")]
    server.backend.script = lambda request: iter([failures.pop(0)])
    assert (await server.client.get("/ready")).status_code == 503
    assert (await server.client.get("/ready")).status_code == 500
    server.backend.script = say()
    assert (await server.client.get("/ready")).status_code == 200
    assert server.backend.last.params.max_tokens == 2
    num_asked = len(server.backend.streams)
    assert (await server.client.get("/ready")).status_code == 200
    assert len(server.backend.streams) == num_asked
    server.backend.dead = "died"
    assert (await server.client.get("/ready")).status_code == 503


async def test_however_many_ask_it_is_proved_once(server: Server) -> None:
    asked = asyncio.gather(*(server.client.get("/ready") for _ in range(8)))
    assert {answer.status_code for answer in await asked} == {200}
    assert len(server.backend.streams) == 1


async def test_who_asks_and_leaves_ends_no_proof(server: Server) -> None:
    goes_on = asyncio.Event()

    def waits(request: GenerationRequest) -> Iterator[Step]:
        yield goes_on.wait()
        yield from say()(request)

    server.backend.script = waits
    first = asyncio.create_task(server.client.get("/ready"))
    while not server.backend.streams:
        await asyncio.sleep(0)
    first.cancel()
    second = asyncio.create_task(server.client.get("/ready"))
    await asyncio.sleep(0)
    goes_on.set()
    assert (await second).status_code == 200
    assert len(server.backend.streams) == 1


async def test_version(server: Server) -> None:
    assert (await server.client.get("/version")).json()["version"]


def test_http_side_needs_neither_torch_nor_ray() -> None:
    code = (
        "import sys, cluster.http, cluster.answering\n"
        "heavy = ('torch', 'transformers', 'numpy', 'numba', 'ray', 'grpc', 'safetensors')\n"
        "print([m for m in heavy if m in sys.modules])"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (result.stdout.strip(), result.stderr) == ("[]", "")
