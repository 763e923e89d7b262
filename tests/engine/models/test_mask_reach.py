"""Masks that paged attention can stand in for, and masks that it cannot."""

import pytest
import torch
from transformers.masking_utils import (
    bidirectional_mask_function,
    causal_mask_function,
    chunked_causal_mask_function,
    or_masks,
    sliding_window_causal_mask_function,
)

from engine.errors import ModelError
from engine.models.mask_reach import MaskFunction, mask_window


def test_a_causal_mask_has_no_window() -> None:
    assert mask_window(causal_mask_function) is None


@pytest.mark.parametrize("window", [1, 2, 12, 4096, 131072])
def test_the_window_of_a_sliding_mask_is_found(window: int) -> None:
    assert mask_window(sliding_window_causal_mask_function(window)) == window


@pytest.mark.parametrize(
    "mask",
    [
        bidirectional_mask_function,
        chunked_causal_mask_function(16, torch.zeros(1, dtype=torch.int64)),
        or_masks(causal_mask_function, lambda b, h, q, k: (k < 4) & (q < 4)),
        lambda b, h, q, k: k < q,
    ],
    ids=["bidirectional", "chunked", "prefix", "not-itself"],
)
def test_other_masks_are_refused(mask: MaskFunction) -> None:
    with pytest.raises(ModelError, match="attention mask"):
        mask_window(mask)
