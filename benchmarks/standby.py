"""A trainer that stands by: what it costs a step, and how soon it has the seat.

    python -m benchmarks.standby --layers 8 --steps 12

First the state alone, in one process and by one thread: seconds that a step waits, until the state has arrived (or is
on the disk), and until it is in place (or loaded); medians of five. Then three jobs on this host's CPU, each on a
stack of its own with one trainer (FSDP2) of one rank and one replica (Transformers): without another trainer; with
one of one rank, to which the state goes from memory to memory; with one of two ranks, to which it goes over the disk.
The model has random weights, and the reward means nothing. After `--steps` further steps the trainer in the seat is
killed. Prints JSON: bytes of the state; for each job seconds from step to step and how long a step waits for the copy
(medians); how many steps the one that stands by is behind after each step (median); seconds from the moment at which
the coordinator knew of the kill until the next trainer had the job and until it had made a step; and the versions
from and to which the job went back.
"""

import argparse
import itertools
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.distributed as dist

from benchmarks.shapes import config_of, random_model
from benchmarks.stacks import letters_job, stack_in, waited
from millrace.client import Client
from millrace.demo.run import ENVIRONMENT
from millrace.demo.tokenizer import byte_tokenizer
from millrace.ids import JobId, Version
from millrace.local import child_processes
from millrace.megatron.architectures.published import qwen3
from millrace.spec import parse
from services.trainer.backends import build
from services.trainer.checkpoints import checkpoint
from services.trainer.checkpoints.standby_copies import StandbyCopies

RANKS = {"alone": 0, "memory": 1, "disk": 2}
"""Ranks of the trainer that stands by, by the way that the state takes; 0: there is none."""
FIRST_STEPS = 3
"""Steps that are not measured: the first ones also connect and allocate."""
LIMIT_S = 300.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--ways", nargs="*", choices=[*RANKS], default=[*RANKS])
    options = parser.parse_args()
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="millrace-bench-") as folder:
        parameters = make_model(Path(folder) / "model", options.layers, options.hidden)
        found["state"] = state_alone(Path(folder))
        for way in options.ways:
            found[way] = measured(Path(folder), way, options.steps)
            print(way, json.dumps(found[way]), file=sys.stderr)
    print(json.dumps({"parameters": parameters, "state_bytes": 12 * parameters, **found}, indent=2))


def make_model(folder: Path, layers: int, hidden: int) -> int:
    """A Hugging Face folder of random float32 weights. Returns the number of parameters."""
    heads, sizes = hidden // 64, (64, len(byte_tokenizer()), 32768)
    return random_model(
        folder, config_of(qwen3(layers, hidden, 3 * hidden, heads, heads, tied=True, sizes=sizes)), "float32"
    )


def job(folder: Path, way: str) -> dict[str, Any]:
    return letters_job(
        folder,
        name=f"stands by {way}",
        output=str(folder / way / "output"),
        rollout={"samples_per_prompt": 2, "max_response_tokens": 16, "dtype": "float32"},
        trainer={"backend": "fsdp2", "dtype": "float32", "token_budget": 2048, "optimizer": {"lr": 1e-6}},
        schedule={"steps": 100_000, "prompts_per_step": 4, "max_staleness": 1},
    )


def state_alone(folder: Path) -> dict[str, Any]:
    """The state of one rank after an update, by memory and by disk."""
    torch.set_num_threads(1)
    dist.init_process_group("cpu:gloo", store=dist.HashStore(), rank=0, world_size=1)
    spec = parse(job(folder, "state"))
    seat, other = (build(spec, torch.device("cpu")) for _ in range(2))
    seat.prepare_state(1)
    sender, receiver = StandbyCopies(0), StandbyCopies(0)
    times: dict[str, list[list[float]]] = {"memory": [], "disk": []}
    for number in range(5):
        version, path = Version(number), str(folder / "state" / f"step-{number}")
        at = [time.monotonic()]
        (meet,) = sender.send(seat, version, 0.0, 1, LIMIT_S)
        at.append(time.monotonic())
        header = receiver.receive(meet, version, other, LIMIT_S)
        at.append(time.monotonic())
        receiver.put_in_place(other, header)
        times["memory"].append([*at, time.monotonic()])
        waited(lambda: not sender.busy, LIMIT_S)
        at = [time.monotonic()]
        pending = checkpoint.copy_for_saving(
            path, seat, job_id=JobId("bench"), version=version, model="", huggingface=False, copied=True
        )
        at.append(time.monotonic())
        pending.write()
        pending.commit()
        at.append(time.monotonic())
        checkpoint.load(path, other)
        times["disk"].append([*at, time.monotonic()])
    dist.destroy_process_group()
    names = ("waits_s", "arrives_s", "in_place_s")
    return {
        way: {name: _median([at[i + 1] - at[i] for at in rows]) for i, name in enumerate(names)}
        for way, rows in times.items()
    }


def measured(folder: Path, way: str, steps: int) -> dict[str, Any]:
    fields = {"engine": "transformers", "standby": False, "environment": ENVIRONMENT}
    with stack_in(folder / way / "stack", **fields) as (stack, client):
        other = None
        if ranks := RANKS[way]:
            waited(lambda: client.fleet().trainers, LIMIT_S)
            argv = (sys.executable, "-m", "services.trainer.launch", "--ranks", str(ranks), "--port", "0")
            environment = {**ENVIRONMENT, "MILLRACE_HOST": "127.0.0.1"}
            with (folder / f"{way}.log").open("wb") as output:
                other = child_processes.start((*argv, "--coordinator", stack.coordinator), environment, output)
            waited(lambda: len(client.fleet().trainers) == 2, LIMIT_S)
        try:
            return _followed(client, client.submit(job(folder, way)).id, steps, stands_by=other is not None)
        finally:
            if other is not None:
                other.terminate()
                other.wait(60)


def _followed(client: Client, job_id: str, steps: int, *, stands_by: bool) -> dict[str, Any]:
    if stands_by:
        waited(lambda: client.fleet().trainers[1].version >= 1, LIMIT_S)
    first, behind = max(FIRST_STEPS, client.job(job_id).step), []
    for step in range(first + 1, first + steps + 1):
        waited(partial(_trained, client, job_id, step), LIMIT_S)
        if stands_by:
            behind.append(client.job(job_id).step - client.fleet().trainers[1].version)
    rows = [row for row in client.metrics(job_id) if first < row.step <= first + steps]
    found = {
        "from_step_to_step_s": _median([b.time_s - a.time_s for a, b in itertools.pairwise(rows)]),
        "update_s": _median([row.values["timing_s/train"] for row in rows]),
    }
    if stands_by:
        waits = [wait for row in rows if (wait := row.values.get("timing_s/copy_to_standbys")) is not None]
        found |= {"waits_for_the_copy_s": _median(waits), "copies": len(waits), "steps_behind": _median(behind)}
        found |= _taken_over(client, job_id)
    client.cancel(job_id)
    return found


def _trained(client: Client, job_id: str, step: int) -> bool:
    return client.job(job_id).step >= step


def _taken_over(client: Client, job_id: str) -> dict[str, Any]:
    """Kills the trainer in the seat."""
    port = int(client.fleet().trainers[0].address.rpartition(":")[2])
    connections = psutil.net_connections("tcp")
    serving = (c for c in connections if c.status == psutil.CONN_LISTEN and c.laddr.port == port)
    psutil.Process(next(serving).pid).kill()

    def events(kind: str, after_s: float = 0.0) -> list[Any]:
        told = client.events(job_id, follow=False)
        return [event for event in told if event.kind == kind and event.time_s > after_s]

    lost = waited(lambda: events("trainer.lost"), LIMIT_S)[0]
    stepped = waited(lambda: events("step.done", lost.time_s), LIMIT_S)[0]
    seated = events("trainer.configured", lost.time_s)[0]
    rewound = events("job.rewound", lost.time_s)
    return {
        "stood_by": seated.data.stood_by,
        "seated_s": round(seated.time_s - lost.time_s, 3),
        "stepped_s": round(stepped.time_s - lost.time_s, 3),
        "went_back": [rewound[0].data.lost, rewound[0].data.version] if rewound else None,
    }


def _median(values: Sequence[float]) -> float | None:
    return round(statistics.median(values), 3) if values else None


if __name__ == "__main__":
    main()
