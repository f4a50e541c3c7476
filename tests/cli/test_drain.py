import asyncio
import json
from pathlib import Path
from typing import Any

from typer.testing import CliRunner

from millrace.cli import app
from millrace.contracts.methods import FleetRpc
from millrace.contracts.v1 import fleet_pb2
from millrace.wire.channel import PROTOCOL_VERSION, Peer
from tests.services.coordinator.conftest import running


async def left(coordinator: str, member: str, why: str) -> None:
    peer = Peer(coordinator)
    await peer.call(FleetRpc.Leave, fleet_pb2.LeaveRequest(member_id=member, reason=why))
    await peer.close()


async def registered(coordinator: str, member: str) -> None:
    peer = Peer(coordinator)
    request = fleet_pb2.RegisterRequest(
        member_id=member,
        kind=fleet_pb2.MEMBER_KIND_ROLLOUT,
        address=f"{member}.example:1",
        protocol_version=PROTOCOL_VERSION,
    )
    await peer.call(FleetRpc.Register, request)
    await peer.close()


def drain(url: str, *arguments: str) -> Any:
    return CliRunner().invoke(app, ["drain", *arguments, "--url", url], env={"MILLRACE_TOKEN": ""})


def test_a_member_is_drained_by_its_id_and_one_that_is_lost_says_why(tmp_path: Path) -> None:
    with running(tmp_path / "state", "--lost-after-s", "600", environment={"MILLRACE_TOKEN": ""}) as process:
        url = process.client.url
        for member in ("rollout-1a2b3c4d", "rollout-1a99999f"):
            asyncio.run(registered(process.address, member))
        several = drain(url, "rollout-1a")
        assert several.exit_code == 1 and "give more of the id" in several.stderr
        assert json.loads(drain(url, "rollout-1a2", "--json").stdout)["state"] == "draining"
        states = {replica.id: replica.state for replica in process.client.fleet().replicas}
        assert states["rollout-1a2b3c4d"] == "draining" != states["rollout-1a99999f"]
        assert drain(url, "rollout-1a99999f").stdout.split() == ["rollout-1a99999f", "draining"]
        nobody = drain(url, "rollout-nowhere")
        assert nobody.exit_code == 1 and "`millrace fleet` lists the members" in nobody.stderr
        assert "did you mean `rollout-1a2b3c4d`?" in drain(url, "rollout-1b2a3c4d").stderr
        asyncio.run(registered(process.address, "rollout-5e6f"))
        asyncio.run(left(process.address, "rollout-5e6f", "node 1 (gpu-b) of the replica is lost"))
        shown = CliRunner().invoke(app, ["fleet", "--url", url], env={"MILLRACE_TOKEN": ""}).stdout
        assert "rollout-5e6f: left: node 1 (gpu-b) of the replica is lost" in " ".join(shown.split())
