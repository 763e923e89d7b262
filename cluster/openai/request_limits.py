"""Bounds on what one request may ask for, tighter than the model's own if its operator wants."""

from dataclasses import dataclass

from engine.errors import RequestError
from engine.sampling import SamplingParams

MAX_N = 128
MAX_PROMPTS = 1024
MAX_CHOICES = 4096  # of all prompts together
# Token ids that a request names in its parameters, for each of its prompts: each brings all of them
# to its worker.
MAX_NAMED_TOKENS = 1 << 19
# Of all tokens together, at some 130 bytes each: an answer that is not streamed has all of them at
# once, and so has one whose client reads slowly.
MAX_LOGPROBS_IN_ALL = 8_000_000
# Arrays and objects of a body, and names in these: of tools, messages and biases there may be many.
# Values of all kinds are counted by their commas, and token ids may be most of them.
MAX_CONTAINERS = 100_000
MAX_NAMES = 600_000
MAX_VALUES = 4_000_000
MAX_SALT_CHARS = 128
NOT_IN_SALTS = frozenset("@/\\\0")
LEAST_PRIORITY = -(2**31)


@dataclass(frozen=True, slots=True)
class RequestLimits:
    max_prompt_tokens: int | None = None  # of each prompt; None: what the model takes
    max_n: int = MAX_N
    max_prompts: int = MAX_PROMPTS
    least_priority: int = LEAST_PRIORITY  # the soonest
    by_priority: bool = True  # or else the workers take none but 0

    def check_num_prompts(self, num_prompts: int) -> None:
        if num_prompts > self.max_prompts:
            raise RequestError("prompt", f"more than {self.max_prompts} prompts in one request")

    def check_n(self, n: int, num_prompts: int) -> None:
        if n > self.max_n:
            raise RequestError("n", f"{n}, must be at most {self.max_n}")
        if n * num_prompts > MAX_CHOICES:
            raise RequestError("n", f"more than {MAX_CHOICES} choices in one request")

    @property
    def soonest_priority(self) -> int:
        return self.least_priority if self.by_priority else 0

    def check_priority(self, priority: int) -> None:
        if priority and not self.by_priority:
            raise RequestError("priority", "needs the scheduling_policy 'priority'")
        if priority < self.least_priority:
            least = self.least_priority
            raise RequestError("priority", f"{priority}, must be at least {least} on this server")

    def check_prompt(self, num_tokens: int, param: str) -> None:
        most = self.max_prompt_tokens
        if most is not None and num_tokens > most:
            raise RequestError(param, f"{num_tokens} tokens, and this server takes {most}")


def check_num_logprobs(params: SamplingParams, num_prompts: int, num_prompt_tokens: int) -> None:
    """`num_prompt_tokens`: of all prompts together."""
    number, field = 0, "prompt_logprobs"
    if params.prompt_logprobs is not None:
        number += num_prompt_tokens * (params.prompt_logprobs + 1)
    if params.logprobs is not None:
        num_tokens = num_prompts * params.n * (params.max_tokens or 0)
        number, field = number + num_tokens * (params.logprobs + 1), "logprobs"
    if number > MAX_LOGPROBS_IN_ALL:
        most = f"must be at most {MAX_LOGPROBS_IN_ALL:,}; a lower max_tokens counts"
        raise RequestError(field, f"{number:,} of all prompts, choices and tokens together, {most}")
