"""What every test of kernels begins with."""

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True)
def seed() -> None:
    """Inputs are drawn alike whichever tests ran before in this process."""
    torch.manual_seed(0)


@pytest.fixture(autouse=True, scope="package")
def two_threads() -> Iterator[None]:
    """Whose pieces come together again."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)
