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
        self._tokenizer = tokenizer
        self.pieces = tokenizer.visible_pieces if options.skip_special_tokens else tokenizer.pieces
        self.is_plain = True
        self._speller = TokenSpeller(tokenizer.pieces, as_ids=options.tokens_as_ids)
        self._echo_chars: dict[int, int] = {}  # by choice: the length of the prompt's text
        # A prompt may be long and have many choices: what each says of it first is built once.
        self._echoes: dict[Generation, tuple[str, Json | None]] = {}

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
        return choice if opening is None else _joined(opening, choice)

    def of_prompt(self, generation: Generation) -> Json:
        num_top = self._options.prompt_logprobs
        if num_top is None:
            return {}
        return {"prompt_logprobs": prompt_logprobs_of(generation, self._speller, num_top)}

    def beside_choices(self, generations: Sequence[Generation]) -> Json:
        return {}

    def beside_usage(self) -> Json:
        return {}

    def _echo(self, generation: Generation, choice: int) -> Json:
        if generation not in self._echoes:
            self._echoes[generation] = self._echo_of(generation)
        text, logprobs = self._echoes[generation]
        self._echo_chars[choice] = len(text)
        opening = choice_of(choice, text=text)
        opening["logprobs"] = logprobs
        if self._options.return_token_ids:
            opening["token_ids"] = []
        return opening

    def _echo_of(self, generation: Generation) -> tuple[str, Json | None]:
        """The prompt as the client wrote it; token by token where logprobs are asked for."""
        prompt, num_top = generation.prompt, self._options.logprobs
        if prompt.text is not None and num_top is None:
            return prompt.text, None
        tracked = TextOptions(track_offsets=num_top is not None)
        pieces = self.pieces if prompt.text is None else self._tokenizer.visible_pieces
        detokenizer = Detokenizer(pieces, options=tracked)
        # Bytes that the prompt leaves unfinished belong to the answer's first character.
        decoded = detokenizer.push(prompt.token_ids).text
        text = decoded if prompt.text is None else prompt.text
        report = generation.report
        if num_top is None or report is None or report.logprobs is None:
            return text, None
        offsets = detokenizer.offsets or []
        if prompt.text is not None:
            offsets = self._with_special_tokens(prompt.text, prompt.token_ids, offsets)
        return text, completion_logprobs(
            self._speller, report.logprobs, prompt.token_ids, offsets, num_top
        )

    def _with_special_tokens(
        self, text: str, token_ids: Sequence[int], offsets: Sequence[int]
    ) -> list[int]:
        """Moves offsets that were counted without them behind those that the client wrote; those
        that the tokenizer added are not in its text."""
        num_chars = 0
        moved = []
        for token_id, offset in zip(token_ids, offsets, strict=True):
            moved.append(offset + num_chars)
            if token_id in self._tokenizer.special_ids:
                name = self._tokenizer.token(token_id) or ""
                num_chars += len(name) if text.startswith(name, moved[-1]) else 0
        return moved


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
