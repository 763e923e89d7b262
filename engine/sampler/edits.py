"""What requests change in their logits before the draw, batched, in torch on any device.

In this order: allowed tokens and bitmask, bias, stops that come too early, penalties.
"""

import numpy as np
import numpy.typing as npt
import torch

from engine.sampler.interface import Draws, History
from engine.sampler.table import SamplingTable

Rows = npt.NDArray[np.void]  # rows of SLOT, one for each draw


def is_edited(rows: Rows, bitmask: torch.Tensor | None) -> bool:
    """Whether any draw may differ from its row of logits."""
    columns = ("allowed_count", "bias_count", "stops_count", "penalized")
    return bitmask is not None or any(rows[column].any() for column in columns)


def edited_logits(
    logits: torch.Tensor,
    draws: Draws,
    table: SamplingTable,
    history: History,
    bitmask: torch.Tensor | None,
) -> torch.Tensor:
    """[draws, vocab] fp32, a copy. Nothing here waits for the device."""
    rows = table.rows[draws.slots]
    source = _on(draws.logit_rows, logits)
    z = logits[source].float()
    slots = _on(draws.slots, logits)
    if rows["allowed_count"].any():
        _keep_allowed(z, rows, table)
    if bitmask is not None:
        z.masked_fill_(~_unpack(bitmask[source], z.shape[1]), -torch.inf)
    if rows["bias_count"].any():
        draw, ids, flat = _pairs(rows["bias_start"], rows["bias_count"], table.bias.ids)
        values = _on(table.bias.values[flat], z)
        z.index_put_((_on(draw, z), _on(ids, z)), values, accumulate=True)
    if rows["stops_count"].any():
        early = history.num_tokens[slots] < _on(rows["stops_from"], z)
        draw, ids, _ = _pairs(rows["stops_start"], rows["stops_count"], table.stops.ids)
        at = _on(draw, z), _on(ids, z)
        z[at] = torch.where(early[at[0]], -torch.inf, z[at])
    if rows["penalized"].any():
        _penalize(z, rows, slots, history)
    return z


def _keep_allowed(z: torch.Tensor, rows: Rows, table: SamplingTable) -> None:
    draw, ids, _ = _pairs(rows["allowed_start"], rows["allowed_count"], table.allowed.ids)
    keep = _on(rows["allowed_count"] == 0, z)[:, None].repeat(1, z.shape[1])
    keep[_on(draw, z), _on(ids, z)] = True
    z.masked_fill_(~keep, -torch.inf)


def _unpack(mask: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """Bit i of word j is token 32 * j + i."""
    shifts = torch.arange(32, dtype=torch.int32, device=mask.device)
    bits = (mask[:, :, None] >> shifts) & 1
    return bits.flatten(1)[:, :vocab_size].bool()


def _penalize(z: torch.Tensor, rows: Rows, slots: torch.Tensor, history: History) -> None:
    """Repetition by prompt and output (divides what is positive, multiplies the rest), then
    frequency and presence by the output alone. Ids beyond the logits count for nothing."""
    on = rows["penalized"] != 0
    draw, rows = _on(np.flatnonzero(on), z), rows[on]
    tokens = history.tokens[slots[draw]].long()
    place = torch.arange(tokens.shape[1], device=z.device)
    vocab = z.shape[1]
    known = (place < history.num_tokens[slots[draw]][:, None]) & (tokens >= 0) & (tokens < vocab)
    output = known & (place >= _column(rows["num_prompt_tokens"], z))
    shape = (len(rows), vocab + 1)  # one more for what does not count
    counts = torch.zeros(shape, device=z.device).scatter_add_(
        1, torch.where(output, tokens, vocab), torch.ones_like(tokens, dtype=torch.float32)
    )[:, :vocab]
    seen = torch.zeros(shape, dtype=torch.bool, device=z.device).scatter_(
        1, torch.where(known, tokens, vocab), True
    )[:, :vocab]
    old, repetition = z[draw], _column(rows["repetition"], z)
    new = torch.where(seen, torch.where(old > 0, old / repetition, old * repetition), old)
    lower = (new - _column(rows["frequency"], z) * counts) - _column(rows["presence"], z)
    z[draw] = torch.where(counts > 0, lower, new)


def _pairs(
    starts: npt.NDArray[np.int32], counts: npt.NDArray[np.int32], ids: npt.NDArray[np.int32]
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int32], npt.NDArray[np.int64]]:
    """(draw, id, place in the flat array) of every entry of the draws' lists."""
    draw = np.repeat(np.arange(counts.size), counts)
    within = np.arange(draw.size) - np.repeat(np.cumsum(counts) - counts, counts)
    flat = starts[draw] + within
    return draw, ids[flat], flat


def _column(values: npt.NDArray[np.generic], like: torch.Tensor) -> torch.Tensor:
    return _on(values, like)[:, None]


def _on(values: npt.NDArray[np.generic], like: torch.Tensor) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(values)).to(like.device, non_blocking=True)
