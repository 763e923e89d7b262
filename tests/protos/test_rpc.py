"""Channels and servers against each other over real sockets."""

import asyncio
import json
import logging
import signal
import time
from asyncio.subprocess import Process
from collections.abc import Awaitable, Callable
from dataclasses import asdict, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
import trustme
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    PrivateFormat,
    load_pem_private_key,
)

from protos.errors import PlaneError
from protos.failures import failure_of
from protos.generation_pb2 import Failure
from protos.limits import MAX_MESSAGE_BYTES
from protos.rpc import Plane, RpcConfig, Tls
from protos.secret import Secret
from protos.session_pb2_grpc import SessionStub
from protos.worker_pb2 import (
    DescribeRequest,
    DrainProgress,
    DrainRequest,
    HealthRequest,
    WorkerDescription,
)
from protos.worker_pb2_grpc import WorkerStub
from tests.processes import python
from tests.protos.echo import echo_server
from tests.waiting import until

SECRET = Secret(b"sixteen or more characters")
# a second until a ping, another for its answer, and as much again of a busy machine's
NOTICED_S = 4.0
PROMISED_S = 2.2  # which are two, and what it takes to see that


async def describe(plane: Plane, address: str) -> str:
    async with plane.channel(address) as channel:
        request = DescribeRequest(protocol=1, version="tests")
        return (await WorkerStub(channel).Describe(request, timeout=10)).model


async def test_secret_opens_the_door_for_every_kind_of_call() -> None:
    plane = Plane(SECRET)
    async with echo_server(plane) as (echo, address), plane.channel(address) as channel:
        worker = WorkerStub(channel)
        assert (await worker.Describe(DescribeRequest(version="x"), timeout=10)).model == "x"
        drain = worker.Drain(DrainRequest(), metadata=(("own", "kept"),))
        assert await drain.read() == DrainProgress(num_sequences=1)
        drain.cancel()
        async with asyncio.timeout(30):
            await echo.ended.wait()


@pytest.mark.parametrize("secret", [None, Secret(SECRET.value + b"!"), Secret(b"\xff" * 20)])
async def test_wrong_secret_reaches_no_handler(secret: Secret | None) -> None:
    async with echo_server(Plane(SECRET)) as (echo, address):
        async with Plane(secret).channel(address) as channel:
            worker, session = WorkerStub(channel), SessionStub(channel)
            ends = [await ended(worker.Describe(DescribeRequest(), timeout=10))]
            ends.append(await ended(worker.Drain(DrainRequest(), timeout=10).read()))
            # nothing is sent: the refusal does not wait for a message, nor for a known method
            stream = session.Open(timeout=10)
            ends.append(await ended(stream.read()))
        assert {end.code() for end in ends} == {grpc.StatusCode.UNAUTHENTICATED}
        assert {end.details() for end in ends} == {"the cluster secret is missing or wrong"}
        assert echo.num_calls == 0
        failure = failure_of(ends[0])
        assert (failure.kind, failure.field) == (Failure.KIND_INCOMPATIBLE, "secret")


@pytest.mark.parametrize("is_tls", [False, True])
async def test_every_end_pings_often_enough(monkeypatch: pytest.MonkeyPatch, is_tls: bool) -> None:
    """A peer that is gone is noticed within two seconds, on streams where nothing moves too."""
    made: list[dict[str, int]] = []

    def record(name: str) -> None:
        make = getattr(grpc.aio, name)

        def recorded(*args: Any, options: Any = None, **more: Any) -> Any:
            made.append(dict(args[-1] if options is None else options))
            return make(*args, **more) if options is None else make(*args, options=options, **more)

        monkeypatch.setattr(grpc.aio, name, recorded)

    for name in ("insecure_channel", "secure_channel", "server"):
        record(name)
    plane = Plane(tls=Tls(None, None, None, None) if is_tls else None)
    async with plane.channel("127.0.0.1:1"):
        plane.server()
    client, server = made
    for end in (client, server):
        assert end["grpc.keepalive_time_ms"] + end["grpc.http2.ping_timeout_ms"] <= 2000
        assert end["grpc.http2.max_pings_without_data"] == 0, "as many as it takes"
    allowed = server["grpc.http2.min_recv_ping_interval_without_data_ms"]
    assert allowed < client["grpc.keepalive_time_ms"]
    assert server["grpc.http2.max_ping_strikes"] == 0


async def ended(answer: object) -> grpc.aio.AioRpcError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await answer  # type: ignore[misc]
    return caught.value


async def test_failure_travels_in_the_status() -> None:
    async with echo_server(Plane()) as (_, address), Plane().channel(address) as channel:
        end = await ended(WorkerStub(channel).CheckHealth(HealthRequest(), timeout=10))
    assert end.code() is grpc.StatusCode.FAILED_PRECONDITION
    failure = failure_of(end)
    assert failure == Failure(
        kind=Failure.KIND_INCOMPATIBLE, field="block_size", message="16 and 64"
    )


async def test_nobody_there_is_said_at_once() -> None:
    async with echo_server(Plane()) as (_, address):
        pass
    started = time.monotonic()
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await describe(Plane(), address)
    assert time.monotonic() - started < NOTICED_S
    assert failure_of(caught.value).kind == Failure.KIND_UNAVAILABLE


async def test_messages_are_bounded() -> None:
    async with echo_server(Plane()) as (_, address), Plane().channel(address) as channel:
        request = DescribeRequest(version="x" * (MAX_MESSAGE_BYTES + 1))
        end = await ended(WorkerStub(channel).Describe(request, timeout=10))
        assert end.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        half = DescribeRequest(version="x" * (MAX_MESSAGE_BYTES // 2))
        assert len((await WorkerStub(channel).Describe(half, timeout=10)).model) == 2 << 20


async def test_bytes_that_are_no_message_are_one_line_in_the_log(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with echo_server(Plane()) as (echo, address), Plane().channel(address) as channel:
        call: Any = channel.unary_unary("/kvrelay.v1.Worker/Describe")
        end = await ended(call(b"\xff", timeout=10))
        misread: Any = channel.unary_unary(
            "/kvrelay.v1.Worker/Describe",
            response_deserializer=lambda _: WorkerDescription.FromString(b"\xff"),
        )
        assert await misread(b"", timeout=10) is None
    assert "Error parsing message" in (end.details() or "")
    assert echo.num_calls == 1
    lines = [logging.Formatter().format(record) for record in caplog.records]
    assert [line for line in lines if "\n" in line or len(line) > 200] == []
    assert len(lines) == 2, lines


async def test_without_a_secret_only_this_machine_is_served() -> None:
    for address in ("0.0.0.0:0", "[::]:0", "192.0.2.1:0", "some-host:0"):
        with pytest.raises(PlaneError, match=r"listen: .*secret"):
            Plane().listen(Plane().server(), address)
    plane = Plane(SECRET)
    bound = plane.listen(plane.server(), "0.0.0.0:0")
    assert bound.startswith("0.0.0.0:")
    assert not bound.endswith(":0")


async def test_a_port_is_not_shared() -> None:
    async with echo_server(Plane()) as (_, address):
        with pytest.raises(PlaneError, match="cannot be listened on"):
            Plane().listen(Plane().server(), address)


# What OpenSSL says of a certificate, and gRPC.
WRONG = {
    "expired": "certificate has expired",
    "early": "certificate is not yet valid",
    "signer": "unable to get local issuer certificate",
}
WRONG_NAME = "Hostname Verification Check failed"


class TestTls:
    @pytest.fixture
    def authority(self, tmp_path: Path) -> trustme.CA:
        authority = trustme.CA()
        authority.cert_pem.write_to_path(str(tmp_path / "ca.pem"))
        return authority

    def config(
        self,
        folder: Path,
        signer: trustme.CA,
        name: str,
        begins: int = -1,  # days from now
        ends: int = 1,
        **more: str,
    ) -> RpcConfig:
        begin, end = (datetime.now(UTC) + timedelta(days=days) for days in (begins, ends))
        certificate = signer.issue_cert(name, not_before=begin, not_after=end)
        certificate.private_key_pem.write_to_path(str(folder / f"{name}.key"))
        certificate.cert_chain_pems[0].write_to_path(str(folder / f"{name}.pem"))
        return RpcConfig(
            tls_certificate=str(folder / f"{name}.pem"),
            tls_key=str(folder / f"{name}.key"),
            tls_authority=str(folder / "ca.pem"),
            **more,
        )

    async def test_mutual(self, tmp_path: Path, authority: trustme.CA) -> None:
        plane = Plane.load(self.config(tmp_path, authority, "127.0.0.1"), {})
        async with echo_server(plane) as (echo, address):
            assert await describe(plane, address) == "tests"
            stranger = self.config(tmp_path, trustme.CA(), "stranger")
            only_authority = RpcConfig(tls_authority=str(tmp_path / "ca.pem"))
            for config in (RpcConfig(), stranger, only_authority):
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    await describe(Plane.load(config, {}), address)
                assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
            assert echo.num_calls == 1

    @pytest.mark.parametrize(("fault", "reason"), [*WRONG.items(), ("name", WRONG_NAME)])
    async def test_a_client_says_what_is_wrong_with_a_certificate(
        self, tmp_path: Path, authority: trustme.CA, fault: str, reason: str
    ) -> None:
        bad, good = self.bad_and_good(tmp_path, authority, fault)
        async with echo_server(Plane.load(bad, {})) as (echo, address):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await describe(Plane.load(good, {}), address)
        assert reason in failure_of(caught.value).message
        assert echo.num_calls == 0

    async def test_a_server_says_it_where_grpc_may_speak(
        self, tmp_path: Path, authority: trustme.CA
    ) -> None:
        """The client, whose certificate it is, sees that it was hung up on. It has no name that
        anyone could know."""
        configs = {fault: self.bad_and_good(tmp_path, authority, fault) for fault in WRONG}
        _, good = configs["signer"]
        log, words = tmp_path / "log", ("-c", SERVER, json.dumps(asdict(good)))
        async with python(*words, log=log, GRPC_VERBOSITY="info") as (_, address):
            for bad, _ in configs.values():
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    await describe(Plane.load(bad, {}), address)
                assert "not take our certificate" in failure_of(caught.value).message
            named, _ = self.bad_and_good(tmp_path, authority, "name")
            assert await describe(Plane.load(named, {}), address) == "tests"
            # A thread of the server's says it, maybe after the client was hung up on.
            await until(lambda: all(reason in log.read_text() for reason in WRONG.values()))

    def bad_and_good(
        self, folder: Path, authority: trustme.CA, fault: str
    ) -> tuple[RpcConfig, RpcConfig]:
        (folder / fault).mkdir()
        authority.cert_pem.write_to_path(str(folder / fault / "ca.pem"))
        signer = trustme.CA() if fault == "signer" else authority
        name = "elsewhere" if fault == "name" else "127.0.0.1"
        begins, ends = {"expired": (-2, -1), "early": (1, 2)}.get(fault, (-1, 1))
        bad = self.config(folder / fault, signer, name, begins, ends)
        return bad, self.config(folder, authority, "127.0.0.1")

    async def test_one_name_for_all_workers(self, tmp_path: Path, authority: trustme.CA) -> None:
        shared = self.config(tmp_path, authority, "worker.cluster")
        named = self.config(tmp_path, authority, "worker.cluster", tls_server_name="worker.cluster")
        async with echo_server(Plane.load(named, {})) as (_, address):
            assert await describe(Plane.load(named, {}), address) == "tests"
            with pytest.raises(grpc.aio.AioRpcError):
                await describe(Plane.load(shared, {}), address)

    async def test_server_needs_a_certificate(self, tmp_path: Path, authority: trustme.CA) -> None:
        plane = Plane.load(RpcConfig(tls_authority=str(tmp_path / "ca.pem")), {})
        with pytest.raises(PlaneError, match="tls_certificate"):
            plane.listen(plane.server(), "127.0.0.1:0")

    def test_files_are_checked(self, tmp_path: Path) -> None:
        (tmp_path / "no.pem").write_text("nothing")
        wrong = {
            "tls_key": RpcConfig(tls_certificate="x"),
            "tls_certificate": RpcConfig(tls_key="x"),
            "tls_authority": RpcConfig(tls_authority=str(tmp_path / "absent")),
            "tls_server_name": RpcConfig(tls_server_name="worker"),
        }
        wrong_content = RpcConfig(tls_authority=str(tmp_path / "no.pem"))
        for field, config in wrong.items():
            with pytest.raises(PlaneError, match=f"{field}: "):
                Plane.load(config, {})
        with pytest.raises(PlaneError, match="tls_authority: .*PEM"):
            Plane.load(wrong_content, {})

    def test_what_no_connection_could_be_made_with_is_refused(
        self, tmp_path: Path, authority: trustme.CA
    ) -> None:
        good = self.config(tmp_path, authority, "127.0.0.1")
        other = self.config(tmp_path, authority, "other")
        locked = tmp_path / "locked.key"
        key = load_pem_private_key(Path(str(good.tls_key)).read_bytes(), None)
        locked.write_bytes(
            key.private_bytes(
                Encoding.PEM, PrivateFormat.PKCS8, BestAvailableEncryption(b"a passphrase")
            )
        )
        certificate, broken = Path(str(good.tls_certificate)), tmp_path / "broken.key"
        broken.write_text("-----BEGIN PRIVATE KEY-----\nAAAA\n-----END PRIVATE KEY-----\n")
        no_certificate = str(good.tls_key)
        refused = {
            "tls_key: .*other.key is not the key of the": replace(good, tls_key=other.tls_key),
            "tls_key: .*locked.key is encrypted": replace(good, tls_key=str(locked)),
            "tls_key: .*broken.key cannot be used": replace(good, tls_key=str(broken)),
            "tls_key: .*pem cannot be used": replace(good, tls_key=str(certificate)),
            "tls_certificate: .* has no cert": replace(good, tls_certificate=no_certificate),
            "tls_authority: .* has no certificate": RpcConfig(tls_authority=no_certificate),
        }
        for words, config in refused.items():
            with pytest.raises(PlaneError, match=words):
                Plane.load(config, {})
        assert Plane.load(good, {}).tls is not None


SERVER = """
import asyncio, json, sys
from protos.rpc import Plane, RpcConfig
from tests.protos.echo import echo_server
async def main():
    plane = Plane.load(RpcConfig(**json.loads(sys.argv[1])), {})
    async with echo_server(plane) as (_, address):
        print(address, flush=True)
        await asyncio.Event().wait()
asyncio.run(main())
"""
CLIENT = """
import asyncio, sys
from protos.rpc import Plane
from protos.worker_pb2 import DrainRequest
from protos.worker_pb2_grpc import WorkerStub
async def main():
    async with Plane().channel(sys.argv[1]) as channel:
        call = WorkerStub(channel).Drain(DrainRequest())
        await call.read()
        print("reading", flush=True)
        await call.read()
asyncio.run(main())
"""


async def check_noticed(one_time: Callable[[], Awaitable[float]]) -> None:
    """Within what is promised, where a busy machine lets it once in three times."""
    times: list[float] = []
    while len(times) < 3 and min(times, default=NOTICED_S) > PROMISED_S:
        times.append(await one_time())
        assert times[-1] < NOTICED_S
    assert min(times) <= PROMISED_S, times


async def test_a_stopped_server_breaks_the_stream() -> None:
    async def one_time(child: Process, address: str) -> float:
        async with Plane().channel(address) as channel:
            call = WorkerStub(channel).Drain(DrainRequest())
            await call.read()
            child.send_signal(signal.SIGSTOP)
            started = time.monotonic()
            end = await ended(call.read())
            took = time.monotonic() - started
        child.send_signal(signal.SIGCONT)
        assert end.code() is grpc.StatusCode.UNAVAILABLE
        return took

    async with python("-c", SERVER, "{}") as (child, address):
        await check_noticed(lambda: one_time(child, address))


@pytest.mark.parametrize("number", [signal.SIGSTOP, signal.SIGKILL])
async def test_a_client_that_is_gone_ends_its_calls(number: signal.Signals) -> None:
    async def one_time() -> float:
        async with (
            echo_server(Plane()) as (echo, address),
            python("-c", CLIENT, address) as (child, line),
        ):
            assert line == "reading"
            assert not echo.ended.is_set()
            started = time.monotonic()
            child.send_signal(number)
            async with asyncio.timeout(30):
                await echo.ended.wait()
            return time.monotonic() - started

    await check_noticed(one_time)
