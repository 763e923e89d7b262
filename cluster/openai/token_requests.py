"""What /tokenize and /detokenize take."""

from typing import Annotated, Any

from pydantic import Field

from cluster.openai.body import Body, Ids, No
from cluster.openai.chat_request import Messages
from cluster.openai.request_limits import MAX_VALUES
from cluster.openai.tool_definition import Tools
from engine.errors import RequestError
from engine.text.chat_template import ChatOptions

_OF_MESSAGES = (
    "add_generation_prompt",
    "continue_final_message",
    "tools",
    "chat_template_kwargs",
)


class TokenizeRequest(Body):
    """A prompt, or messages that the chat template makes one of."""

    prompt: str | None = None
    messages: Messages | None = None
    add_special_tokens: bool | None = None  # by default with a prompt, not with messages
    return_token_strs: No = False
    add_generation_prompt: bool | None = None
    continue_final_message: No = False
    tools: Tools | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    def check_one_source(self) -> None:
        if (self.prompt is None) == (self.messages is None):
            raise RequestError("prompt", "either this or messages must be given, and not both")
        if self.prompt is None:
            return
        for name in _OF_MESSAGES:
            if getattr(self, name) not in (None, False, {}):
                raise RequestError(name, "is for messages, and there is a prompt")

    def chat_options(self) -> ChatOptions:
        prompt = self.add_generation_prompt
        tools: Any = self.tools  # as they were written
        return ChatOptions(
            tools=tools,
            add_generation_prompt=not self.continue_final_message if prompt is None else prompt,
            continue_final_message=self.continue_final_message,
            template_kwargs=self.chat_template_kwargs,
        )


class DetokenizeRequest(Body):
    tokens: Annotated[Ids, Field(max_length=MAX_VALUES)]
