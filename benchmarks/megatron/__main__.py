"""Measures the megatron backend on GPUs: equal results of every topology, memory, speed.

    python -m benchmarks.megatron --out FOLDER [--parts logprob,equal,memory,mfu] [--only REGEX] [--budget-s 450]

On two GPUs of one host, or on four or eight, in bfloat16 with Transformer Engine; without CUDA the same program runs
with tiny sizes, over Gloo, to try it. Each launch of ranks is a separate process group with a time limit. A case that
fails or hangs is reported with its traceback, and the cases after it are launched again. FOLDER/results.json grows with
every case; its contents are printed as tables at the end.
"""

import argparse
import contextlib
import json
import os
import random
import re
import socket
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.megatron import report
from benchmarks.megatron.cases import PARTS, Case, Launch, Machine
from millrace.local.host import visible_devices
from millrace.software import installed_release

ROOT = Path(__file__).parents[2]
FRESH_S = 25.0
"""Seconds that a new launch needs before its first case."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument(
        "--parts", default="logprob,equal,memory,mfu", help=f"parts to run, in this order, of {', '.join(PARTS)}"
    )
    parser.add_argument(
        "--only", type=re.compile, default="", help="run only cases whose name matches this regular expression"
    )
    parser.add_argument("--quick", action="store_true", help="fewer steps in each case")
    parser.add_argument(
        "--budget-s", type=float, default=450.0, help="all launches end this many seconds after the start"
    )
    parser.add_argument("--gpus", type=int, help="number of GPUs; default: all, and without CUDA 2 simulated ones")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    until = time.monotonic() + options.budget_s
    with tempfile.TemporaryDirectory(prefix="millrace-bench-") as folder:
        gpus = options.gpus or torch.cuda.device_count() or 2
        machine = Machine(Path(folder), torch.cuda.is_available(), options.quick, gpus)
        results = Results(options.out, machine)
        launches = [
            replace(launch, cases=[case for case in launch.cases if re.search(options.only, case["name"])])
            for part in options.parts.split(",")
            for launch in PARTS[part](machine)
        ]
        done = {launch.name: threading.Event() for launch in launches}

        def in_turn(launch: Launch) -> None:
            """Runs a launch after every earlier launch that needs one of its GPUs."""
            for earlier in launches[: launches.index(launch)]:
                if set(earlier.gpus) & set(launch.gpus):
                    done[earlier.name].wait()
            try:
                run(launch, machine, results, until)
            finally:
                done[launch.name].set()

        def comparison() -> None:
            for name in equal:
                done[name].wait()
            results.add("equal", report.compared(machine.scratch))

        equal = [launch.name for launch in launches if launch.compared]
        threads = [threading.Thread(target=in_turn, args=(launch,)) for launch in launches]
        threads += [threading.Thread(target=comparison)] if equal else []
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    print(report.tables(results.found))


class Results:
    """All results, written to results.json after every change."""

    def __init__(self, out: Path, machine: Machine) -> None:
        self.found: dict[str, Any] = {"host": _host(machine), "launches": {}}
        self.out = out
        self._lock = threading.Lock()

    def add(self, name: str, value: Any) -> None:
        with self._lock:
            self.found[name] = value
            self._write()

    def cases(self, launch: str, lines: list[dict[str, Any]]) -> None:
        with self._lock:
            self.found["launches"][launch] = lines
            self._write()

    def _write(self) -> None:
        (self.out / "results.json").write_text(json.dumps(self.found, indent=1))


def run(launch: Launch, machine: Machine, results: Results, until: float) -> None:
    """Runs all cases of a launch, within its time limit and the program's. After a failed case the others are launched
    again."""
    until = min(until, time.monotonic() + launch.limit_s)
    folder = machine.scratch / launch.name
    folder.mkdir()
    log = results.out / f"{launch.name}.log"
    left, lines = list(launch.cases), []
    while left and until - time.monotonic() > FRESH_S:
        code = _launch(replace(launch, cases=left), folder, log, machine, until)
        lines = [json.loads(line) for line in (folder / "results.jsonl").read_text().splitlines()]
        done = {line["name"] for line in lines}
        left = _after(left, done, lines, folder, code, log)
        results.cases(launch.name, lines)
    skipped = [{"name": case["name"], "ok": False, "error": "the time was over"} for case in left]
    results.cases(launch.name, lines + skipped)


def _after(left: list[Case], done: set[str], lines: list[Any], folder: Path, code: int, log: Path) -> list[Case]:
    """The cases after the one at which the ranks ended. That case gets a result if it could not write one."""
    for at, case in enumerate(left):
        if case["name"] not in done:
            if lines and not lines[-1]["ok"] and lines[-1]["name"] in {c["name"] for c in left[:at]}:
                return left[at:]
            line = {"name": case["name"], "ok": False, "error": f"ended with {code}: {log.read_text()[-2500:]}"}
            with (folder / "results.jsonl").open("a") as out:
                out.write(json.dumps(line) + "\n")
            lines.append(line)
            return left[at + 1 :]
    return []


def _launch(launch: Launch, folder: Path, log: Path, machine: Machine, until: float) -> int:
    (folder / "cases.json").write_text(json.dumps(launch.cases))
    (folder / "results.jsonl").touch()
    ranks = len(launch.gpus)
    command = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "1", "--nproc-per-node", str(ranks)]
    command += ["--master-addr", "127.0.0.1", "--master-port", str(_free_port())]
    command += ["-m", "benchmarks.megatron.rank", str(folder)]
    threads = max(1, (os.cpu_count() or 2) // 2) // ranks if machine.cuda else 1
    environment = {
        **os.environ,
        "CUDA_VISIBLE_DEVICES": ",".join(visible_devices()[gpu] for gpu in launch.gpus) if machine.cuda else "",
        "OMP_NUM_THREADS": str(max(1, threads)),
        "CUDA_DEVICE_MAX_CONNECTIONS": "1",  # Megatron's order of communication and computation
        "PYTORCH_ALLOC_CONF": "expandable_segments:True",
        "TORCHDYNAMO_SUPPRESS_ERRORS": "1",  # functions that cannot be compiled run uncompiled
        **launch.environment,
    }
    with log.open("a") as out:
        process = subprocess.Popen(
            command, cwd=ROOT, env=environment, stdout=out, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            return process.wait(timeout=max(1.0, until - time.monotonic()))
        except subprocess.TimeoutExpired:
            return -1
        finally:
            _end(process)


def _end(process: subprocess.Popen) -> None:
    """Ends the launcher and its ranks."""
    process.terminate()
    try:
        process.wait(timeout=5)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, 9)
        process.wait()


def _host(machine: Machine) -> dict[str, Any]:
    names = ("torch", "transformer_engine", "megatron-core", "transformers")
    versions = {name: release for name in names if (release := installed_release(name))}
    device = torch.cuda.get_device_name() if machine.cuda else "no GPU"
    return {"device": device, "devices": torch.cuda.device_count(), "cores": os.cpu_count(), "versions": versions}


def _free_port() -> int:
    """A free port below those that the system gives to connections, which could take it before it is used."""
    while True:
        port = random.randrange(20000, 30000)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("", port))
            return port


if __name__ == "__main__":
    main()
