"""The sampling parameters of the running sequences, by slot, in the form kernels read."""

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from engine.sampler.interface import IntArray
from engine.sampler.ragged import Ragged
from engine.sampling import SamplingParams

# 4-byte fields follow the 8-byte ones and fill whole 8-byte words, so that a row may be viewed
# as int32, float32 or float64 words (the Triton twin reads it so).
SLOT = np.dtype(
    [
        ("seed", np.int64),
        ("top_p", np.float64),  # 1: off
        ("inverse_temperature", np.float32),  # 0: greedy
        ("max_distance", np.float32),  # -log(min_p): how far below the best a token may be
        ("repetition", np.float32),
        ("presence", np.float32),
        ("frequency", np.float32),
        ("penalized", np.int32),  # 1: any of the three penalties is on
        ("choice", np.int32),
        ("top_k", np.int32),  # 0: off
        ("num_prompt_tokens", np.int32),
        ("stops_from", np.int32),  # number of tokens below which stop ids are forbidden
        ("allowed_start", np.int32),
        ("allowed_count", np.int32),  # 0: every token is allowed
        ("bias_start", np.int32),
        ("bias_count", np.int32),
        ("stops_start", np.int32),
        ("stops_count", np.int32),
        ("reported", np.int32),  # logprobs wanted: 0 none, 1 + n the token's and n alternatives'
        ("unused", np.int32),
    ]
)

INT32_MAX = 2**31 - 1


class SamplingTable:
    """Rows of SLOT and the id lists they point into; written when a sequence takes a slot.

    Nothing here changes with the tokens drawn. A row is valid until its slot is entered again.
    """

    def __init__(self, max_num_seqs: int, vocab_size: int) -> None:
        self.vocab_size = vocab_size
        self.rows = np.zeros(max_num_seqs, SLOT)
        self.allowed = Ragged(self.rows["allowed_start"], self.rows["allowed_count"])
        self.bias = Ragged(self.rows["bias_start"], self.rows["bias_count"])
        self.stops = Ragged(self.rows["stops_start"], self.rows["stops_count"])

    def enter(
        self,
        slot: int,
        params: SamplingParams,
        seed: int,
        choice: int,
        num_prompt_tokens: int,
        eos_ids: tuple[int, ...] = (),
    ) -> None:
        """`eos_ids` end the sequence unless the parameters ignore them."""
        row = self.rows[slot]
        row["seed"] = seed
        row["top_p"] = params.top_p
        row["inverse_temperature"] = 0.0 if params.greedy else 1.0 / params.temperature
        row["max_distance"] = abs(math.log(params.min_p)) if params.min_p > 0 else math.inf
        row["repetition"] = params.repetition_penalty
        row["presence"] = params.presence_penalty
        row["frequency"] = params.frequency_penalty
        row["penalized"] = params.has_penalties
        row["choice"] = choice
        row["top_k"] = min(params.top_k, INT32_MAX)
        row["num_prompt_tokens"] = num_prompt_tokens
        row["stops_from"] = min(num_prompt_tokens + params.min_tokens, INT32_MAX)
        row["reported"] = 0 if params.logprobs is None else params.logprobs + 1
        self._put_lists(slot, params, eos_ids)

    def allow_stops(self, slots: Sequence[int]) -> None:
        """From now on, however few tokens there are."""
        self.rows["stops_count"][slots] = 0

    def num_reported(self, slots: IntArray) -> int:
        """The greatest number of logprob entries that any of the slots wants."""
        return int(self.rows["reported"][slots].max(initial=0))

    def _put_lists(self, slot: int, params: SamplingParams, eos_ids: tuple[int, ...]) -> None:
        ending = params.stop_token_ids + (() if params.ignore_eos else eos_ids)
        stops = ending if params.min_tokens > 0 else ()
        self.allowed.put(slot, self._ids(params.allowed_token_ids or ()))
        self.stops.put(slot, self._ids(stops))
        bias = np.fromiter(params.logit_bias.values(), np.float32)
        self.bias.put(slot, self._ids(tuple(params.logit_bias)), bias)

    def _ids(self, ids: tuple[int, ...]) -> npt.NDArray[np.int32]:
        array = np.array(ids, np.int32)
        # SamplingParams.check_token_ids has refused a request with others
        assert array.size == 0 or (array.min() >= 0 and array.max() < self.vocab_size)
        return array
