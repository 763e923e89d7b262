"""What a user may say about the HTTP front: who is let in, and how much one request may ask."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator

from cluster.api_keys import VARIABLE, ApiKeys
from cluster.gate import Gate
from cluster.http_exchange import HttpLimits
from cluster.openai.reading.formats import AUTO, NONE, REASONING_PARSERS, TOOL_PARSERS
from cluster.openai.request_limits import LEAST_PRIORITY, MAX_N, MAX_PROMPTS, RequestLimits
from cluster.rate_limit import Rates
from cluster.served_model import ServedModel
from cluster.validation import AbsolutePath, one_of
from engine.errors import ConfigError

_ORIGIN = re.compile(r"\*|[a-z][a-z0-9+.-]*://[^\sA-Z/?#*,]+")


class HttpArgs(BaseModel):
    """How large and how long one request may be."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    request_timeout_s: float = Field(default=600.0, gt=0, le=86400)
    max_body_bytes: int = Field(default=HttpLimits.max_body_bytes, ge=1024)


class FrontArgs(BaseModel):
    """Holds no key: these arguments are shown to whoever asks Ray for them. With
    `require_api_key`, an ingress that finds no key where it runs does not start."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    api_key_file: AbsolutePath | None = None
    require_api_key: bool = False
    allow_unauthenticated: bool = False
    allowed_origins: tuple[str, ...] = ()
    requests_per_minute: int | None = Field(default=None, ge=1, le=10**9)
    tokens_per_minute: int | None = Field(default=None, ge=1, le=10**12)
    max_prompt_tokens: int | None = Field(default=None, ge=1)
    chat_template: AbsolutePath | None = None
    max_n: int = Field(default=MAX_N, ge=1, le=MAX_N)
    tool_call_parser: str = AUTO
    reasoning_parser: str = AUTO
    max_prompts: int = Field(default=MAX_PROMPTS, ge=1, le=MAX_PROMPTS)
    least_priority: int | None = Field(default=None, ge=LEAST_PRIORITY, lt=2**31)

    @field_validator("tool_call_parser", "reasoning_parser")
    @classmethod
    def _check_parser(cls, value: str, info: ValidationInfo) -> str:
        known = TOOL_PARSERS if info.field_name == "tool_call_parser" else REASONING_PARSERS
        return one_of(value, (AUTO, NONE, *known))

    @field_validator("allowed_origins")
    @classmethod
    def _check_origins(cls, origins: tuple[str, ...]) -> tuple[str, ...]:
        """As browsers write them: any other would never be the one that a page says it is of."""
        for origin in origins:
            if not _ORIGIN.fullmatch(origin):
                raise ValueError(f"{origin!r}, must be like https://chat.example:8443, or *")
        return origins

    def keys(self, environ: Mapping[str, str]) -> ApiKeys | None:
        keys = ApiKeys.load(self.api_key_file, environ)
        if keys is None and self.require_api_key:
            raise ConfigError(
                "require_api_key",
                f"there is no API key here; api_key_file or {VARIABLE} has them, wherever an "
                "ingress runs",
            )
        return keys

    def gate(self, keys: ApiKeys | None) -> Gate:
        return Gate(keys, Rates(self.requests_per_minute, self.tokens_per_minute))

    def model(self, model: ServedModel) -> ServedModel:
        """As these arguments want its answers read."""
        return replace(
            model, tool_parser=self.tool_call_parser, reasoning_parser=self.reasoning_parser
        )

    def limits(self, keys: ApiKeys | None) -> RequestLimits:
        """Callers that are told apart share the cluster: none goes before the others by a number
        that it chooses itself, unless its operator wants that."""
        least = self.least_priority
        if least is None:
            least = LEAST_PRIORITY if keys is None else 0
        return RequestLimits(self.max_prompt_tokens, self.max_n, self.max_prompts, least)
