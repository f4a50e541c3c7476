"""Messages that no coordinator sends: typed errors, no traceback, bounded memory, and the trainer goes on."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from google.protobuf.message import Message

from millrace.contracts.v1 import trainer_pb2 as pb
from millrace.contracts.v1 import weights_pb2
from millrace.errors import InvalidRequest
from tests.peak_memory import Peak
from tests.services.trainer.calls import JOB
from tests.services.trainer.coordinator import ScriptedCoordinator
from tests.services.trainer.groups import job_spec
from tests.services.trainer.process import trainer
from tests.services.trainer.service.test_servicer import Running
from tests.wire.fuzz import fuzz, methods_of

pytestmark = pytest.mark.slow


def valid(spec: str, folder: Path, work: str) -> dict[str, list[Any]]:
    path = str(folder / "step-1")
    ref = weights_pb2.PublicationRef(job_id=JOB, version=0, epoch=1, attempt=1)
    group = pb.GroupRef(prompt_id="0-1", prompt_tokens=4, response_tokens=[3, 5])
    prepare = pb.PrepareSendRequest(
        publication=ref, path=weights_pb2.PATH_GATHER_BROADCAST, dtype="float32", deadline_s=1.0
    )
    return {
        "Configure": [pb.ConfigureTrainerRequest(job_id=JOB, spec=spec)],
        "Step": [pb.StepRequest(job_id=JOB, step=1, groups=[group, group], work_address=work)],
        "DescribeWeights": [pb.DescribeSendRequest(job_id=JOB, dtype="float32")],
        "PreparePublication": [prepare],
        "TransferPublication": [pb.TransferSendRequest(publication=ref)],
        "FinishPublication": [pb.FinishSendRequest(publication=ref, failure="it failed")],
        "Save": [pb.SaveRequest(job_id=JOB, path=path)],
        "FinishSave": [pb.FinishSaveRequest(job_id=JOB, path=path)],
        "Load": [pb.LoadRequest(job_id=JOB, path=path)],
        "CopyState": [pb.CopyStateRequest(job_id=JOB, version=0, receivers=["trainer-2"])],
        "ReceiveState": [
            pb.ReceiveStateRequest(
                job_id=JOB, version=1, rendezvous=weights_pb2.Rendezvous(host="127.0.0.1", port=1, key="copy")
            )
        ],
    }


@pytest.mark.parametrize("each", [5, pytest.param(500, marks=pytest.mark.matrix)])
def test_odd_messages(served: ScriptedCoordinator, tied_model: Path, tmp_path: Path, each: int) -> None:
    spec = job_spec(tied_model)
    text = json.dumps(spec.model_dump(mode="json"))

    def harmless(message: Message) -> bool:
        """Nothing is written outside of the test's folder."""
        path = getattr(message, "path", "")
        return not isinstance(path, str) or not path.startswith("/") or path.startswith(f"{tmp_path}/")

    with trainer(served, tmp_path / "log") as running:
        calls = running.calls()
        calls.configure(spec)
        peak = Peak(running.ranks()[0].pid)
        messages = valid(text, tmp_path, served.address)
        found = asyncio.run(fuzz(calls.address, methods_of("Trainer"), messages, each=each, harmless=harmless))
        assert {"OK", "INVALID_ARGUMENT"} <= set(found)
        assert {"ABORTED", "FAILED_PRECONDITION"} & set(found), "nothing was read and refused"
        assert peak.grown < 512 << 20
        assert "Traceback" not in running.text() and "a bug in this service" not in running.text()
        calls.configure(spec, configuration="again")
        calls.save(str(tmp_path / "last"))
        assert calls.status().state == pb.TRAINER_STATE_READY


def test_a_save_without_a_path_is_refused(tied_model: Path, tmp_path: Path) -> None:
    running = Running()
    try:
        running.calls.configure(job_spec(tied_model))
        for path in ("", "/", "relative", f"{tmp_path}/../x", f"{tmp_path}/\0"):
            with pytest.raises(InvalidRequest, match=r"^path: .*: is ") as told:
                running.calls.begin_save(path)
            assert "absolute" in told.value.what or "missing" in told.value.what
        assert running.ranks.count(pb.SaveRequest) == 0
    finally:
        running.stop()
