"""Messages that no coordinator sends: typed errors, no traceback, bounded memory, and the replica goes on."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from millrace.contracts.v1 import rollout_pb2, trainer_pb2, weights_pb2, work_pb2
from millrace.weights.plans.manifest import Content
from tests.peak_memory import Peak
from tests.services.rollout.coordinator import JOB, configure, status
from tests.services.rollout.jobs import job_spec
from tests.services.rollout.stack import replica_stack
from tests.wire.fuzz import fuzz, methods_of

pytestmark = pytest.mark.slow


def valid(spec: str, manifest: weights_pb2.Manifest) -> dict[str, list[Any]]:
    ref = weights_pb2.PublicationRef(job_id=JOB, version=2, epoch=1, attempt=1)
    receiver = weights_pb2.Receiver(member_id="rollout-1", first_rank=1, world_size=1)
    rendezvous = weights_pb2.Rendezvous(host="127.0.0.1", port=1, world_size=2)
    prepare = rollout_pb2.PrepareReceiveRequest(
        publication=ref,
        path=weights_pb2.PATH_GATHER_BROADCAST,
        manifest=manifest,
        rendezvous=rendezvous,
        receiver=receiver,
        deadline_s=5.0,
        begin=True,
    )
    sampling = work_pb2.Sampling(samples=1, max_response_tokens=2, temperature=1.0, top_p=1.0)
    return {
        "Configure": [rollout_pb2.ConfigureRolloutRequest(job_id=JOB, spec=spec, epoch=1)],
        "DescribeWeights": [rollout_pb2.DescribeReceiveRequest(job_id=JOB, manifest=manifest)],
        "PreparePublication": [prepare],
        "TransferPublication": [rollout_pb2.TransferReceiveRequest(publication=ref)],
        "VerifyPublication": [
            rollout_pb2.VerifyReceiveRequest(
                publication=ref, checksums=weights_pb2.Checksums(values=[1, 2]), commit=True
            )
        ],
        "CommitPublication": [rollout_pb2.CommitReceiveRequest(publication=ref)],
        "AbortPublication": [rollout_pb2.AbortReceiveRequest(publication=ref, reason="it failed")],
        "DescribeCopy": [trainer_pb2.DescribeSendRequest(job_id=JOB, dtype="float32")],
        "PrepareCopy": [
            trainer_pb2.PrepareSendRequest(
                publication=ref, path=weights_pb2.PATH_SHARDED, dtype="float32", deadline_s=5.0
            )
        ],
        "TransferCopy": [trainer_pb2.TransferSendRequest(publication=ref)],
        "FinishCopy": [trainer_pb2.FinishSendRequest(publication=ref)],
        "Generate": [rollout_pb2.GenerateRequest(prompt='[{"role": "user", "content": "1 + 1"}]', sampling=sampling)],
    }


@pytest.mark.parametrize("each", [12, pytest.param(500, marks=pytest.mark.matrix)])
def test_odd_messages(tied_model: Path, each: int, capfd: pytest.CaptureFixture[str]) -> None:
    async def scenario() -> None:
        async with replica_stack() as stack:
            spec = job_spec(tied_model)
            await stack.serve(spec)
            receiver = stack.replica.receiver(JOB)
            _, served = receiver.copies._served(Content.MODEL)
            messages = valid(spec.model_dump_json(), served.manifest.to_proto())
            tried = [method for method in methods_of("Rollout") if method.name != "Drain"]
            peak = Peak()
            found = await fuzz(stack.peer.address, tried, messages, each=each)
            assert {"OK", "INVALID_ARGUMENT", "FAILED_PRECONDITION"} <= set(found)
            assert peak.grown < 512 << 20
            assert (await status(stack.peer)).job_id == JOB
            await configure(stack.peer, spec, "job-after")
            assert (await status(stack.peer)).state == rollout_pb2.ENGINE_STATE_WITHOUT_WEIGHTS

    asyncio.run(scenario())
    said = "".join(capfd.readouterr())
    assert "Traceback" not in said and "a bug in this service" not in said
