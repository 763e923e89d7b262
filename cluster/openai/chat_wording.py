"""Answers of /v1/chat/completions."""

from collections.abc import Sequence

from cluster.openai.generation import ChoicePart, Generation
from cluster.openai.logprobs import TokenSpeller, chat_logprobs
from cluster.openai.plan import AnswerOptions
from cluster.openai.wording import Json, choice_of, prompt_logprobs_of
from engine.text.tokenizer import Tokenizer


class ChatWording:
    """/v1/chat/completions: a message of the assistant's."""

    id_prefix = "chatcmpl"
    object_name = "chat.completion"
    chunk_name = "chat.completion.chunk"

    def __init__(self, tokenizer: Tokenizer, options: AnswerOptions) -> None:
        self._options = options
        self._speller = TokenSpeller(tokenizer.pieces, as_ids=options.tokens_as_ids)

    def opening(self, generation: Generation, choice: int) -> Json | None:
        return choice_of(choice, delta={"role": "assistant", "content": ""})

    def delta(self, part: ChoicePart) -> Json:
        return self._filled("delta", {"content": part.text} if part.text else {}, part)

    def whole(self, generation: Generation, part: ChoicePart) -> Json:
        message = {"role": "assistant", "content": part.text, "refusal": None}
        return self._filled("message", message, part)

    def beside_choices(self, generations: Sequence[Generation]) -> Json:
        beside: Json = {}
        if self._options.return_token_ids:
            beside["prompt_token_ids"] = list(generations[0].prompt.token_ids)
        num_top = self._options.prompt_logprobs
        if num_top is not None:
            beside["prompt_logprobs"] = prompt_logprobs_of(generations[0], self._speller, num_top)
        return beside

    def _filled(self, key: str, message: Json, part: ChoicePart) -> Json:
        choice = choice_of(part.choice, **{key: message})
        choice["finish_reason"], choice["stop_reason"] = part.finish_reason, part.stop_reason
        if part.logprobs is not None and self._options.logprobs is not None:
            choice["logprobs"] = chat_logprobs(self._speller, part.logprobs, self._options.logprobs)
        if self._options.return_token_ids:
            choice["token_ids"] = list(part.token_ids)
        return choice
