"""Workers and their client with TLS and a secret, as their user starts them."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from tempfile import NamedTemporaryFile

import pytest
import pytest_asyncio
import trustme

from cluster.make_worker import node_config
from cluster.worker_config import ConnectorChoice, WorkerConfig, WorkerRole
from engine.config import EngineConfig
from protos.rpc import Plane, RpcConfig
from tests.forked import first_line, forked

pytestmark = pytest.mark.asyncio(loop_scope="module")

ENGINE = ("--connector", "socket", "--kernels", "reference", "--kv-cache-memory-bytes", "16MiB")


@dataclass(frozen=True)
class Identity:
    """Whose certificate is shown, who is trusted, and which secret is known."""

    folder: Path
    signer: str = "ours"
    trusts: str = "ours"
    secret: str = "ours"

    @property
    def flags(self) -> tuple[str, ...]:
        return (
            *("--tls-certificate", str(self.folder / f"{self.signer}.pem")),
            *("--tls-key", str(self.folder / f"{self.signer}.key")),
            *("--tls-authority", str(self.folder / f"{self.trusts}.ca")),
            *("--secret-file", str(self.folder / f"{self.secret}.secret")),
        )


@dataclass(frozen=True)
class Workers:
    decode: str
    prefill: str
    stranger: str  # a prefill worker of another authority
    log: Path  # the decode worker's


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tls")
    for name in ("ours", "theirs"):
        authority = trustme.CA()
        authority.cert_pem.write_to_path(str(folder / f"{name}.ca"))
        certificate = authority.issue_cert("127.0.0.1")
        certificate.private_key_pem.write_to_path(str(folder / f"{name}.key"))
        certificate.cert_chain_pems[0].write_to_path(str(folder / f"{name}.pem"))
        secret = folder / f"{name}.secret"
        secret.write_text(f"a secret that is {name} alone")
        secret.chmod(0o600)
    return folder


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def workers(folder: Path) -> AsyncIterator[Workers]:
    ours, theirs = Identity(folder), Identity(folder, "theirs", "theirs")
    config = folder / "worker.yaml"
    config.write_text("exchange:\n  unreachable_patience_s: 0.5\n")
    started = (("decode", ours), ("prefill", ours), ("prefill", theirs))
    async with AsyncExitStack() as stack:
        addresses = []
        for number, (role, identity) in enumerate(started):
            words = ("worker", "bundled", "--config", str(config), "--role", role)
            log = folder / f"{number}.log"
            child = await stack.enter_async_context(
                forked("cluster.cli", *words, *ENGINE, *identity.flags, log=log)
            )
            addresses.append((await first_line(child, log)).split()[-1])
        decode, prefill, stranger = addresses
        yield Workers(decode, prefill, stranger, folder / "0.log")


async def generate(workers: Workers, prefill: str, *flags: str) -> tuple[str, str]:
    """What `kvrelay generate` says, on its output and beside it."""
    words = [
        *("generate", "bundled", "--prompt", "import os\n", "--max-tokens", "4"),
        *("--temperature", "0", "--session", workers.decode),
        *("--prefill", prefill, "--local-prefill", "never", *flags),
    ]
    with NamedTemporaryFile() as errors:
        async with forked("cluster.cli", *words, log=Path(errors.name)) as child:
            async with asyncio.timeout(60):
                out = await child.stdout.read()
                await child.wait()
        return out.decode(), errors.read().decode()


async def test_prompt_cache_and_answer_travel_encrypted(folder: Path, workers: Workers) -> None:
    text, report = await generate(workers, workers.prefill, *Identity(folder).flags)
    assert text.strip()
    assert "4 out" in report
    assert f"linked to {workers.prefill} by socket" in workers.log.read_text()


@pytest.mark.parametrize(
    ("who", "reason"),
    [
        ({"trusts": "theirs"}, "CERTIFICATE_VERIFY_FAILED"),
        ({"signer": "theirs"}, "or not take our certificate"),
        ({"secret": "theirs"}, "the cluster secret is missing or wrong"),
    ],
)
async def test_a_client_of_another_authority_is_refused(
    folder: Path, workers: Workers, who: dict[str, str], reason: str
) -> None:
    text, problem = await generate(workers, workers.prefill, *Identity(folder, **who).flags)
    assert not text
    assert problem.startswith(f"kvrelay generate: {workers.decode}: ")
    assert reason in problem


async def test_a_client_without_tls_is_refused(folder: Path, workers: Workers) -> None:
    secret = str(folder / "ours.secret")
    text, problem = await generate(workers, workers.prefill, "--secret-file", secret)
    assert not text
    assert "the peer may want TLS" in problem


async def test_a_prefill_worker_of_another_authority_is_not_asked(
    folder: Path, workers: Workers
) -> None:
    text, problem = await generate(workers, workers.stranger, *Identity(folder).flags)
    assert not text
    for said in (problem, workers.log.read_text()):
        assert f"no prefill worker could serve: {workers.stranger}: " in said
        assert "CERTIFICATE_VERIFY_FAILED" in said


@pytest.mark.parametrize(
    ("connector", "encrypted", "beyond"),
    [("auto", True, False), ("auto", False, True), ("nixl", True, True)],
)
async def test_nixl_leaves_its_host_only_where_that_was_wanted(
    folder: Path, connector: str, encrypted: bool, beyond: bool
) -> None:
    """It encrypts nothing."""
    rpc = RpcConfig()
    if encrypted:
        rpc = RpcConfig(tls_certificate=str(folder / "ours.pem"), tls_key=str(folder / "ours.key"))
    config = WorkerConfig(
        WorkerRole.PREFILL, connector=ConnectorChoice(connector), rpc=rpc, engine=EngineConfig("m")
    )
    assert node_config(config, Plane()).connector.nixl.beyond_host is beyond
