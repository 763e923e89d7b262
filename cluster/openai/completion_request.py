"""What /v1/completions takes."""

from collections.abc import Iterator
from typing import Annotated, Any, ClassVar

from pydantic import BeforeValidator
from pydantic_core import PydanticCustomError

from cluster.openai.body import No, Yes
from cluster.openai.sampling_fields import SamplingFields

DEFAULT_MAX_TOKENS = 16  # OpenAI's
_Prompt = str | list[str] | list[int] | list[list[int]]  # what `_check_prompt` takes


def _check_prompt(value: Any) -> Any:
    """By hand: a union of list types checks a long prompt four times and explains it badly."""
    if isinstance(value, str):
        return value
    if isinstance(value, list) and value:
        inner = value if isinstance(value[0], list) else [value]
        if all(_is_token_list(item) for item in inner):
            return value
        if all(isinstance(item, str) for item in value):
            return value
    raise PydanticCustomError(
        "prompt", "a string, an array of strings, an array of token ids or an array of those"
    )


def _is_token_list(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(type(item) is int for item in value)


class CompletionRequest(SamplingFields):
    not_supported: ClassVar = {**SamplingFields.not_supported, "suffix": ("",)}

    prompt: Annotated[Any, BeforeValidator(_check_prompt, _Prompt)]
    echo: No = False
    logprobs: int | None = None
    add_special_tokens: Yes = True

    def prompts(self) -> Iterator[str | list[int]]:
        if isinstance(self.prompt, str) or isinstance(self.prompt[0], int):
            yield self.prompt
        else:
            yield from self.prompt
