"""Memory and weights of earlier jobs on a rank."""

import gc
import json
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch

from millrace import shared_copies
from millrace.contracts.v1 import trainer_pb2 as pb
from millrace.errors import InvalidState, MillraceError, NonFinite, OutOfMemory, PartialStep
from millrace.memory.ledger import Part
from millrace.spec import JobSpec
from services.trainer.protocol.backend import DataParallel
from services.trainer.publication.sender import Sender
from services.trainer.ranks.world import World
from services.trainer.service import worker
from services.trainer.service.worker import Worker
from tests.services.trainer.groups import job_spec


class Model:
    """A model in a reference cycle, as real ones are."""

    parameters = 5
    device = torch.device("cpu")
    critic = None
    data_parallel = DataParallel(0, 1, None)

    def __init__(self) -> None:
        self.itself = self

    def held(self) -> dict[Part, list[torch.Tensor]]:
        return {}


def worker_alone() -> Worker:
    nothing: Any = None
    world = World(0, 1, "localhost", torch.device("cpu"), ("localhost", 0), None)
    return Worker(world, nothing, Sender(0, "trainer-1"), nothing)


def test_the_job_before_is_out_of_memory_when_the_next_is_built(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    before: list[weakref.ref[Model]] = []
    alive: list[int] = []

    def build(*arguments: Any) -> Model:
        alive.append(sum(model() is not None for model in before))
        model = Model()
        before.append(weakref.ref(model))
        return model

    monkeypatch.setattr(worker, "build", build)
    rank = worker_alone()
    spec = job_spec(tmp_path / "model").model_dump_json()
    gc.disable()
    try:
        for job in ("job-1", "job-2", "job-3"):
            rank.configure(pb.ConfigureTrainerRequest(job_id=job, spec=spec))
    finally:
        gc.enable()
    assert alive == [0, 0, 0]


def test_a_model_is_read_from_shared_memory_while_a_rank_has_the_job(
    one_rank: torch.device, tied_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The job keeps the path of the user's folder; the copy is gone when the next job does not use it."""
    monkeypatch.setattr(shared_copies, "SHARED_MEMORY", tmp_path)
    read: list[str] = []

    def build(spec: JobSpec, device: torch.device) -> Any:
        read.append(spec.model.path)
        return real_build(spec, device)

    real_build = worker.build
    monkeypatch.setattr(worker, "build", build)
    rank = worker_alone()
    for use_shm in (True, False):
        spec = job_spec(tied_model, model={"use_shm": use_shm}, algorithm={"advantage": "gae", "critic": {}})
        rank.configure(pb.ConfigureTrainerRequest(job_id="job-1", spec=spec.model_dump_json()))
        assert rank._loaded().spec.model.path == str(tied_model)
        assert Path(read[0]).is_dir() == use_shm
    assert read[0].startswith(str(tmp_path)) and read[1] == str(tied_model)


@pytest.mark.parametrize("of_hub", [True, False])
def test_a_saved_adapter_names_the_model_as_the_job_does(
    of_hub: bool, one_rank: torch.device, tied_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model of the hub has another path on every host."""
    commit = "c0ffee" * 6 + "c0ff"

    def downloaded(spec: JobSpec, *, weights: bool) -> JobSpec:
        return spec.model_copy(update={"model": spec.model.model_copy(update={"path": str(tied_model)})})

    monkeypatch.setattr(worker.hub, "local", downloaded)
    rank = worker_alone()
    monkeypatch.setattr(rank, "_saver", Saver())
    model = {"path": f"hf://someone/tiny@{commit}" if of_hub else str(tied_model), "lora": {"rank": 4}}
    spec = job_spec(tied_model, model=model, schedule={"save_in_background": False})
    rank.configure(pb.ConfigureTrainerRequest(job_id="job-1", spec=spec.model_dump_json()))
    rank.save(pb.SaveRequest(job_id="job-1", path=str(tmp_path / "saved")))
    config = json.loads((tmp_path / "saved" / "adapter" / "adapter_config.json").read_text())
    named = (config["base_model_name_or_path"], config["revision"])
    assert named == (("someone/tiny", commit) if of_hub else (str(tied_model), None))
    assert json.loads((tmp_path / "saved" / "trainer.json").read_text())["model_folder"] == str(tied_model)


class Saver:
    """Has nothing to write in the background."""

    def check_free(self) -> None: ...

    def record(self, written: pb.FinishSaveResponse) -> None: ...


def test_a_rank_tells_with_which_values_an_adapter_learns_slowly(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(worker, "build", lambda *arguments: Model())
    spec = job_spec(tmp_path / "model", model={"lora": {"rank": 8}}, trainer={"optimizer": {"lr": 1e-5}})
    answer = worker_alone().configure(pb.ConfigureTrainerRequest(job_id="job-1", spec=spec.model_dump_json()))
    assert [warning.partition(":")[0] for warning in answer.warnings] == ["model.lora.rank"]


@pytest.mark.parametrize("kind", [PartialStep, NonFinite])
def test_a_partial_step_costs_the_weights(
    kind: type[MillraceError], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """One of which nothing was written does not."""

    class Failing:
        def __init__(self, *arguments: Any) -> None:
            self.number, self.parts = 1, ()

        def add(self, request: pb.StepRequest) -> None:
            raise kind("gradients of the policy: their norm is nan.", "look at it.")

    monkeypatch.setattr(worker, "build", lambda *arguments: Model())
    monkeypatch.setattr(worker, "Step", Failing)
    rank = worker_alone()
    rank.configure(pb.ConfigureTrainerRequest(job_id="job-1", spec=job_spec(tmp_path / "model").model_dump_json()))
    with pytest.raises(kind, match="their norm is nan"):
        rank.step(pb.StepRequest(job_id="job-1", step=1))
    with pytest.raises(InvalidState, match="no job is loaded") if kind is PartialStep else pytest.raises(NonFinite):
        rank.step(pb.StepRequest(job_id="job-1", step=1))


def test_no_memory_for_the_model_is_told_with_what_it_would_need(
    monkeypatch: pytest.MonkeyPatch, tied_model: Path
) -> None:
    def build(*arguments: Any) -> Model:
        raise torch.OutOfMemoryError("CUDA out of memory.")

    monkeypatch.setattr(worker, "build", build)
    rank, spec = worker_alone(), job_spec(tied_model)
    with pytest.raises(OutOfMemory, match=r"rank 0 ran out of memory in loading the model\. Predicted for it:") as told:
        rank.configure(pb.ConfigureTrainerRequest(job_id="job-1", spec=spec.model_dump_json()))
    assert "weights" in told.value.what and "offload_parameters: true (saves about" in told.value.fix
    assert not any(name in told.value.fix for name in ("halve_budget", "token_budget", "activation_recompute"))
    with pytest.raises(InvalidState, match="no job is loaded"):
        rank.step(pb.StepRequest(job_id="job-1", step=1))
