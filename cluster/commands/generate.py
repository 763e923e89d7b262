"""`kvrelay generate`: one prompt, one answer, by an engine of its own or by a decode worker."""

import argparse
import asyncio
import sys
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from cluster.commands.console import answer, say, show_progress
from cluster.commands.engine_flags import add_engine_flags, engine_config
from cluster.commands.sampling_flags import add_sampling_flags, given_sampling
from cluster.commands.session_flags import add_session_flags, open_engine
from cluster.local_engine import LocalEngine
from cluster.openai.body import from_fields
from cluster.openai.chat_request import ChatMessage, ChatRequest
from cluster.openai.completion_request import CompletionRequest
from cluster.openai.errors import ApiError
from cluster.openai.generation import Generation
from cluster.openai.logprobs import TokenSpeller
from cluster.openai.plan import Plan, plan_chat, plan_completion
from cluster.remote_engine import RemoteEngine
from cluster.served_model import ServedModel
from engine.errors import ConfigError, RequestError
from engine.generation_defaults import GenerationDefaults
from engine.request import GenerationRequest, RequestId
from engine.step import TokenLogprobs

_DEFAULT_MAX_TOKENS = 256
# Of fields that are not called as their flags are.
_FLAGS = {"messages": "prompt", "seed": "sampling_seed", "top_logprobs": "logprobs"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", help="folder, Hugging Face id, or 'bundled'")
    parser.add_argument("--prompt", required=True, help="the text to go on from; - reads stdin")
    parser.add_argument("--chat", action="store_true", help="through the model's chat template")
    parser.add_argument("--system", help="the system message of a chat")
    parser.add_argument("--stream", action="store_true", help="show the text as it comes")
    default = f" (default: {_DEFAULT_MAX_TOKENS}; with --chat what there is room for)"
    add_sampling_flags(parser, {"max_tokens": default})
    add_session_flags(parser)
    add_engine_flags(parser)


def run(arguments: argparse.Namespace) -> int:
    if arguments.system is not None and not arguments.chat:
        raise RequestError("system", "needs --chat")
    config = engine_config(arguments)
    _check_sampling(arguments)
    arguments.prompt = _prompt(arguments)
    show_progress()
    engine = open_engine(arguments, config, check=lambda model: make_plan(arguments, model))
    asyncio.run(_generate(engine, arguments))
    return 0


def make_plan(arguments: argparse.Namespace, model: ServedModel) -> Plan:
    """By the rules of the HTTP API."""
    with _as_request_errors():
        return _plan(arguments, model)


def _check_sampling(arguments: argparse.Namespace) -> None:
    """Before a model is loaded, which takes a while."""
    with _as_request_errors():
        said = from_fields(CompletionRequest, {"prompt": "", **given_sampling(arguments)})
        said.sampling_params(
            GenerationDefaults(), max_tokens=said.max_tokens, logprobs=said.logprobs
        )


@contextmanager
def _as_request_errors() -> Iterator[None]:
    try:
        yield
    except ApiError as error:
        field = error.param or "prompt"
        message = error.message.removeprefix(f"{field}: ")
        raise RequestError(_FLAGS.get(field, field), message) from error
    except RequestError as error:
        raise error.renamed(_FLAGS.get(error.field, error.field)) from error


def _chat_fields(fields: Mapping[str, Any]) -> dict[str, Any]:
    """A chat asks for logprobs in two words."""
    if "logprobs" not in fields:
        return dict(fields)
    return {**fields, "logprobs": True, "top_logprobs": fields["logprobs"]}


def _prompt(arguments: argparse.Namespace) -> str:
    if arguments.prompt != "-":
        return str(arguments.prompt)
    if sys.stdin is None:
        raise ConfigError("prompt", "there is no standard input")
    try:
        return sys.stdin.read()
    except UnicodeDecodeError as error:
        raise ConfigError("prompt", f"standard input is no text: {error}") from error


def _plan(arguments: argparse.Namespace, model: ServedModel) -> Plan:
    text, fields = arguments.prompt, given_sampling(arguments)
    if arguments.chat:
        turns = [("system", arguments.system), ("user", text)]
        messages = [
            ChatMessage(role=role, content=said) for role, said in turns if said is not None
        ]
        body = {"messages": messages, **_chat_fields(fields)}
        return plan_chat(from_fields(ChatRequest, body), model)
    fields.setdefault("max_tokens", _DEFAULT_MAX_TOKENS)
    return plan_completion(from_fields(CompletionRequest, {"prompt": text, **fields}), model)


async def _generate(engine: LocalEngine | RemoteEngine, arguments: argparse.Namespace) -> None:
    model = await engine.start()
    try:
        await _answer(engine, model, make_plan(arguments, model), stream=arguments.stream)
    finally:
        await engine.stop()


async def _answer(
    engine: LocalEngine | RemoteEngine, model: ServedModel, plan: Plan, *, stream: bool
) -> None:
    prompt = plan.prompts[0]
    request = GenerationRequest(RequestId(uuid.uuid4().hex), prompt.token_ids, plan.params)
    started = first = time.monotonic()
    updates = engine.backend.submit(request)
    pieces = model.tokenizer.visible_pieces
    generation = Generation(updates, pieces, prompt, plan.params, plan.options)
    texts: list[str] = []
    logprobs: list[TokenLogprobs] = []
    try:
        async for parts in generation.parts():
            if not texts:
                first = time.monotonic()
            news = [part.text for part in parts]
            texts += news
            logprobs += [entry for part in parts for entry in part.logprobs or ()]
            if stream:
                answer("".join(news), end="")
    finally:
        generation.close()
    answer("" if stream else "".join(texts))
    report, speller = generation.report, TokenSpeller(model.tokenizer.pieces, as_ids=False)
    if report is not None and report.logprobs is not None:
        _tell_logprobs(speller, report.logprobs, "the prompt's tokens")
    if plan.params.logprobs is not None:
        _tell_logprobs(speller, logprobs, "the answer's tokens")
    _report(len(prompt.token_ids), generation.num_output_tokens, first - started, started)


def _tell_logprobs(
    speller: TokenSpeller, logprobs: Sequence[TokenLogprobs | None], of: str
) -> None:
    """A line for each token: its own, its rank, and the best ones'."""
    say(f"{of}, their logprobs and ranks, and the likeliest ones:")
    for entry in logprobs:
        if entry is None:  # the prompt's first
            continue
        best = ", ".join(f"{speller.key(token)!r} {logprob:.3f}" for token, logprob in entry.top)
        own = f"{speller.key(entry.token_id)!r} {entry.logprob:.3f} #{entry.rank}"
        say(f"  {own}  {best}".rstrip())


def _report(num_prompt: int, num_output: int, first_s: float, started: float) -> None:
    seconds = time.monotonic() - started
    rate = num_output / seconds if seconds > 0 else 0.0
    say(
        f"{num_prompt} tokens in, {num_output} out in {seconds:.2f} s ({rate:.1f} tokens/s), "
        f"the first after {first_s * 1000:.0f} ms"
    )
