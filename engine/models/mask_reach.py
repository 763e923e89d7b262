"""What a transformers attention mask lets a query see, found by asking its mask function."""

from __future__ import annotations

from collections.abc import Callable

import torch

from engine.errors import ModelError

# (batch, head, query, key) -> may it see; scalar tensors, as transformers' mask functions take.
MaskFunction = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]

FAR = 1 << 30  # beyond any context
QUERIES = (0, 1, 5, 63, 1000, 8191, 8192, 100_003, FAR)


def mask_window(mask: MaskFunction) -> int | None:
    """The window of a causal mask, None for one that sees everything; any other is refused."""
    window = _reach(mask, FAR)
    for query in QUERIES:
        reach = min(query + 1, window)
        if reach < 1 or _sees(mask, query, query + 1) or _reach(mask, query) != reach:
            raise ModelError("its attention mask is neither causal nor a causal sliding window")
    return None if window == FAR + 1 else window


def _reach(mask: MaskFunction, query: int) -> int:
    """Number of keys that a query sees, itself included, if they are the latest ones."""
    if not _sees(mask, query, query):
        return 0
    if _sees(mask, query, 0):
        return query + 1
    unseen, seen = 0, query
    while seen - unseen > 1:
        middle = (unseen + seen) // 2
        if _sees(mask, query, middle):
            seen = middle
        else:
            unseen = middle
    return query - seen + 1


def _sees(mask: MaskFunction, query: int, key: int) -> bool:
    with torch.device("cpu"):  # the model that is being probed lives on the meta device
        zero = torch.tensor(0)
        try:
            return bool(mask(zero, zero, torch.tensor(query), torch.tensor(key)))
        except (RuntimeError, IndexError) as error:  # it looked at data, and there are none
            raise ModelError("its attention mask depends on more than positions") from error
