"""What every test of kernels begins with."""

import pytest
import torch


@pytest.fixture(autouse=True)
def seed() -> None:
    """Inputs are drawn alike whichever tests ran before in this process."""
    torch.manual_seed(0)
