"""Log-probabilities on any device, in torch."""

import torch

from engine.sampler import definition as d
from engine.sampler.arithmetic import weight
from engine.sampler.interface import Logprobs


def token_logprobs(logits: torch.Tensor, targets: torch.Tensor, num_top: int) -> Logprobs:
    """Of one target for each row. Rows that are not finite give NaN, rank 0 and token 0."""
    z = logits.float()
    best = z.amax(1, keepdim=True) + 0.0  # -0 would make distances of -0
    finite = torch.isfinite(best) & ~(z == torch.inf).any(1, keepdim=True)
    y = torch.where(finite, best - z, 0.0)
    log_total = torch.log(weight(y).sum(1, keepdim=True).double() / d.WEIGHT_ONE)
    chosen = y.gather(1, targets.long()[:, None])
    num_top = min(num_top, z.shape[1])
    # the distance's bits, then the id: equal distances come by id
    ids = torch.arange(z.shape[1], device=z.device)
    keys = (y.view(torch.int32).long() << 32) | ids
    top = keys.topk(num_top, largest=False, sorted=True).values & 0xFFFFFFFF
    rank = 1 + (y < chosen).sum(1)
    return Logprobs(
        logprob=_logprob(chosen, log_total, finite)[:, 0],
        rank=torch.where(finite[:, 0], rank, 0).int(),
        top_ids=torch.where(finite, top, 0).int(),
        top_logprobs=_logprob(y.gather(1, top), log_total, finite),
    )


def _logprob(y: torch.Tensor, log_total: torch.Tensor, finite: torch.Tensor) -> torch.Tensor:
    return torch.where(finite, (-y.double() - log_total).float(), torch.nan)
