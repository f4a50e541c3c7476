"""Calls between services by mutual TLS, and every way in which two sides do not trust each other."""

import asyncio
import dataclasses
import ssl
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from millrace.client import Client
from millrace.contracts.methods import WorkRpc
from millrace.contracts.v1 import work_pb2, work_pb2_grpc
from millrace.errors import InvalidState, MillraceError, Unavailable, Untrusted
from millrace.wire import probe
from millrace.wire.channel import Peer
from millrace.wire.http_server import HttpServer, listening
from millrace.wire.server import Server
from millrace.wire.tls import identity as identities
from millrace.wire.tls import own
from millrace.wire.tls.faults import TlsFault
from millrace.wire.tls.own import LOOK_EVERY_S
from tests.certificates import Authority, Files

VARIABLES = tuple(f"MILLRACE_TLS_{name}" for name in ("CERT", "KEY", "CA", "CRL", "NAME", "REST_CLIENTS"))
PLAIN: dict[str, str] = {}
Use = Callable[[str], Awaitable[None]]


class Work(work_pb2_grpc.WorkServicer):
    async def Lease(self, request, context):
        return work_pb2.LeaseResponse()


@pytest.fixture
def become(monkeypatch: pytest.MonkeyPatch) -> Callable[[dict[str, str]], None]:
    """Gives this process an identity, or none."""

    def give(variables: dict[str, str]) -> None:
        for name in (*VARIABLES, "MILLRACE_TOKEN", "MILLRACE_TOKEN_FILE"):
            monkeypatch.delenv(name, raising=False)
        for name, value in variables.items():
            monkeypatch.setenv(name, value)

    give({})
    return give


@pytest.fixture
def fleet(tmp_path: Path) -> Authority:
    return Authority(tmp_path / "fleet")


async def serving(use: Use) -> None:
    """A gRPC server with the identity that the process has now."""
    add = {"millrace.v1.Work": lambda server: work_pb2_grpc.add_WorkServicer_to_server(Work(), server)}
    server = Server(add, "127.0.0.1", 0)
    await server.start()
    try:
        await use(f"127.0.0.1:{server.port}")
    finally:
        await server.stop(0.1)


async def lease(peer: Peer) -> None:
    await peer.call(WorkRpc.Lease, work_pb2.LeaseRequest())


async def called(address: str) -> None:
    peer = Peer(address, {WorkRpc.Lease.key: 10.0})
    try:
        await lease(peer)
    finally:
        await peer.close()


def test_members_of_one_authority_reach_each_other(become, fleet: Authority) -> None:
    become(fleet.member("server").variables())

    async def use(address: str) -> None:
        become(fleet.member("replica").variables())
        await called(address)
        assert await asyncio.to_thread(probe.serving, address) == (True, f"{address}: SERVING")

    asyncio.run(serving(use))


CASES = [
    "plaintext caller",
    "plaintext server",
    "caller of another CA",
    "server of another CA",
    "expired caller",
    "expired server",
    "server of another name",
    "caller without a certificate",
    "revoked server",
]


def faults(fleet: Authority, other: Authority) -> dict[str, tuple[dict[str, str], dict[str, str], TlsFault, str]]:
    """By name: the server, the caller, what is wrong, and words that the error has to hold."""
    good, caller = fleet.member("server").variables(), fleet.member("caller").variables()
    stranger = dataclasses.replace(other.member("stranger"), ca=fleet.ca).variables()
    deceived = dataclasses.replace(fleet.member("deceived"), ca=other.ca).variables()
    stale = fleet.member("stale", days=-1).variables()
    elsewhere = fleet.member("elsewhere", names=["10.9.9.9", "gpu-9"]).variables()
    fleet.member("stolen")
    revoked = dataclasses.replace(fleet.member("stolen"), crl=fleet.revoke("stolen")).variables()
    careful = caller | {"MILLRACE_TLS_CRL": revoked["MILLRACE_TLS_CRL"]}
    nobody = {"MILLRACE_TLS_CA": str(fleet.ca)}
    return {
        "plaintext caller": (good, PLAIN, TlsFault.PLAINTEXT, "MILLRACE_TLS_CERT"),
        "plaintext server": (PLAIN, caller, TlsFault.NO_TLS, "speaks plaintext"),
        "caller of another CA": (good, stranger, TlsFault.WRONG_CA, "CN=stranger"),
        "server of another CA": (good, deceived, TlsFault.WRONG_CA, "its certificate"),
        "expired caller": (good, stale, TlsFault.EXPIRED, "CN=stale"),
        "expired server": (stale, caller, TlsFault.EXPIRED, "its certificate has expired"),
        "server of another name": (elsewhere, caller, TlsFault.WRONG_NAME, "MILLRACE_TLS_NAME"),
        "caller without a certificate": (good, nobody, TlsFault.NO_CERTIFICATE, "set MILLRACE_TLS_CERT"),
        "revoked server": (revoked, careful, TlsFault.REVOKED, "its certificate was revoked"),
    }


@pytest.mark.parametrize("name", CASES)
def test_an_error_says_why_two_sides_do_not_trust_each_other(
    name: str, become, fleet: Authority, tmp_path: Path
) -> None:
    every = faults(fleet, Authority(tmp_path / "other", "other"))
    assert [*every] == CASES
    server, caller, fault, words = every[name]
    become(server)

    async def use(address: str) -> None:
        become(caller)
        with pytest.raises(Untrusted) as told:
            await called(address)
        assert told.value.fault == fault
        assert words in str(told.value) and address in told.value.what and told.value.fix

    asyncio.run(serving(use))


def test_a_revoked_caller_is_refused_on_a_connection_that_is_open(become, fleet: Authority) -> None:
    become(dataclasses.replace(fleet.member("server"), crl=fleet.revoke()).variables())

    async def use(address: str) -> None:
        become(fleet.member("replica").variables())
        peer = Peer(address, {WorkRpc.Lease.key: 10.0})
        await lease(peer)
        fleet.revoke("replica")
        await asyncio.sleep(LOOK_EVERY_S)
        with pytest.raises(Untrusted, match=r"the certificate of CN=replica was revoked.*new certificate"):
            await lease(peer)
        await peer.close()

    asyncio.run(serving(use))


def test_files_that_change_are_used_without_a_restart(become, fleet: Authority) -> None:
    become(fleet.member("server").variables())

    async def use(address: str) -> None:
        fleet.member("server", names=["elsewhere"])  # what connects from now on sees the new certificate
        become(fleet.member("replica", days=-1).variables())
        peer = Peer(address, {WorkRpc.Lease.key: 10.0})
        await asyncio.sleep(LOOK_EVERY_S)
        with pytest.raises(Untrusted):
            await lease(peer)
        fleet.member("replica")
        fleet.member("server")
        await asyncio.sleep(2 * LOOK_EVERY_S)
        await peer.call(WorkRpc.Lease, work_pb2.LeaseRequest(), attempts=5)
        await peer.close()

    asyncio.run(serving(use))


def test_files_in_the_middle_of_a_renewal_are_left_aside(become, fleet: Authority, monkeypatch) -> None:
    files = fleet.member("server")
    become(files.variables())
    own = identities()
    assert own is not None and own is identities()
    before, key = own.contents, files.key.read_bytes()
    fleet.member("server")
    new = files.key.read_bytes()
    files.key.write_bytes(key + b"\n")  # the new certificate, the old key
    monkeypatch.setattr("millrace.wire.tls.own.LOOK_EVERY_S", 0.0)
    assert own.refresh().contents == before and own.number == 1
    files.key.write_bytes(new)
    assert own.refresh().contents.key == new and own.number == 2


@pytest.mark.parametrize(
    ("missing", "said"),
    [
        ("MILLRACE_TLS_CA", "MILLRACE_TLS_CA: is not set"),
        ("MILLRACE_TLS_KEY", "MILLRACE_TLS_KEY: is not set"),
        ("MILLRACE_TLS_CERT", "MILLRACE_TLS_CERT: is not set"),
    ],
)
def test_settings_that_lack_a_file_are_refused(missing: str, said: str, become, fleet: Authority) -> None:
    become(fleet.member("server").variables() | {missing: ""})
    with pytest.raises(InvalidState, match=said) as told:
        identities()
    assert "PEM" in told.value.fix


def test_files_that_cannot_be_used_are_named(become, fleet: Authority, tmp_path: Path) -> None:
    files = fleet.member("server")
    become(files.variables() | {"MILLRACE_TLS_CA": str(tmp_path / "none")})
    with pytest.raises(InvalidState, match=r'MILLRACE_TLS_CA: ".*none": No such file'):
        identities()
    become(files.variables() | {"MILLRACE_TLS_KEY": str(fleet.member("other").key)})
    with pytest.raises(InvalidState, match=r"MILLRACE_TLS_CERT: .*KEY_VALUES_MISMATCH"):
        identities()
    strangers = Authority(tmp_path / "strangers", "strangers").revoke()
    become(files.variables() | {"MILLRACE_TLS_CRL": str(strangers)})
    with pytest.raises(InvalidState, match=r"MILLRACE_TLS_CRL: the list of CN=strangers is not signed"):
        identities()
    become({"MILLRACE_TLS_CA": str(fleet.ca)})

    async def serve() -> None:
        with pytest.raises(InvalidState, match="a service needs a certificate of its own"):
            Server({}, "127.0.0.1", 0)

    asyncio.run(serve())


def test_one_name_stands_for_all_addresses(become, fleet: Authority) -> None:
    name = {"MILLRACE_TLS_NAME": "members.millrace"}
    become(fleet.member("server", names=["members.millrace"]).variables())

    async def use(address: str) -> None:
        become(fleet.member("replica").variables() | name)
        await called(address)

    asyncio.run(serving(use))


# HTTP.


async def _answer(scope, receive, send) -> None:
    body = b'{"status": "ready"}' if scope["scheme"] == "https" else b'{"status": "plain"}'
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"application/json")]})
    await send({"type": "http.response.body", "body": body})


async def rest(use: Callable[[int], None], *, required: bool = False) -> None:
    server = HttpServer(_answer, certificate_required=required)
    server.config.lifespan = "off"
    with listening("127.0.0.1", 0, "--port") as listener:
        task = asyncio.create_task(server.serve(sockets=[listener]))
        try:
            await asyncio.to_thread(use, listener.getsockname()[1])
        finally:
            server.should_exit = True
            await task


def told(url: str) -> MillraceError:
    with pytest.raises(Unavailable) as found, Client(url, patience_s=0.2) as client:
        client.fleet()
    return found.value


def test_rest_is_served_by_tls_and_reloads_its_certificate(become, fleet: Authority) -> None:
    become(fleet.member("coordinator").variables())

    def use(port: int) -> None:
        url = f"https://127.0.0.1:{port}"
        become({"MILLRACE_TLS_CA": str(fleet.ca)})
        with Client(url) as client:
            assert client.ready()
        fleet.member("coordinator", names=["elsewhere"])
        time.sleep(LOOK_EVERY_S)
        assert getattr(told(url), "fault", "") == TlsFault.WRONG_NAME
        assert getattr(told(f"http://127.0.0.1:{port}"), "fault", "") == TlsFault.PLAINTEXT

    asyncio.run(rest(use))


def test_rest_may_ask_for_certificates(become, fleet: Authority, tmp_path: Path) -> None:
    stranger = dataclasses.replace(Authority(tmp_path / "other", "other").member("stranger"), ca=fleet.ca)
    stolen = fleet.member("stolen")
    crl = fleet.revoke("stolen")
    become(dataclasses.replace(fleet.member("coordinator"), crl=crl).variables())

    def fault(files: Files, port: int) -> str:
        become(files.variables())
        return getattr(told(f"https://127.0.0.1:{port}"), "fault", "")

    def use(port: int) -> None:
        become({"MILLRACE_TLS_CA": str(fleet.ca)})
        assert getattr(told(f"https://127.0.0.1:{port}"), "fault", "") == TlsFault.NO_CERTIFICATE
        assert fault(stranger, port) == TlsFault.WRONG_CA
        assert fault(fleet.member("stale", days=-1), port) == TlsFault.EXPIRED
        become(fleet.member("alice").variables())
        with Client(f"https://127.0.0.1:{port}") as client:
            assert client.ready()

        become(stolen.variables())
        with (
            pytest.raises(MillraceError, match=r"the certificate of CN=stolen was revoked.*new certificate"),
            Client(f"https://127.0.0.1:{port}") as client,
        ):
            client.fleet()

    asyncio.run(rest(use, required=True))


def test_outside_clients_trust_the_authorities_of_the_host_and_read_them_for_https_only(
    become, fleet: Authority, monkeypatch: pytest.MonkeyPatch
) -> None:
    become(fleet.member("outside").variables())
    monkeypatch.setenv("SSL_CERT_FILE", str(fleet.ca))

    def use(port: int) -> None:
        become(PLAIN)
        url = f"HTTPS://127.0.0.1:{port}"
        with Client(url) as client:
            assert client.ready()
        context = own.trusted_by_host(url)
        assert context.cert_store_stats()["x509_ca"] == 1 and own.verifying(url) is context
        for plain in (own.trusted_by_host("http://127.0.0.1"), own.verifying("http://127.0.0.1")):
            assert plain.cert_store_stats()["x509"] == 0
            assert plain.verify_mode is ssl.CERT_REQUIRED and plain.check_hostname

    asyncio.run(rest(use))
