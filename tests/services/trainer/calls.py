"""Calls to a Trainer service, blocking, for tests."""

import asyncio
import json
from collections.abc import Mapping, Sequence
from typing import Any

from millrace.contracts.method import Request, Response, Unary
from millrace.contracts.methods import TrainerRpc
from millrace.contracts.v1 import common_pb2, weights_pb2
from millrace.contracts.v1 import trainer_pb2 as pb
from millrace.spec import JobSpec
from millrace.wire.channel import Peer
from millrace.wire.deadlines import DEADLINES_S
from tests.services.trainer.groups import refs
from tests.services.trainer.steps import parts_of

JOB = "job-1"


class Calls:
    def __init__(self, address: str, deadlines: Mapping[str, float] | None = None) -> None:
        self.address = address
        self._deadlines = {**DEADLINES_S, **(deadlines or {})}

    def call(self, method: Unary[Request, Response], request: Request) -> Response:
        async def once() -> Response:
            peer = Peer(self.address, self._deadlines)
            try:
                return await peer.call(method, request)
            finally:
                await peer.close()

        return asyncio.run(once())

    def configure(
        self, spec: JobSpec, checkpoint: str = "", job: str = JOB, configuration: str = ""
    ) -> pb.ConfigureTrainerResponse:
        text = json.dumps(spec.model_dump(mode="json"))
        request = pb.ConfigureTrainerRequest(job_id=job, spec=text, checkpoint=checkpoint, configuration=configuration)
        return self.call(TrainerRpc.Configure, request)

    def step(
        self,
        step: int,
        groups: dict[str, common_pb2.Group],
        work: str,
        job: str = JOB,
        token_budget: int = 0,
        sizes: Sequence[int] = (),
    ) -> pb.StepResponse:
        """`sizes`: groups of each part of the step; empty for one part."""
        request = pb.StepRequest(
            job_id=job, step=step, groups=refs(groups), work_address=work, token_budget=token_budget
        )
        *parts, last = parts_of(request, sizes)
        for part in parts:
            self.add(part)
        return self.call(TrainerRpc.Step, last)

    def add(self, part: pb.StepRequest) -> pb.AddPartResponse:
        return self.call(TrainerRpc.AddPart, pb.AddPartRequest(part=part))

    def begin_save(self, path: str, huggingface: bool = False, job: str = JOB) -> pb.SaveResponse:
        return self.call(TrainerRpc.Save, pb.SaveRequest(job_id=job, path=path, huggingface=huggingface))

    def finish_save(self, path: str, job: str = JOB) -> pb.FinishSaveResponse:
        return self.call(TrainerRpc.FinishSave, pb.FinishSaveRequest(job_id=job, path=path))

    def save(self, path: str, huggingface: bool = False, job: str = JOB) -> pb.FinishSaveResponse:
        self.begin_save(path, huggingface, job)
        return self.finish_save(path, job)

    def load(self, path: str) -> pb.LoadResponse:
        return self.call(TrainerRpc.Load, pb.LoadRequest(job_id=JOB, path=path))

    def status(self) -> pb.TrainerStatus:
        return self.call(TrainerRpc.GetStatus, pb.TrainerStatusRequest())

    def prepare(self, ref: weights_pb2.PublicationRef, receivers: int, dtype: str, deadline_s: float = 20.0) -> Any:
        request = pb.PrepareSendRequest(
            publication=ref,
            path=weights_pb2.PATH_GATHER_BROADCAST,
            receivers=[
                weights_pb2.Receiver(member_id=f"r{i}", first_rank=1 + i, world_size=1) for i in range(receivers)
            ],
            dtype=dtype,
            deadline_s=deadline_s,
        )
        return self.call(TrainerRpc.PreparePublication, request)

    def transfer(self, ref: weights_pb2.PublicationRef) -> pb.TransferSendResponse:
        return self.call(TrainerRpc.TransferPublication, pb.TransferSendRequest(publication=ref))

    def finish(self, ref: weights_pb2.PublicationRef, failure: str = "") -> None:
        self.call(TrainerRpc.FinishPublication, pb.FinishSendRequest(publication=ref, failure=failure))
