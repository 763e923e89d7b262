"""What several files about hand-offs need."""

from collections.abc import AsyncIterator

import pytest

from tests.kv_transfer.handoff_pair import Pair


@pytest.fixture
async def pair() -> AsyncIterator[Pair]:
    pair = Pair()
    await pair.start()
    yield pair
    await pair.stop()
