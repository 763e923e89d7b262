"""A decode worker answers for the model whose tokenizer is at hand, or is refused by name."""

import asyncio
import shutil
from pathlib import Path

import pytest

from cluster.remote_engine import RemoteEngine, check_same_model
from cluster.session import SessionBackend
from cluster.text_side import TextSide
from decode_worker.service import SessionService
from engine.errors import ConfigError
from engine.fingerprint import fingerprint
from engine.generation_defaults import GenerationDefaults
from engine.model_source import ModelSource
from protos.port import reserved_port
from protos.rpc import Plane
from protos.worker_pb2 import WorkerDescription
from tests.cluster.fakes import small_tokenizer
from tests.decode_worker.fakes import DESCRIPTION, PushedAnswerer, session_server
from tests.engine.models_on_disk import make_tiny

VOCAB = small_tokenizer().vocab_size


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> ModelSource:
    folder = make_tiny("llama", tmp_path_factory.mktemp("llama"), vocab_size=VOCAB).folder
    return ModelSource("ours", folder)


def text(source: ModelSource) -> TextSide:
    return TextSide(source, small_tokenizer(), None, GenerationDefaults(), ("served",))


def worker(mark: str, vocab_size: int = VOCAB) -> WorkerDescription:
    description = WorkerDescription()
    description.CopyFrom(DESCRIPTION)
    description.model = "theirs"
    description.format.fingerprint = mark
    description.limits.vocab_size = vocab_size
    return description


def test_weights_are_told_apart(source: ModelSource) -> None:
    own = fingerprint(source, "auto", 0, "max_model_len=100")
    check_same_model(text(source), worker(own))
    with pytest.raises(ConfigError) as caught:
        check_same_model(text(source), worker("folder:0123+max_model_len=100"))
    weights = own.partition("+")[0]
    reason = f"model: 'ours' here is {weights}, the worker's 'theirs' is folder:0123+max_model_len"
    assert str(caught.value).startswith(reason)


def test_revisions_are_told_apart(source: ModelSource) -> None:
    hub = ModelSource("me/ours", source.folder, commit="abc")
    for mark in ("hub:abc", "hub:abc+rope=2"):
        check_same_model(text(hub), worker(mark))
    with pytest.raises(ConfigError, match="'me/ours' here is hub:abc, .*'theirs' is hub:def"):
        check_same_model(text(hub), worker("hub:def"))


def test_where_nothing_is_known_the_vocabulary_counts(source: ModelSource, tmp_path: Path) -> None:
    """A copy of the hub's files, dummy weights, a folder with a tokenizer alone."""
    shutil.copy(source.folder / "config.json", tmp_path)
    for ours, mark in (
        (source, "hub:abc"),
        (source, "dummy:abc"),
        (ModelSource("ours", tmp_path), "folder:0123"),
    ):
        check_same_model(text(ours), worker(mark))
        with pytest.raises(ConfigError, match=f"'ours' knows {VOCAB} tokens, .*'theirs' 100"):
            check_same_model(text(ours), worker(mark, 100))


async def test_a_worker_of_another_model_is_left_at_once(source: ModelSource) -> None:
    service = SessionService(PushedAnswerer(), worker("folder:0123"))
    async with session_server(service) as address:
        engine = RemoteEngine(SessionBackend(address, Plane()), text(source))
        with pytest.raises(ConfigError, match="folder:0123"):
            await engine.start()
        async with asyncio.timeout(30):
            while service.num_sessions:
                await asyncio.sleep(0.001)


async def test_all_sessions_are_of_one_model(
    source: ModelSource, caplog: pytest.LogCaptureFixture
) -> None:
    """A worker of another model that takes over the address is refused, for as long as it is
    there; the log has why."""
    caplog.set_level("INFO")
    answerer, first = PushedAnswerer(), worker(fingerprint(source, "auto", 0))
    with reserved_port("127.0.0.1") as port:
        address = f"127.0.0.1:{port}"
        async with session_server(SessionService(answerer, first), address=address):
            backend = SessionBackend(address, Plane())
            engine = RemoteEngine(backend, text(source))
            assert (await engine.start()).names == ("served",)
        for description in (worker("folder:0123"), first):
            service = SessionService(answerer, description)
            async with session_server(service, address=address), asyncio.timeout(30):
                if description is first:
                    while not backend.is_open:
                        await asyncio.sleep(0.001)
                else:
                    while "fingerprint" not in caplog.text:
                        await asyncio.sleep(0.001)
        await engine.stop()
