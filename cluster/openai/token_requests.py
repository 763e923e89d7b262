"""What /tokenize and /detokenize take."""

from typing import Annotated, Any

from pydantic import Field

from cluster.openai.body import Body, No
from cluster.openai.chat_request import ChatMessage
from engine.errors import RequestError
from engine.text.chat_template import ChatOptions


class TokenizeRequest(Body):
    """A prompt, or messages that the chat template makes one of."""

    prompt: str | None = None
    messages: list[ChatMessage] | None = None
    add_special_tokens: bool | None = None  # by default with a prompt, not with messages
    return_token_strs: No = False
    add_generation_prompt: bool | None = None
    continue_final_message: No = False
    tools: list[dict[str, Any]] | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    def check_one_source(self) -> None:
        if (self.prompt is None) == (self.messages is None):
            raise RequestError("prompt", "either this or messages must be given, and not both")

    def chat_options(self) -> ChatOptions:
        prompt = self.add_generation_prompt
        return ChatOptions(
            tools=self.tools,
            add_generation_prompt=not self.continue_final_message if prompt is None else prompt,
            continue_final_message=self.continue_final_message,
            template_kwargs=self.chat_template_kwargs,
        )


class DetokenizeRequest(Body):
    tokens: Annotated[list[int], Field(max_length=4_000_000)]
