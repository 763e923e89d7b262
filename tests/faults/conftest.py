from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from engine.sampling import SamplingParams
from tests.engine.models_on_disk import make_tiny
from tests.engine.pair import Answer, make_engine
from tests.engine.test_exact import random_prompts
from tests.engine.test_hand_over import answer
from tests.faults.workers import ENGINE, Relay, Worker

PARAMS = SamplingParams(temperature=1.0, seed=5, max_tokens=6, ignore_eos=True)
QUARANTINED_SHARE = 0.004  # two blocks
CONNECTORS = ("socket", "nixl")
ANY_CONNECTOR = pytest.mark.parametrize("relay_of_module", ["socket"], indirect=True)
PROMPTS = {str(n): random_prompts(1, n, n, seed=n)[0] for n in (300, 33, 250, 100, 32)}


@pytest.hookimpl(trylast=True)  # pytest would start workers anew for those of one connector
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """A module's tests with one connector, then those with another."""
    places = [number for number, item in enumerate(items) if _connector(item)]
    ours = [items[number] for number in places]
    modules = list(dict.fromkeys(item.path for item in ours))
    ours.sort(key=lambda item: (modules.index(item.path), _connector(item)))
    for number, item in zip(places, ours, strict=True):
        items[number] = item


def _connector(item: pytest.Item) -> str:
    """Of the workers that it goes through; none where it has others."""
    callspec = getattr(item, "callspec", None)
    return callspec.params.get("relay_of_module", "") if callspec else ""


@pytest.fixture(scope="package")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    return make_tiny("llama", folder, max_position_embeddings=512).folder


@pytest.fixture(scope="package")
def expected(model: Path) -> dict[str, Answer]:
    """What one engine says."""
    engine = make_engine(str(model), **ENGINE)
    return {name: answer(engine, prompt, PARAMS) for name, prompt in PROMPTS.items()}


@pytest.fixture(scope="module")
def stuck_after_s() -> float:
    """For which a module's workers wait for a peer whose engine makes no step."""
    return 1.0


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=CONNECTORS)
async def relay_of_module(
    request: pytest.FixtureRequest,
    model: Path,
    tmp_path_factory: pytest.TempPathFactory,
    stuck_after_s: float,
) -> AsyncIterator[Relay]:
    folder = tmp_path_factory.mktemp("workers")
    roles = ("prefill", "prefill", "decode")
    relay = Relay(
        *(
            Worker(
                folder,
                model,
                role,
                request.param,
                stuck_after_s=stuck_after_s,
                max_quarantined_share=QUARANTINED_SHARE,
            )
            for role in roles
        )
    )
    await relay.start()
    yield relay
    await relay.end()


@pytest_asyncio.fixture(loop_scope="module")
async def relay(relay_of_module: Relay, expected: dict[str, Answer]) -> AsyncIterator[Relay]:
    """After every test nothing is left of it, and twenty requests succeed."""
    yield relay_of_module
    await relay_of_module.mend()
    await relay_of_module.check_well(PROMPTS, expected, PARAMS)
