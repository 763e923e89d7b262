"""Answers of /v1/completions."""

from collections.abc import Sequence

from cluster.openai.generation import ChoicePart, Generation
from cluster.openai.logprobs import TokenSpeller, completion_logprobs
from cluster.openai.plan import AnswerOptions
from cluster.openai.wording import Json, choice_of, prompt_logprobs_of
from engine.text.detokenizer import Detokenizer, TextOptions
from engine.text.tokenizer import Tokenizer


class CompletionWording:
    """/v1/completions: text, which may begin with the prompt's own."""

    id_prefix = "cmpl"
    object_name = chunk_name = "text_completion"

    def __init__(self, tokenizer: Tokenizer, options: AnswerOptions) -> None:
        self._options = options
        self.pieces = tokenizer.visible_pieces if options.skip_special_tokens else tokenizer.pieces
        self.is_plain = True
        self._speller = TokenSpeller(tokenizer.pieces, as_ids=options.tokens_as_ids)
        self._echo_chars: dict[int, int] = {}  # by choice: the length of the prompt's text

    def opening(self, generation: Generation, choice: int) -> Json | None:
        ids = self._options.return_token_ids
        if not self._options.echo and not ids:
            return None
        opening = (
            self._echo(generation, choice) if self._options.echo else choice_of(choice, text="")
        )
        if ids:
            opening["prompt_token_ids"] = list(generation.prompt.token_ids)
        return opening

    def delta(self, part: ChoicePart) -> Json:
        choice = choice_of(part.choice, text=part.text)
        choice["finish_reason"], choice["stop_reason"] = part.finish_reason, part.stop_reason
        if part.logprobs is not None and self._options.logprobs is not None:
            base = self._echo_chars.get(part.choice, 0)
            choice["logprobs"] = completion_logprobs(
                self._speller,
                part.logprobs,
                part.token_ids,
                [base + offset for offset in part.offsets or ()],
                self._options.logprobs,
            )
        if self._options.return_token_ids:
            choice["token_ids"] = list(part.token_ids)
        return choice

    def whole(self, generation: Generation, part: ChoicePart) -> Json:
        opening = self.opening(generation, part.choice)
        choice = self.delta(part)
        if opening is not None:
            choice = _joined(opening, choice)
        num_top = self._options.prompt_logprobs
        if num_top is not None:
            choice["prompt_logprobs"] = prompt_logprobs_of(generation, self._speller, num_top)
        return choice

    def beside_choices(self, generations: Sequence[Generation]) -> Json:
        return {}

    def _echo(self, generation: Generation, choice: int) -> Json:
        """The prompt as the client wrote it; token by token where logprobs are asked for."""
        prompt, options = generation.prompt, self._options
        detokenizer = Detokenizer(self.pieces, options=TextOptions(track_offsets=True))
        # Bytes that the prompt leaves unfinished belong to the answer's first character.
        decoded = detokenizer.push(prompt.token_ids).text
        text = decoded if prompt.text is None else prompt.text
        self._echo_chars[choice] = len(text)
        opening = choice_of(choice, text=text)
        report = generation.report
        if options.logprobs is not None and report is not None and report.logprobs is not None:
            opening["logprobs"] = completion_logprobs(
                self._speller,
                report.logprobs,
                prompt.token_ids,
                detokenizer.offsets or (),
                options.logprobs,
            )
        if options.return_token_ids:
            opening["token_ids"] = []
        return opening


def _joined(opening: Json, choice: Json) -> Json:
    """The prompt's part and the answer's as one text."""
    joined = {**choice, "text": opening["text"] + choice["text"]}
    if "prompt_token_ids" in opening:
        joined["prompt_token_ids"] = opening["prompt_token_ids"]
    first, second = opening["logprobs"], choice["logprobs"]
    if first is not None:
        second = second or {}
        joined["logprobs"] = {key: first[key] + second.get(key, []) for key in first}
    return joined
