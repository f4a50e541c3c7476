"""What callers cost that have no token, send too much, too slowly, or what cannot be read."""

import asyncio
import contextlib
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable

import grpc
import pytest

from millrace.contracts.methods import FleetRpc
from millrace.contracts.v1 import fleet_pb2, fleet_pb2_grpc
from millrace.errors import InvalidRequest, InvalidState, MillraceError, Unavailable
from millrace.wire import channel, gate
from millrace.wire.channel import Peer
from millrace.wire.server import Server
from tests.peak_memory import Peak
from tests.wire.http2 import call

HEARTBEAT = "/millrace.v1.Fleet/Heartbeat"
HEALTH = "/grpc.health.v1.Health/Check"
MIB = 1 << 20
SENDER = """
import asyncio, sys, grpc
async def one(port, method, size):
    options = [("grpc.max_send_message_length", -1)]
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}", options=options) as channel:
        try:
            reply = await channel.unary_unary(method)(bytes(size), timeout=30)
            print("answered", reply.hex())
        except grpc.aio.AioRpcError as error:
            print(error.code().name)
async def main(port, method, size, calls):
    await asyncio.gather(*(one(port, method, int(size)) for _ in range(int(calls))))
asyncio.run(main(*sys.argv[1:]))
"""


class Fleet(fleet_pb2_grpc.FleetServicer):
    async def Heartbeat(self, request, context):
        if request.member_id == "bug":
            raise ZeroDivisionError("this is a bug")
        if request.member_id == "slow":
            await asyncio.sleep(30)
        return fleet_pb2.HeartbeatResponse(epoch=len(request.member_id))

    async def Leave(self, request, context):
        raise InvalidRequest(request.reason, request.reason)


def served(use: Callable[[int], Awaitable[None]], largest_bytes: int = 512 * MIB) -> None:
    async def whole() -> None:
        add = {"millrace.v1.Fleet": lambda server: fleet_pb2_grpc.add_FleetServicer_to_server(Fleet(), server)}
        server = Server(add, "127.0.0.1", 0, largest_bytes)
        await server.start()
        try:
            await use(server.port)
        finally:
            await server.stop(0.1)

    asyncio.run(whole())


async def sent(port: int, method: str, size: int, calls: int) -> list[str]:
    """How each call ended that sent `size` zeros; from a process of its own, so that they are not in this one."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", SENDER, str(port), method, str(size), str(calls), stdout=subprocess.PIPE
    )
    told, _ = await process.communicate()
    return told.decode().splitlines()


async def beat(port: int, member: str) -> fleet_pb2.HeartbeatResponse:
    peer = Peer(f"127.0.0.1:{port}")
    try:
        return await peer.call(FleetRpc.Heartbeat, fleet_pb2.HeartbeatRequest(member_id=member))
    finally:
        await peer.close()


@pytest.fixture
def token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MILLRACE_TOKEN", "right")


@pytest.mark.usefixtures("token")
def test_nothing_is_read_of_a_caller_without_the_token() -> None:
    async def use(port: int) -> None:
        peak = Peak()
        assert await sent(port, HEARTBEAT, 100 * MIB, 3) == ["UNAUTHENTICATED"] * 3
        assert await sent(port, HEALTH, 100 * MIB, 1) == ["answered 0801"]
        assert peak.grown < 64 * MIB
        assert (await beat(port, "seven..")).epoch == 7

    served(use)


def test_a_message_that_is_too_large_is_not_read() -> None:
    async def use(port: int) -> None:
        peak = Peak()
        assert await sent(port, HEARTBEAT, 100 * MIB, 2) == ["RESOURCE_EXHAUSTED"] * 2
        assert peak.grown < 64 * MIB

    served(use, MIB)


@pytest.mark.usefixtures("token")
@pytest.mark.parametrize("given", [b"right" + b"\xff", "geh\u00e9im".encode(), "geh\u00e9im".encode("latin-1"), b""])
def test_a_token_of_any_bytes_is_refused(given: bytes, capfd: pytest.CaptureFixture[str]) -> None:
    async def use(port: int) -> None:
        assert await call(port, HEARTBEAT.encode(), b"Bearer " + given)
        assert (await beat(port, "seven..")).epoch == 7

    served(use)
    assert "Traceback" not in "".join(capfd.readouterr())


@pytest.mark.parametrize("secret", ["geh\u00e9im", "two words", "line\nbreak"])
def test_a_token_that_cannot_be_sent_is_told(secret: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MILLRACE_TOKEN", secret)
    with pytest.raises(InvalidState, match=r"MILLRACE_TOKEN: holds a space or a character that is not ASCII") as told:
        channel.token()
    assert "openssl" in told.value.fix


def test_messages_that_cannot_be_read_are_one_line(capfd: pytest.CaptureFixture[str]) -> None:
    async def use(port: int) -> None:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as raw:
            for _ in range(20):
                with pytest.raises(grpc.aio.AioRpcError) as told:
                    await raw.unary_unary(HEARTBEAT)(b"\xff\xff\xff", timeout=10)
                assert told.value.code() is grpc.StatusCode.INVALID_ARGUMENT
                assert "3 bytes" in (told.value.details() or "")

    served(use)
    written = "".join(capfd.readouterr())
    assert written.count("message refused") == 1 and "Traceback" not in written


def test_a_bug_is_a_typed_error_and_one_traceback(capfd: pytest.CaptureFixture[str]) -> None:
    async def use(port: int) -> None:
        for _ in range(5):
            with pytest.raises(MillraceError, match=r"Fleet/Heartbeat failed because of a bug in the service"):
                await beat(port, "bug")

    served(use)
    assert "".join(capfd.readouterr()).count("a bug in this service") == 1


def test_a_caller_that_sends_no_message_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gate, "RECEIVE_S", 0.2)

    async def never() -> AsyncIterator[bytes]:
        await asyncio.sleep(30)
        yield b""

    async def nothing() -> AsyncIterator[bytes]:
        for each in ():
            yield each

    async def use(port: int) -> None:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as raw:
            for messages, words in ((never(), "not sent within 0.2 s"), (nothing(), "ended without a message")):
                with pytest.raises(grpc.aio.AioRpcError) as told:
                    await raw.stream_unary(HEARTBEAT)(messages, timeout=10)
                assert told.value.code() is grpc.StatusCode.INVALID_ARGUMENT
                assert words in (told.value.details() or "")

    served(use)


def test_calls_in_progress_have_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gate, "MOST_CALLS", 2)

    async def use(port: int) -> None:
        async def until_it_has_begun() -> None:
            while True:  # it may be refused itself, beside the other one and a quick call
                with contextlib.suppress(Unavailable):
                    await beat(port, "slow")

        slow = [asyncio.create_task(until_it_has_begun()) for _ in range(2)]
        with pytest.raises(Unavailable, match="2 calls are in progress"):
            while True:  # until both have begun
                await beat(port, "seven..")
        for task in slow:
            task.cancel()
        await asyncio.wait(slow)

    served(use)


def test_a_long_error_arrives_shortened() -> None:
    async def use(port: int) -> None:
        peer = Peer(f"127.0.0.1:{port}")
        with pytest.raises(InvalidRequest) as told:
            await peer.call(FleetRpc.Leave, fleet_pb2.LeaveRequest(reason="\u00e9" * 100_000))
        assert told.value.what.startswith("\u00e9" * 1000) and told.value.what.endswith(" …")
        await peer.close()

    served(use)
