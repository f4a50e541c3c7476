"""What a copy of the model on each host costs and saves (`fsdp_size`): memory of a rank, and bytes between hosts.

    python -m benchmarks.copies

Two hosts, which are network namespaces of this machine, with two of FSDP2's ranks each, in float32 over Gloo. Bytes are
those that one host's link sent during an update. One update that is not counted goes before. Needs Linux and root.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import torch.distributed as dist
from rich.console import Console
from rich.table import Table

from benchmarks.memory import Case, job_spec, prepared, shape, update
from benchmarks.shapes import config_of
from benchmarks.training import draw_weights
from millrace.memory.ledger import KEPT
from services.trainer.memory.exhausted import forget_models
from services.trainer.ranks import collectives
from services.trainer.ranks.world import World
from tests.hosts.network import DEVICE, Network, why_not

HOSTS, RANKS = ("left", "right"), 2
PORT = 29533
LIMIT_S = 900.0
MIB = 1 << 20


def cases() -> Iterator[Case]:
    for lora in (False, True):
        for size, of in ((len(HOSTS) * RANKS, "of both hosts"), (RANKS, "of a host"), (1, "alone")):
            yield Case("fsdp2", f"{size}, ranks {of}", {"fsdp_size": size}, lora=lora)


def measured(case: Case, folder: Path, world: World, options: argparse.Namespace) -> dict[str, Any]:
    """GiB that the fullest rank keeps, and MiB that this rank's host sent during an update."""
    backend, meter, batches = prepared(job_spec(case, folder, options.budget, "float32"), world, options)
    for number in (1, 2):
        meter.begin_step(number, options.budget)
        dist.barrier()
        before = psutil.net_io_counters(pernic=True)[DEVICE].bytes_sent
        update(backend, meter, batches)
        dist.barrier()
    sent = psutil.net_io_counters(pernic=True)[DEVICE].bytes_sent - before
    found = collectives.maxima(meter.metrics())
    return {
        "case": case.name,
        "lora": case.lora,
        "kept_gib": round(sum(found.get(f"memory/update/{part}", 0.0) for part in KEPT), 3),
        "sent_mib": round(sent / MIB, 1),
        "parameters": backend.parameters,
    }


def inside(options: argparse.Namespace) -> None:
    """What each rank does."""
    world = World.join()
    draw_weights()
    rows = []
    for case in cases():
        rows.append(measured(case, options.inside, world, options))
        forget_models(world.device)
        if world.rank == 0:
            print(json.dumps(rows[-1]), flush=True)
    if world.rank == 0:
        (options.inside / "rows.json").write_text(json.dumps(rows))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="qwen3-1.7b")
    parser.add_argument("--layers", type=int, default=1, help="layers of the shape that are taken")
    parser.add_argument("--vocabulary", type=int, default=512, help="another vocabulary than the shape has")
    parser.add_argument("--budget", type=int, default=64, help="tokens a micro-batch")
    parser.add_argument("--length", type=int, default=32, help="tokens a sequence")
    parser.add_argument("--microbatches", type=int, default=2, help="of an update and a rank")
    parser.add_argument("--inside", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.inside is not None:
        inside(options)
        return
    if reason := why_not():
        parser.error(f"this machine makes no hosts: {reason}")
    with tempfile.TemporaryDirectory() as name, Network(HOSTS) as network:
        folder = Path(name)
        (folder / "config.json").write_text(json.dumps(config_of(shape(options))))
        environment = os.environ | {"GLOO_SOCKET_IFNAME": DEVICE, "OMP_NUM_THREADS": "1"}
        launched = []
        for number, host in enumerate(HOSTS):
            spread = ["--nnodes", str(len(HOSTS)), "--nproc-per-node", str(RANKS), "--node-rank", str(number)]
            at = ["--master-addr", network[HOSTS[0]].address, "--master-port", str(PORT)]
            command = [sys.executable, "-m", "torch.distributed.run", *spread, *at, "-m", "benchmarks.copies"]
            again = [*sys.argv[1:], "--inside", name]
            launched.append(subprocess.Popen(network[host].command([*command, *again]), env=environment))
        if any([process.wait(LIMIT_S) for process in launched]):
            sys.exit("a rank failed: see above")
        rows = json.loads((folder / "rows.json").read_text())
    table = Table("trained", "fsdp_size", "GiB kept by a rank", "MiB between hosts an update")
    for row in rows:
        trained = "LoRA 32" if row["lora"] else "all weights"
        table.add_row(trained, row["case"], f"{row['kept_gib']:.3f}", f"{row['sent_mib']:,.1f}")
    Console().print(f"{rows[0]['parameters']:,} parameters")
    Console().print(table)


if __name__ == "__main__":
    main()
