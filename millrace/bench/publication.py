"""`millrace bench publication`: sharded publications and the baseline, in one run, between processes of this machine.

Each rank is a process: on GPUs one GPU each, over NCCL; on a CPU over Gloo. Every weight is computed from its tensor
and position, so that each worker can check every element that it received.

With --share-gpus there may be more ranks than GPUs. NCCL refuses two ranks of one host on one GPU, so each set of ranks
that covers the GPUs once gets a separate host name (NCCL_HOSTID). Messages between these sets use sockets: the bytes
are the same, the speed is not.
"""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer
from rich.console import Console
from rich.table import Table
from torch.distributed import TCPStore

from millrace.bench.layouts import ReplicaLayout, TrainerLayout
from millrace.errors import InvalidJob, MillraceError
from millrace.megatron.architectures.published import SHAPES, shape_of

MODES = ("shadow", "inplace", "broadcast")
SHARING = "millrace-shares-gpus"
"""Prefix of the host names with --share-gpus."""


def publication(
    shape: Annotated[str, typer.Option(help=", ".join(SHAPES))] = "tiny",
    trainer: Annotated[str, typer.Option(help="tp, pp, vpp, ep, etp, cp, dp as tp=2,ep=2; or fsdp=2")] = "tp=1",
    replica: Annotated[str, typer.Option(help="tp as tp=2; with ep=1 experts stay whole")] = "tp=1",
    replicas: Annotated[int, typer.Option(min=1)] = 1,
    modes: Annotated[str, typer.Option(help="any of shadow, inplace, broadcast, with commas between")] = ",".join(
        MODES
    ),
    repeats: Annotated[
        int, typer.Option(min=1, help="timed publications for each mode, after one that is not timed")
    ] = 10,
    message_mb: Annotated[float, typer.Option(min=0.001, help="MB that a rank sends in one round")] = 128,
    device: Annotated[str, typer.Option(help="cuda or cpu; empty: cuda if there are enough GPUs")] = "",
    share_gpus: Annotated[
        bool, typer.Option(help="put several ranks on a GPU: to check layouts, not for timings")
    ] = False,
    output: Annotated[Path | None, typer.Option(help="write the figures to this file, as JSON")] = None,
    limit_s: Annotated[float, typer.Option(help="seconds after which the run fails")] = 900.0,
) -> None:
    """Publish random weights of a model's shape from a trainer's layout to replicas', and time it."""
    console = Console()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the ranks end with this process
    try:
        result = measured(
            {
                "shape": shape,
                "trainer": trainer,
                "replica": replica,
                "replicas": replicas,
                "modes": [mode for mode in modes.split(",") if mode],
                "repeats": repeats,
                "message_bytes": int(message_mb * 2**20),
                "device": device,
                "share_gpus": share_gpus,
            },
            limit_s,
        )
    except MillraceError as error:
        console.print(f"[red]{error}")
        raise typer.Exit(1) from error
    if output is not None:
        output.write_text(json.dumps(result, indent=1))
    _print(console, result)


def measured(asked: dict[str, Any], limit_s: float) -> dict[str, Any]:
    """Runs the ranks and combines their figures. Raises InvalidJob for what cannot be run on this machine."""
    model = shape_of(asked["shape"])
    if unknown := set(asked["modes"]) - set(MODES):
        raise InvalidJob(f"there is no mode {', '.join(sorted(unknown))}.", f"choose from {', '.join(MODES)}.")
    senders = TrainerLayout(model, asked["trainer"]).ranks
    workers = ReplicaLayout(model, asked["replica"]).ranks * asked["replicas"]
    gpus = torch.cuda.device_count()
    enough = gpus >= (1 if asked.get("share_gpus") else senders + workers)
    kind = asked["device"] or ("cuda" if enough else "cpu")
    if kind == "cuda" and not enough:
        raise InvalidJob(
            f"{senders + workers} GPUs are needed, one a rank; there are {gpus}.",
            "use fewer ranks, or --share-gpus.",
        )
    asked = {**asked, "device": kind, "gpus": gpus, "senders": senders, "workers": workers, "limit_s": limit_s}
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with tempfile.TemporaryDirectory() as folder:
        _run_ranks(asked, store.port, Path(folder), limit_s)
        figures = [json.loads(Path(folder, f"{rank}.json").read_text()) for rank in range(senders + workers)]
    return {**asked, "gpu": torch.cuda.get_device_name(0) if kind == "cuda" else None, **_together(asked, figures)}


def _run_ranks(asked: dict[str, Any], port: int, folder: Path, limit_s: float) -> None:
    count = asked["senders"] + asked["workers"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    environment.setdefault("NCCL_DEBUG", "WARN")
    environment.setdefault("NCCL_NVLS_ENABLE", "0")  # multicast, which messages between two ranks do not use
    if asked["device"] == "cpu":
        environment["OMP_NUM_THREADS"] = "1"
    logs = [folder / f"{rank}.log" for rank in range(count)]
    ranks = []
    for rank, log in enumerate(logs):
        command = [sys.executable, "-m", "millrace.bench.rank", json.dumps(asked), str(rank), str(port), str(folder)]
        if asked["device"] == "cuda" and asked["gpus"] < count:
            environment["NCCL_HOSTID"] = f"{SHARING}-{rank // asked['gpus']}"
        with log.open("w") as file:
            ranks.append(subprocess.Popen(command, env=environment, stdout=file, stderr=subprocess.STDOUT))
    until = time.monotonic() + limit_s
    try:
        while any(process.poll() is None for process in ranks):
            failed = [i for i, process in enumerate(ranks) if process.poll() not in (None, 0)]
            if failed or time.monotonic() > until:
                time.sleep(2.0)  # for the other ranks' logs
                output = "\n".join(f"rank {i}:\n{logs[i].read_text()[-5000:]}" for i in failed or range(count))
                raise InvalidJob(f"ranks {failed or 'of this run'} did not end well:\n{output}", "see above.")
            time.sleep(0.1)
        if failed := [i for i, process in enumerate(ranks) if process.returncode]:
            raise InvalidJob(f"rank {failed[0]} failed:\n{logs[failed[0]].read_text()[-5000:]}", "see above.")
    finally:
        for process in ranks:
            if process.poll() is None:
                process.kill()
                process.wait()


def _together(asked: dict[str, Any], figures: list[dict[str, Any]]) -> dict[str, Any]:
    """The figures of each mode: those of the slowest rank, medians over the repeats."""
    workers = figures[asked["senders"] :]
    plan = figures[0]["plan"]
    link = min(f["link_gbs"] for f in workers if f["link_gbs"])
    floor_s = max(plan["egress"], plan["ingress"]) / link / 1e9
    result: dict[str, Any] = {"plan": plan, "link_gbs": link, "floor_s": floor_s, "modes": {}}
    for mode in asked["modes"]:
        runs = [f["modes"][mode] for f in figures]
        row: dict[str, Any] = {}
        for name in runs[0]["seconds"]:
            slowest = np.max([run["seconds"][name] for run in runs], axis=0)
            row[name] = {"p50": float(np.median(slowest)), "p95": float(np.percentile(slowest, 95))}
        got = max(run["received"] for run in runs)
        row["received_bytes"] = got
        row["gbs_a_receiver"] = got / row["transfer"]["p50"] / 1e9
        row["share_of_link"] = row["gbs_a_receiver"] / link
        row["over_floor"] = row["transfer"]["p50"] / floor_s
        row["slot_bytes"] = max(run["slot_bytes"] for run in runs)
        row["peak_bytes"] = max(run["peak_bytes"] for run in runs)
        row["misplaced"] = sum(run["misplaced"] for run in runs)
        result["modes"][mode] = row
    return result


def _print(console: Console, result: dict[str, Any]) -> None:
    plan = result["plan"]
    console.print(
        f"{result['shape']}: trainer {result['trainer']} ({result['senders']} ranks) → {result['replicas']} × replica "
        f"{result['replica']} on {result['gpu'] or 'CPU'}; {plan['tensors']} tensors, {plan['bytes'] / 1e9:.3f} GB"
    )
    console.print(
        f"plan {plan['hash']}: {plan['seconds']:.3f} s, {plan['pieces']} pieces, {plan['messages']} messages in "
        f"{plan['rounds']} rounds, a sender's egress {plan['egress'] / 1e9:.3f} GB, a worker's ingress "
        f"{plan['ingress'] / 1e9:.3f} GB; link {result['link_gbs']:.1f} GB/s, floor {result['floor_s']:.4f} s"
    )
    table = Table("", *result["modes"])
    for title, figure in FIGURES.items():
        table.add_row(title, *(figure(row) for row in result["modes"].values()))
    console.print(table)


def _seconds(name: str, quantile: str = "p50") -> Callable[[dict[str, Any]], str]:
    return lambda row: f"{row[name][quantile]:.4f}"


FIGURES: dict[str, Callable[[dict[str, Any]], str]] = {
    "publication s": _seconds("whole"),
    "publication s, p95": _seconds("whole", "p95"),
    "transfer s": _seconds("transfer"),
    "transfer / floor": lambda row: f"{row['over_floor']:.2f}",
    "gather, convert, pack s": _seconds("pack"),
    "checksums s": _seconds("sums"),
    "apply s": _seconds("apply"),
    "compare s": _seconds("compare"),
    "pause s": _seconds("pause"),
    "pause s, p95": _seconds("pause", "p95"),
    "GB/s a receiver": lambda row: f"{row['gbs_a_receiver']:.1f}",
    "share of the link": lambda row: f"{100 * row['share_of_link']:.0f} %",
    "slots or staging MB": lambda row: f"{row['slot_bytes'] / 1e6:.0f}",
    "peak above steady MB": lambda row: f"{row['peak_bytes'] / 1e6:.0f}",
    "boxes misplaced": lambda row: str(row["misplaced"]),
}
"""Rows that are printed for each mode. Seconds are of the slowest rank, the median over the repeats."""
