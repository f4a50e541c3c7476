"""A configuration that one rank refuses is refused by all: no rank continues and waits for it."""

from multiprocessing.queues import Queue
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from millrace.contracts.v1 import trainer_pb2 as pb
from millrace.errors import InvalidJob
from services.trainer.checkpoints.background_saver import BackgroundSaver
from services.trainer.publication.sender import Sender
from services.trainer.ranks.commands import ControlThread
from services.trainer.ranks.world import World
from services.trainer.service.worker import Worker
from tests.forked import CONTEXT
from tests.services.trainer.groups import job_spec

pytestmark = pytest.mark.slow

RANKS = 2


class NoSender(Sender):
    def __init__(self) -> None:
        pass

    def close(self) -> None:
        pass


def configure(rank: int, spec: str, folder: Path, told: "Queue[str]") -> None:
    """A rank's process: says how it went."""
    dist.init_process_group("cpu:gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=RANKS)
    world = World(rank, RANKS, f"node-{rank}", torch.device("cpu"), ("127.0.0.1", 0), dist.HashStore())
    control = ControlThread()
    saver: BackgroundSaver = object()  # type: ignore[assignment]  # not asked here
    try:
        Worker(world, control, NoSender(), saver).configure(pb.ConfigureTrainerRequest(job_id="job-1", spec=spec))
        told.put("configured")
    except InvalidJob as error:
        told.put(str(error))
    control.stop()


OWN = "from torch import Tensor\n\ndef mine(*, logprobs_bt: Tensor, advantages_bt: Tensor):\n    ...\n"


def job(what: str, rank: int, model: Path, folder: Path) -> str:
    """The spec; what rank 1's names is not there on its host."""
    absent = folder / "absent"
    if what == "model":
        return job_spec(model if rank == 0 else absent).model_dump_json()
    if what == "critic":
        critic = {"path": str(model if rank == 0 else absent)}
        return job_spec(model, algorithm={"preset": "ppo", "critic": critic}).model_dump_json()
    file = folder / f"own-{rank}.py"
    file.write_text(OWN if rank == 0 else f"import absent\n{OWN}")
    own = file if rank == 0 or what == "loading" else absent
    return job_spec(model, algorithm={"policy_loss": f"{own}:mine"}).model_dump_json()


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("model", "model.path"),
        # the first and the last thing that a rank may refuse are around these
        pytest.param("critic", "algorithm.critic.path", marks=pytest.mark.matrix),
        pytest.param("policy loss", "algorithm.policy_loss.name", marks=pytest.mark.matrix),
        ("loading", "own-1.py:1: ModuleNotFoundError"),
    ],
)
def test_what_one_rank_refuses_all_refuse(what: str, words: str, tied_model: Path, tmp_path: Path) -> None:
    told: Queue[str] = CONTEXT.Queue()
    ranks = []
    for rank in range(RANKS):
        spec = job(what, rank, tied_model, tmp_path)
        ranks.append(CONTEXT.Process(target=configure, args=(rank, spec, tmp_path, told)))
        ranks[-1].start()
    try:
        answers = [told.get(timeout=60) for _ in ranks]
    finally:
        for process in ranks:
            process.kill()
            process.join()
    assert answers[0] == answers[1] and words in answers[0] and "absent" in answers[0]
