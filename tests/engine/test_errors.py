"""What a raised error leaves behind."""

import gc
import weakref
from collections.abc import Iterator

import pytest

from engine.errors import EngineError, throw


@pytest.fixture
def uncollected() -> Iterator[None]:
    gc.disable()
    yield
    gc.enable()


class Keeper:
    def __init__(self) -> None:
        self.error: EngineError | None = EngineError("kept until it is asked for")

    def tell(self) -> None:
        throw(self._take())

    def _take(self) -> EngineError:
        error, self.error = self.error, None
        assert error is not None
        return error


@pytest.mark.usefixtures("uncollected")
def test_who_kept_an_error_goes_with_it() -> None:
    keeper = Keeper()
    gone = weakref.ref(keeper)
    with pytest.raises(EngineError, match="kept") as raised:
        keeper.tell()
    del raised, keeper
    assert gone() is None
