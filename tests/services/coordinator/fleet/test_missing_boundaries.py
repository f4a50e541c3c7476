"""What a replica's host does not give to the sandbox of reward functions is shown with the member."""

import asyncio
from typing import Any

from typer.testing import CliRunner

from millrace.cli import app
from millrace.rest import JobState
from millrace.sandbox.boundaries import Boundary
from tests.services.coordinator.cluster import Cluster, scenario


@scenario
async def test_the_fleet_shows_what_the_sandbox_lacks(cluster: Cluster, spec: dict[str, Any]) -> None:
    await cluster.trainer()
    whole, lacking = await cluster.replica(), await cluster.replica()
    lacking.lacks_ipc = True
    assert (await cluster.ended(await cluster.submit(spec))).state is JobState.SUCCEEDED
    client = cluster.coordinator.client
    replicas = {member.id: member for member in (await asyncio.to_thread(client.fleet)).replicas}
    assert replicas[lacking.id].missing_boundaries == {Boundary.IPC: "refused"}
    assert replicas[whole.id].missing_boundaries == {}
    told = await asyncio.to_thread(CliRunner().invoke, app, ["fleet", "--url", client.url])
    assert told.exit_code == 0, told.output
    lines = " ".join(told.output.split())
    assert f"{lacking.id}: the sandbox of reward functions lacks ipc (refused). Fix: `millrace doctor`" in lines
    assert f"{whole.id}: the sandbox" not in lines
