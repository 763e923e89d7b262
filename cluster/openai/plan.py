"""A checked request: the token ids to generate from, the parameters, and how to answer.

Making a plan is all the work before the engine's; it reads nothing but its arguments, so a
long one is made on another thread.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from cluster.drawn import draw_seed
from cluster.openai.chat_format import Reading
from cluster.openai.chat_request import ChatRequest
from cluster.openai.completion_request import DEFAULT_MAX_TOKENS, CompletionRequest
from cluster.openai.request_limits import (
    MAX_NAMED_TOKENS,
    RequestLimits,
    check_num_logprobs,
)
from cluster.openai.sampling_fields import SamplingFields
from cluster.openai.structured import NamedGrammar
from cluster.served_model import ServedModel, no_room, too_long
from engine.errors import RequestError
from engine.request import GenerationRequest, RequestId
from engine.sampling import SamplingParams
from engine.text.messages import flatten_content


@dataclass(frozen=True, slots=True)
class Prompt:
    token_ids: Sequence[int]
    text: str | None = None  # as the client wrote it, where it wrote text


@dataclass(frozen=True, slots=True)
class AnswerOptions:
    """What the client wants to see of an answer, beside its text."""

    stream: bool = False
    include_usage: bool = False
    continuous_usage: bool = False
    skip_special_tokens: bool = True
    echo: bool = False
    echo_only: bool = False  # max_tokens=0: nothing beside the prompt
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    return_token_ids: bool = False
    tokens_as_ids: bool = False
    reading: Reading | None = None


@dataclass(frozen=True, slots=True)
class Plan:
    prompts: tuple[Prompt, ...]
    params: SamplingParams
    options: AnswerOptions
    priority: int = 0
    cache_salt: str = ""
    named_grammar: NamedGrammar | None = None  # params.grammar, and where the client wrote it
    seeds: tuple[int, ...] = ()  # a prompt's own, where the client said none for all of them

    @property
    def num_prompt_tokens(self) -> int:
        return sum(len(prompt.token_ids) for prompt in self.prompts)

    def params_of(self, number: int) -> SamplingParams:
        """Of one prompt: with one seed, equal prompts would get equal answers."""
        return replace(self.params, seed=self.seeds[number]) if self.seeds else self.params

    def request_of(
        self, number: int, request_id: RequestId, timeout_s: float, tenant: str
    ) -> GenerationRequest:
        return GenerationRequest(
            request_id,
            self.prompts[number].token_ids,
            self.params_of(number),
            priority=self.priority,
            cache_salt=self.cache_salt,
            timeout_s=timeout_s,
            tenant=tenant,
        )


_NO_LIMITS = RequestLimits()


def plan_completion(
    request: CompletionRequest, model: ServedModel, limits: RequestLimits = _NO_LIMITS
) -> Plan:
    request.check_stream_options()
    limits.check_priority(request.priority)
    prompts = tuple(_read_prompts(request, model, limits))
    limits.check_n(request.n or 1, len(prompts))
    wanted = DEFAULT_MAX_TOKENS if request.max_tokens is None else request.max_tokens
    echo_only = request.echo and wanted == 0
    most = min(_room(prompt, model, "prompt") for prompt in prompts)
    if request.max_tokens is None:
        wanted = min(model.defaults.max_new_tokens or wanted, most)
    params = request.sampling_params(
        model.defaults, max_tokens=1 if echo_only else wanted, logprobs=request.logprobs
    )
    if request.echo and request.logprobs is not None:
        # The prompt is part of the text, so its tokens have logprobs too.
        most_logprobs = max(params.prompt_logprobs or 0, request.logprobs)
        params = replace(params, prompt_logprobs=most_logprobs)
    options = _options(request, request.logprobs, echo=request.echo, echo_only=echo_only)
    draws_seeds = request.seed is None and len(prompts) > 1
    seeds = tuple(draw_seed() for _ in prompts) if draws_seeds else ()
    salt, grammar = request.cache_salt or "", request.named_grammar
    plan = Plan(prompts, params, options, request.priority, salt, grammar, seeds)
    return _checked(plan, model, most)


def plan_chat(request: ChatRequest, model: ServedModel, limits: RequestLimits = _NO_LIMITS) -> Plan:
    request.check_stream_options()
    if model.chat_format.calls_once:
        request = request.model_copy(update={"parallel_tool_calls": False})
    limits.check_n(request.n or 1, 1)
    limits.check_priority(request.priority)
    logprobs = request.num_logprobs()
    text = model.render(request.chat_messages(), request.chat_options())
    token_ids = model.encode(text, add_special_tokens=request.add_special_tokens, param="messages")
    limits.check_prompt(len(token_ids), "messages")
    prompt = Prompt(token_ids)
    most = _room(prompt, model, "messages")
    wanted = request.wanted_max_tokens()
    if wanted is None:
        wanted = min(model.defaults.max_new_tokens or most, most)
    limit = "max_tokens" if request.max_completion_tokens is None else "max_completion_tokens"
    try:
        params = request.sampling_params(model.defaults, max_tokens=wanted, logprobs=logprobs)
    except RequestError as error:
        raise error.renamed(limit if error.field == "max_tokens" else error.field) from None
    continued = _continued(request)
    reading = model.chat_format.reading(
        text,
        request.wanted_calls,
        one_call=request.one_call,
        num_calls_before=sum(len(message.tool_calls or ()) for message in request.messages),
        shows_reasoning=request.include_reasoning is not False,
        continued=continued,
    )
    params, grammar = _with_grammar(params, request, model, text)
    options = replace(_options(request, logprobs), reading=reading)
    plan = Plan((prompt,), params, options, request.priority, request.cache_salt or "", grammar)
    return _checked(plan, model, most, limit)


def _with_grammar(
    params: SamplingParams, request: ChatRequest, model: ServedModel, prompt: str
) -> tuple[SamplingParams, NamedGrammar | None]:
    """The request's own says what all of an answer is, or else that of calls what each of them is
    which the model makes, where a function is strict."""
    chat_format, choice, continued = model.chat_format, request.wanted_calls, _continued(request)
    named = request.named_grammar
    if named is not None:
        try:
            reasoning, exits = chat_format.opening(prompt, choice, continued)
        except RequestError as error:
            raise error.renamed(named.field) from None
        try:
            return replace(params, reasoning=reasoning, exits=exits), named
        except RequestError as error:  # one for each tool
            raise error.renamed("tools") from None
    calls = None if chat_format.tools is None else chat_format.tools.json
    has_end = bool(model.defaults.eos_token_ids)  # or else no grammar
    if calls is None or not has_end or not choice.may_call_strictly:
        return params, None
    reasoning, entries = chat_format.entries(prompt, calls, continued)
    if not entries:
        return params, None
    named = request.grammar_of_calls(in_array=calls.in_array)
    grammar = named.grammar
    return replace(params, grammar=grammar, reasoning=reasoning, entries=entries), named


def _read_prompts(
    request: CompletionRequest, model: ServedModel, limits: RequestLimits
) -> list[Prompt]:
    prompts: list[Prompt] = []
    for prompt in request.prompts():
        limits.check_num_prompts(len(prompts) + 1)
        if isinstance(prompt, str):
            add = request.add_special_tokens
            token_ids = model.encode(prompt, add_special_tokens=add, param="prompt")
            if not token_ids:
                raise RequestError("prompt", "must hold at least one token")
            limits.check_prompt(len(token_ids), "prompt")
            prompts.append(Prompt(token_ids, prompt))
        else:
            limits.check_prompt(len(prompt), "prompt")
            model.check_token_ids(prompt, "prompt")
            prompts.append(Prompt(prompt))
    return prompts


def _continued(request: ChatRequest) -> str:
    """The text that the answer goes on with."""
    if not request.continue_final_message:
        return ""
    content: str = flatten_content(request.messages[-1].as_dict())["content"]
    return content


def _room(prompt: Prompt, model: ServedModel, param: str) -> int:
    """Tokens that fit behind the prompt; an answer has at least one."""
    room = model.max_model_len - len(prompt.token_ids)
    if room < 1:
        raise too_long(param, str(len(prompt.token_ids)), model.max_model_len)
    return room


def _checked(plan: Plan, model: ServedModel, most: int, limit: str = "max_tokens") -> Plan:
    """`limit` is where the client wrote params.max_tokens."""
    plan.params.check_token_ids(model.vocab_size)
    if plan.params.num_named_tokens * len(plan.prompts) > MAX_NAMED_TOKENS:
        named = "logit_bias, allowed_token_ids and stop_token_ids"
        raise RequestError("prompt", f"too many for so many tokens in {named}")
    wanted = plan.params.max_tokens
    if wanted is not None and wanted > most:
        raise no_room(limit, wanted, most, model.max_model_len)
    check_num_logprobs(plan.params, len(plan.prompts), plan.num_prompt_tokens)
    return plan


def _options(
    request: SamplingFields, logprobs: int | None, *, echo: bool = False, echo_only: bool = False
) -> AnswerOptions:
    stream = request.stream_options
    return AnswerOptions(
        stream=bool(request.stream),
        include_usage=bool(stream and stream.include_usage),
        continuous_usage=bool(stream and stream.continuous_usage_stats),
        skip_special_tokens=request.skip_special_tokens,
        echo=echo,
        echo_only=echo_only,
        logprobs=logprobs,
        prompt_logprobs=request.prompt_logprobs,
        return_token_ids=bool(request.return_token_ids),
        tokens_as_ids=bool(request.return_tokens_as_token_ids),
    )
