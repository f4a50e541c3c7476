"""Messages that no member sends: typed errors, no traceback, bounded memory, and the coordinator goes on."""

import asyncio
from typing import Any

import pytest

from millrace.contracts.v1 import common_pb2, fleet_pb2, work_pb2
from millrace.rest import JobState
from millrace.wire.channel import PROTOCOL_VERSION
from tests.peak_memory import Peak
from tests.services.coordinator.conftest import CoordinatorProcess
from tests.wire.fuzz import fuzz, methods_of

MEMBER = "rollout-1a2b3c4d"


def valid(job_id: str) -> dict[str, list[Any]]:
    ref = work_pb2.LeaseRef(job_id=job_id, lease_id="1-0", fence=1, purpose=common_pb2.PURPOSE_TRAIN)
    trajectory = common_pb2.Trajectory(
        tokens=b"\1\0\0\0" * 3, logprobs=bytes(12), versions=[common_pb2.VersionSpan(start=0, end=3)], reward=1.0
    )
    group = common_pb2.Group(
        job_id=job_id, prompt_id="0-1", prompt_tokens=b"\1\0\0\0", trajectories=[trajectory] * 2, member_id=MEMBER
    )
    register = fleet_pb2.RegisterRequest(
        member_id=MEMBER,
        kind=fleet_pb2.MEMBER_KIND_ROLLOUT,
        address="127.0.0.1:1",
        protocol_version=PROTOCOL_VERSION,
        world_size=1,
    )
    return {
        "Register": [register],
        "Heartbeat": [fleet_pb2.HeartbeatRequest(member_id=MEMBER, version=-1, tokens=5)],
        "Drain": [fleet_pb2.DrainRequest(member_id=MEMBER)],
        "Leave": [fleet_pb2.LeaveRequest(member_id=MEMBER, reason="it is told to")],
        "Lease": [work_pb2.LeaseRequest(member_id=MEMBER, free_samples=8, wait_s=0.1)],
        "Extend": [work_pb2.ExtendRequest(member_id=MEMBER, leases=[ref])],
        "Complete": [
            work_pb2.CompleteRequest(member_id=MEMBER, ref=ref, group=group),
            work_pb2.CompleteRequest(
                member_id=MEMBER, ref=ref, drop=common_pb2.Drop(reason=common_pb2.DROP_REASON_BAD_ROW)
            ),
        ],
        "Release": [work_pb2.ReleaseRequest(member_id=MEMBER, leases=[ref])],
        "Fetch": [work_pb2.FetchRequest(job_id=job_id, prompt_ids=["0-1", "0-2"])],
    }


@pytest.mark.slow
@pytest.mark.parametrize("each", [24, pytest.param(2000, marks=pytest.mark.matrix)])
def test_odd_messages(shared: CoordinatorProcess, spec: dict[str, Any], each: int) -> None:
    assert shared.process is not None
    job_id = shared.client.submit(spec).id
    peak = Peak(shared.process.pid)
    found = asyncio.run(fuzz(shared.address, [*methods_of("Fleet"), *methods_of("Work")], valid(job_id), each=each))
    assert {"OK", "INVALID_ARGUMENT", "NOT_FOUND"} <= set(found)
    assert peak.grown < 128 << 20
    assert "Traceback" not in shared.log() and "a bug in this service" not in shared.log()
    # A member that registered by an odd message may have been taken for a trainer.
    assert shared.client.job(job_id).state in (JobState.QUEUED, JobState.STARTING)
    assert shared.client.cancel(job_id).state is JobState.CANCELLED
