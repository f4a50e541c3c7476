"""The ranks of test_out_of_memory_in_publications: the second of two runs out of memory in each phase."""

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from millrace.contracts.v1 import trainer_pb2 as pb
from millrace.errors import PublicationFailed
from services.trainer.publication.sender import Sender
from services.trainer.ranks import collectives
from services.trainer.ranks.world import World
from services.trainer.service.worker import Worker
from tests.services.trainer.groups import job_spec
from tests.services.trainer.memory.publications import Publications, without_memory


def main() -> None:
    folder, model = Path(sys.argv[1]), Path(sys.argv[2])
    torch.set_num_threads(1)
    world, nothing = World.join(), None
    rank = Worker(world, nothing, Sender(world.rank, "trainer-1"), nothing)  # type: ignore[arg-type]
    rank.configure(pb.ConfigureTrainerRequest(job_id="job-1", spec=job_spec(model).model_dump_json()))
    publications, told = Publications(rank), dict[str, Any]()
    for phase in ("describe", "prepare", "transfer"):
        with pytest.MonkeyPatch.context() as patch:
            if world.rank == 1:
                without_memory(patch, phase, rank)
            try:
                publications.attempt()
                said = "nothing"
            except PublicationFailed as error:
                said = str(error)
        told[phase] = [each.decode() for each in collectives.gather_bytes(said.encode())]
        if phase == "transfer" and publications.receiver is not None:
            failure = publications.receiver.failure
            told["receiver"] = failure.what if failure is not None else "nothing"
    told["wrong"] = publications.wrong(publications.attempt())
    if world.rank == 0:
        (folder / "answer.json").write_text(json.dumps(told))
    dist.barrier()
    os._exit(0)


if __name__ == "__main__":
    main()
