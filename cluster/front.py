"""What each HTTP route does."""

import asyncio
import json
import math
import time
from collections.abc import Callable
from typing import Protocol

from cluster.answering import Answer
from cluster.backend import Backend, Pooled, Refusing, Submit
from cluster.drawn import new_request_id
from cluster.gate import Gate
from cluster.http_exchange import HttpExchange, HttpLimits
from cluster.metrics.meter import Meter
from cluster.metrics.page import CONTENT_TYPE
from cluster.metrics.record import Origin
from cluster.off_loop import off_loop
from cluster.openai.body import AnyBody, parse
from cluster.openai.chat_request import ChatRequest
from cluster.openai.chat_wording import ChatWording
from cluster.openai.completion_request import CompletionRequest
from cluster.openai.completion_wording import CompletionWording
from cluster.openai.errors import ApiError, api_error, bad_request, not_in_time
from cluster.openai.events import dump, dump_long
from cluster.openai.plan import Plan, plan_chat, plan_completion
from cluster.openai.request_limits import RequestLimits
from cluster.openai.responses.request import ResponsesRequest, plan_response
from cluster.openai.token_requests import DetokenizeRequest, TokenizeRequest
from cluster.openai.wording import Json
from cluster.request_ids import HEADER as REQUEST_ID
from cluster.request_ids import is_request_id
from cluster.response_answer import ResponseAnswer
from cluster.served_model import ServedModel
from cluster.under_way import LEAST_S, OVERTIME_S, UnderWay
from engine.errors import DeadlineError, EngineError, RequestError, UnavailableError
from engine.generation_stream import GenerationStream
from engine.request import GenerationRequest, RequestId
from engine.sampling import SamplingParams
from protos.version import version

_READY_TIMEOUT_S = 30.0
_READY_PROMPT = 100  # tokens: more than a block


class Answering(Protocol):
    """An answer that is still to be written."""

    async def write(self, submit: Submit, timeout_s: float) -> None: ...

    @property
    def num_output_tokens(self) -> int: ...


class Front:
    """The handlers of one server; all of them run on its event loop."""

    def __init__(
        self,
        backend: Backend,
        model: ServedModel,
        limits: HttpLimits,
        gate: Gate,
        request_limits: RequestLimits | None = None,
        meter: Meter | None = None,
    ) -> None:
        self._meter = meter or Meter(model)
        self._backend = backend
        self._refusing = backend if isinstance(backend, Refusing) else None
        self._pooled = backend if isinstance(backend, Pooled) else None
        self._model = model
        self._limits = limits
        self._gate = gate
        self._request_limits = request_limits or RequestLimits()
        self._proof: asyncio.Task[None] | None = None  # that it is ready
        self._was_handed_over = False  # the prompt of that
        self._under_way = UnderWay()

    async def completions(self, exchange: HttpExchange) -> None:
        def prepare(body: bytes) -> tuple[Plan, Answering]:
            request = self._asked(CompletionRequest, body)
            plan = plan_completion(request, self._model, self._request_limits)
            wording = CompletionWording(self._model.tokenizer, plan.options)
            return plan, Answer(plan, wording, self._model, exchange)

        await self._generate(exchange, prepare)

    async def chat_completions(self, exchange: HttpExchange) -> None:
        def prepare(body: bytes) -> tuple[Plan, Answering]:
            request = self._asked(ChatRequest, body)
            plan = plan_chat(request, self._model, self._request_limits)
            wording = ChatWording(self._model.chat_format, plan.options)
            return plan, Answer(plan, wording, self._model, exchange)

        await self._generate(exchange, prepare)

    async def responses(self, exchange: HttpExchange) -> None:
        def prepare(body: bytes) -> tuple[Plan, Answering]:
            request = self._asked(ResponsesRequest, body)
            plan = plan_response(request, self._model, self._request_limits)
            return plan, ResponseAnswer(plan, request, self._model, exchange)

        await self._generate(exchange, prepare)

    def _asked(self, kind: type[AnyBody], body: bytes) -> AnyBody:
        """ApiError where that is no such body, or asks another model."""
        request = parse(kind, body)
        self._model.check_name(request.model)
        return request

    async def tokenize(self, exchange: HttpExchange) -> None:
        def answer(body: bytes) -> Json:
            request = self._asked(TokenizeRequest, body)
            return self._tokenize(request)

        await self._compute(exchange, answer)

    async def detokenize(self, exchange: HttpExchange) -> None:
        def answer(body: bytes) -> Json:
            request = self._asked(DetokenizeRequest, body)
            self._model.check_token_ids(request.tokens, "tokens")
            return {"prompt": self._model.tokenizer.decode(request.tokens)}

        await self._compute(exchange, answer)

    async def models(self, exchange: HttpExchange) -> None:
        cards = [self._model.card(name) for name in self._model.names]
        await _send(exchange, {"object": "list", "data": cards})

    async def model(self, exchange: HttpExchange) -> None:
        name = exchange.path_params["name"]
        self._model.check_name(name)
        await _send(exchange, self._model.card(name))

    async def version(self, exchange: HttpExchange) -> None:
        await _send(exchange, {"version": version()})

    async def health(self, exchange: HttpExchange) -> None:
        """The process answers, it may, and its engine can still generate."""
        self._check_health()
        await _send(exchange, {"status": "ok"})

    def problem(self) -> str:
        """What `health` would say is wrong."""
        try:
            self._check_health()
        except UnavailableError as error:
            return str(error)
        return ""

    def _check_health(self) -> None:
        self._gate.check_open()
        self._backend.check_health()

    async def ready(self, exchange: HttpExchange) -> None:
        """Tokens have come through every pool, once, however many ask; health from then on. What
        decode workers did by themselves proves no more once a prefill worker has come."""
        self._check_health()
        hands_over = self._pooled is not None and self._pooled.hands_over
        is_outdone = hands_over and not self._was_handed_over
        if self._proof is None or _has_failed(self._proof) or is_outdone:
            self._was_handed_over = hands_over
            through = self._backend.submit if self._pooled is None else self._pooled.submit_through
            self._proof = asyncio.create_task(_read(through(self._probe())))
        await asyncio.shield(self._proof)
        await _send(exchange, {"status": "ready"})

    async def metrics(self, exchange: HttpExchange) -> None:
        """Of the whole cluster, for Prometheus."""
        await exchange.send_text(await self._meter.pages.page(), CONTENT_TYPE)

    async def metrics_targets(self, exchange: HttpExchange) -> None:
        """Where Prometheus finds every process's own page."""
        await exchange.send_json(json.dumps(self._meter.pages.targets()).encode())

    async def no_embeddings(self, exchange: HttpExchange) -> None:
        raise bad_request(None, "embeddings are not supported: this server generates text")

    async def end_answers(self, grace_s: float, error: EngineError) -> None:
        """Refuses what is new; what is under way may go on for a while, and then fails."""
        await self._under_way.end(grace_s, error)

    def fail_all(self, error: EngineError) -> None:
        """Ends every answer under way with an error that its client gets to read."""
        self._under_way.fail_all(error)

    async def _generate(
        self,
        exchange: HttpExchange,
        prepare: Callable[[bytes], tuple[Plan, Answering]],
    ) -> None:
        origin = Origin(_request_id(exchange), time.monotonic())
        self._under_way.check_goes_on()
        timeout_s = self._timeout_s(exchange)
        body = await exchange.read_body(self._limits)
        self._under_way.check_goes_on()
        if self._refusing is not None:
            self._refusing.check_open(exchange.caller)

        observed = self._meter.observed(self._backend, origin)
        deadline = time.monotonic() + timeout_s

        async def work() -> None:
            plan, answer = await off_loop(lambda: prepare(body), len(body))
            if plan.named_grammar is not None:
                await self._model.check_grammar(plan.named_grammar, exchange.caller)
            self._gate.spend(exchange, plan.num_prompt_tokens)
            left_s = max(LEAST_S, deadline - time.monotonic())
            try:
                await answer.write(observed.submit, left_s)
            except DeadlineError as error:
                raise not_in_time(str(error), timeout_s) from error
            except RequestError as error:
                if plan.named_grammar is None or error.field != "grammar":
                    raise
                raise error.renamed(plan.named_grammar.field) from None
            finally:
                self._gate.spend(exchange, answer.num_output_tokens)

        def fail(error: EngineError) -> None:
            observed.fail(error)
            exchange.fail(api_error(error))

        with self._under_way.answering(fail):
            await exchange.race(work(), timeout_s, OVERTIME_S)

    async def _compute(self, exchange: HttpExchange, answer: Callable[[bytes], Json]) -> None:
        """Of as much as the model takes, which may be long."""
        _request_id(exchange)
        timeout_s = self._timeout_s(exchange)
        body = await exchange.read_body(self._limits)

        async def work() -> None:
            written = await off_loop(lambda: dump_long(answer(body)), len(body))
            await exchange.send_json(written)

        await exchange.race(work(), timeout_s)

    def _tokenize(self, request: TokenizeRequest) -> Json:
        request.check_one_source()
        add = request.add_special_tokens
        if request.messages is not None:
            messages = [message.as_dict() for message in request.messages]
            text = self._model.render(messages, request.chat_options())
            add = False if add is None else add
        else:
            text = request.prompt or ""
            add = True if add is None else add
        param = "prompt" if request.messages is None else "messages"
        token_ids = self._model.encode(text, add_special_tokens=add, param=param)
        answer = {
            "count": len(token_ids),
            "max_model_len": self._model.max_model_len,
            "tokens": token_ids,
        }
        if request.return_token_strs:
            answer["token_strs"] = [self._model.tokenizer.token(i) for i in token_ids]
        return answer

    def _probe(self) -> GenerationRequest:
        """The first token is the prefill worker's, the second one is made of what it handed over;
        nobody has the prompt cached."""
        name = f"ready-{new_request_id()}"
        num_tokens = max(1, min(_READY_PROMPT, self._model.max_model_len - 2))
        return GenerationRequest(
            RequestId(name),
            [self._model.tokenizer.bos_token_id or 0] * num_tokens,
            SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True),
            cache_salt=name,
            timeout_s=_READY_TIMEOUT_S,
        )

    def _timeout_s(self, exchange: HttpExchange) -> float:
        """The client may set a shorter one by a header, in seconds."""
        value = exchange.header("x-request-timeout")
        if value is None:
            return self._limits.request_timeout_s
        try:
            timeout_s = float(value)
        except ValueError:
            timeout_s = math.nan
        if not timeout_s > 0:
            raise _wrong("X-Request-Timeout", "seconds above 0")
        return min(timeout_s, self._limits.request_timeout_s)


def _request_id(exchange: HttpExchange) -> str:
    value = exchange.header(REQUEST_ID)
    if value is None:
        return new_request_id()
    if not is_request_id(value):
        raise _wrong("X-Request-Id", "1 to 128 visible ASCII characters")
    return value


def _wrong(header: str, right: str) -> ApiError:
    return bad_request(header, f"{header}: must be {right}", "invalid_value")


async def _read(stream: GenerationStream) -> None:
    try:
        async with asyncio.timeout(_READY_TIMEOUT_S):
            async for _ in stream:
                pass
    except (TimeoutError, DeadlineError) as error:
        raise UnavailableError("no token was generated in time") from error
    finally:
        stream.close()


def _has_failed(task: asyncio.Task[None]) -> bool:
    return task.done() and (task.cancelled() or task.exception() is not None)


async def _send(exchange: HttpExchange, answer: Json) -> None:
    await exchange.send_json(dump(answer).encode())
