"""The slow twin, in torch: the definition with sorts and whole rows, an oracle for the others."""

import numpy as np
import numpy.typing as npt
import torch

from engine.sampler import definition as d
from engine.sampler.arithmetic import exp, exponential, philox, weight
from engine.sampler.edits import edited_logits
from engine.sampler.interface import Draws, DrawStatus, History, Logprobs, Sampled
from engine.sampler.logprobs import token_logprobs
from engine.sampler.table import SamplingTable


class ReferenceSampler:
    """Works on any device that the logits are on; memory is some 20 bytes a logit."""

    def __init__(self, table: SamplingTable) -> None:
        self._table = table

    def sample(
        self,
        logits: torch.Tensor,
        draws: Draws,
        history: History,
        bitmask: torch.Tensor | None = None,
    ) -> Sampled:
        rows = self._table.rows[draws.slots]
        source = torch.from_numpy(draws.logit_rows).to(logits.device)
        broken = ~_sound(logits[source].float())
        z = edited_logits(logits, draws, self._table, history, bitmask)
        best = z.amax(1)
        broken |= ~_sound(z)
        status = torch.where(best == -torch.inf, DrawStatus.NO_CANDIDATE, DrawStatus.DRAWN)
        status = torch.where(broken, DrawStatus.NOT_FINITE, status).int()
        z[status != DrawStatus.DRAWN] = 0.0
        positions = history.num_tokens[torch.from_numpy(draws.slots).to(z.device)]
        tokens = torch.where(
            _column(rows["inverse_temperature"], z)[:, 0] == 0.0,
            z.argmax(1),
            _random_tokens(z, rows, positions),
        )
        tokens = torch.where(status == DrawStatus.DRAWN, tokens, 0).int()
        drawn = torch.stack((tokens, status))
        return Sampled(drawn, self._logprobs(logits[source], draws, tokens))

    def token_logprobs(self, logits: torch.Tensor, targets: torch.Tensor, num_top: int) -> Logprobs:
        return token_logprobs(logits, targets, num_top)

    def _logprobs(
        self, logits: torch.Tensor, draws: Draws, tokens: torch.Tensor
    ) -> Logprobs | None:
        reported = self._table.num_reported(draws.slots)
        return token_logprobs(logits, tokens, reported - 1) if reported else None


def _sound(z: torch.Tensor) -> torch.Tensor:
    """Rows without NaN or +inf."""
    return ~(z.isnan() | (z == torch.inf)).any(1)


def _random_tokens(
    z: torch.Tensor, rows: npt.NDArray[np.void], positions: torch.Tensor
) -> torch.Tensor:
    best = z.amax(1, keepdim=True) + 0.0  # -0 would make distances of -0
    y = (best - z) * _column(rows["inverse_temperature"], z)
    limit = _limit(y, rows)
    noise = exponential(_random_words(z.shape[1], rows, positions))
    results = noise * exp(y.clamp(max=d.MAX_DISTANCE))
    return torch.where(y <= limit, results, torch.inf).argmin(1)


def _limit(y: torch.Tensor, rows: npt.NDArray[np.void]) -> torch.Tensor:
    """[draws, 1]: the greatest distance at which a token survives the filters."""
    vocab = y.shape[1]
    limit = _column(rows["max_distance"], y).clamp(max=d.MAX_DISTANCE)
    ordered = y.sort(1).values
    k = np.where(rows["top_k"] == 0, vocab, np.minimum(rows["top_k"], vocab))
    limit = torch.minimum(limit, ordered.gather(1, _column(k.astype(np.int64), y) - 1))
    weights = torch.where(ordered <= limit, weight(ordered), 0)
    nearer = torch.cat((torch.zeros_like(weights[:, :1]), weights.cumsum(1)), 1)
    nearer = nearer.gather(1, torch.searchsorted(ordered, ordered))  # ties have none before them
    top_p = _column(rows["top_p"], y)
    inside = (nearer.double() < top_p * weights.sum(1, keepdim=True).double()) | (top_p >= 1.0)
    return torch.where(inside & (ordered <= limit), ordered, 0.0).amax(1, keepdim=True)


def _random_words(
    vocab_size: int, rows: npt.NDArray[np.void], positions: torch.Tensor
) -> torch.Tensor:
    """[draws, vocab] int64."""
    quarters = torch.arange(-(-vocab_size // 4), device=positions.device)[None]
    shape = (len(rows), quarters.shape[1])
    counter = (
        quarters.expand(shape),
        positions.long()[:, None].expand(shape),
        _column(rows["choice"].astype(np.int64), positions).expand(shape),
        torch.full(shape, d.DOMAIN, device=positions.device),
    )
    words = philox(counter, _column(rows["seed"], positions).expand(shape))
    return torch.stack(words, 2).flatten(1)[:, :vocab_size]


def _column(values: npt.NDArray[np.generic], like: torch.Tensor) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(values)).to(like.device)[:, None]
