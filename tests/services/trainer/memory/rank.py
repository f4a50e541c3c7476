"""The only rank of a trainer, which runs out of memory in tests."""

from pathlib import Path
from typing import Any

import torch

from millrace.contracts.v1 import trainer_pb2 as pb
from services.trainer.publication.sender import Sender
from services.trainer.ranks.commands import ControlThread
from services.trainer.ranks.world import World
from services.trainer.service.worker import Worker
from tests.services.trainer.coordinator import ScriptedCoordinator
from tests.services.trainer.groups import job_spec, random_groups, refs

BUDGET = 128
Weights = dict[str, torch.Tensor]


class Rank:
    """The only rank of a trainer, with a job."""

    def __init__(self, control: ControlThread, served: ScriptedCoordinator, model: Path, **parts: Any) -> None:
        nothing: Any = None
        world = World(0, 1, "localhost", torch.device("cpu"), ("localhost", 0), None)
        self.served = served
        self.worker = Worker(world, control, Sender(0, "trainer-1"), nothing)
        trainer = {"token_budget": BUDGET, "optimizer": {"lr": 1e-3}, **parts.pop("trainer", {})}
        spec = job_spec(model, trainer=trainer, **parts)
        self.worker.configure(pb.ConfigureTrainerRequest(job_id="job-1", spec=spec.model_dump_json()))

    def step(self, number: int, budget: int = 0) -> dict[str, float]:
        groups = self.served.script.groups = random_groups(4, 4, seed=number)
        request = pb.StepRequest(
            job_id="job-1", step=number, groups=refs(groups), work_address=self.served.address, token_budget=budget
        )
        return dict(self.worker.step(request).metrics)

    def weights(self) -> Weights:
        backend = self.worker._loaded().backend
        return {info.name: tensor.clone() for info, tensor in backend.export("float32") if tensor is not None}
