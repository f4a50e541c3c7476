"""The megatron backend on GPUs: equal numbers by every topology, memory, speed.

    python -m benchmarks.megatron --out FOLDER [--parts logprob,equal,memory,mfu] [--only REGEX] [--budget-s 450]

On two GPUs of one host, or on four or eight, in bfloat16 with Transformer Engine; without CUDA the same program on tiny
sizes, over Gloo, to try it. Each launch of ranks is a process group of its own with a time limit; a case that fails or
hangs is told with its traceback, and those after it are launched anew. FOLDER/results.json grows with every case; what
it says is printed as tables at the end.
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
from benchmarks.megatron.cases import PARTS, Case, Launch, Place
from millrace.local.devices import visible_devices

ROOT = Path(__file__).parents[2]
FRESH_S = 25.0
"""What a new launch needs before its first case."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--parts", default="logprob,equal,memory,mfu", help=f"in this order, of {', '.join(PARTS)}")
    parser.add_argument("--only", type=re.compile, default="", help="cases whose name this regular expression finds")
    parser.add_argument("--quick", action="store_true", help="fewer steps in each case")
    parser.add_argument("--budget-s", type=float, default=450.0, help="no launch outlasts this many seconds from now")
    parser.add_argument("--gpus", type=int, help="how many to use: all there are; without CUDA, to be played: 2")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    until = time.monotonic() + options.budget_s
    with tempfile.TemporaryDirectory(prefix="millrace-bench-") as folder:
        gpus = options.gpus or torch.cuda.device_count() or 2
        place = Place(Path(folder), torch.cuda.is_available(), options.quick, gpus)
        results = Results(options.out, place)
        launches = [
            replace(launch, cases=[case for case in launch.cases if re.search(options.only, case["name"])])
            for part in options.parts.split(",")
            for launch in PARTS[part](place)
        ]
        done = {launch.name: threading.Event() for launch in launches}

        def in_turn(launch: Launch) -> None:
            """After every earlier launch that needs one of its GPUs."""
            for earlier in launches[: launches.index(launch)]:
                if set(earlier.gpus) & set(launch.gpus):
                    done[earlier.name].wait()
            try:
                run(launch, place, results, until)
            finally:
                done[launch.name].set()

        def comparison() -> None:
            for name in equal:
                done[name].wait()
            results.add("equal", report.compared(place.scratch))

        equal = [launch.name for launch in launches if launch.name.startswith("equal")]
        threads = [threading.Thread(target=in_turn, args=(launch,)) for launch in launches]
        threads += [threading.Thread(target=comparison)] if equal else []
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    print(report.tables(results.found))


class Results:
    """Everything that was found, written to results.json whenever there is more."""

    def __init__(self, out: Path, place: Place) -> None:
        self.found: dict[str, Any] = {"host": _host(place), "launches": {}}
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


def run(launch: Launch, place: Place, results: Results, until: float) -> None:
    """All its cases, launched anew after one that failed, within its limit and the program's."""
    until = min(until, time.monotonic() + launch.limit_s)
    folder = place.scratch / launch.name
    folder.mkdir()
    log = results.out / f"{launch.name}.log"
    left, lines = list(launch.cases), []
    while left and until - time.monotonic() > FRESH_S:
        code = _launch(replace(launch, cases=left), folder, log, place, until)
        lines = [json.loads(line) for line in (folder / "results.jsonl").read_text().splitlines()]
        told = {line["name"] for line in lines}
        left = _after(left, told, lines, folder, code, log)
        results.cases(launch.name, lines)
    skipped = [{"name": case["name"], "ok": False, "error": "no time was left"} for case in left]
    results.cases(launch.name, lines + skipped)


def _after(left: list[Case], told: set[str], lines: list[Any], folder: Path, code: int, log: Path) -> list[Case]:
    """The cases after the one at which the ranks ended, which is told where it could not tell itself."""
    for at, case in enumerate(left):
        if case["name"] not in told:
            if lines and not lines[-1]["ok"] and lines[-1]["name"] in {c["name"] for c in left[:at]}:
                return left[at:]
            line = {"name": case["name"], "ok": False, "error": f"ended with {code}: {log.read_text()[-2500:]}"}
            with (folder / "results.jsonl").open("a") as out:
                out.write(json.dumps(line) + "\n")
            lines.append(line)
            return left[at + 1 :]
    return []


def _launch(launch: Launch, folder: Path, log: Path, place: Place, until: float) -> int:
    (folder / "cases.json").write_text(json.dumps(launch.cases))
    (folder / "results.jsonl").touch()
    ranks = len(launch.gpus)
    command = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "1", "--nproc-per-node", str(ranks)]
    command += ["--master-addr", "127.0.0.1", "--master-port", str(_free_port())]
    command += ["-m", "benchmarks.megatron.rank", str(folder)]
    threads = max(1, (os.cpu_count() or 2) // 2) // ranks if place.cuda else 1
    environment = {
        **os.environ,
        "CUDA_VISIBLE_DEVICES": ",".join(visible_devices()[gpu] for gpu in launch.gpus) if place.cuda else "",
        "OMP_NUM_THREADS": str(max(1, threads)),
        "CUDA_DEVICE_MAX_CONNECTIONS": "1",  # Megatron's order of communication and computation
        "PYTORCH_ALLOC_CONF": "expandable_segments:True",
        "TORCHDYNAMO_SUPPRESS_ERRORS": "1",  # what cannot be compiled runs as it is written
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
    """The launcher and its ranks."""
    process.terminate()
    try:
        process.wait(timeout=5)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, 9)
        process.wait()


def _host(place: Place) -> dict[str, Any]:
    versions = {"torch": str(torch.__version__)}
    for name in ("transformer_engine", "megatron-core", "transformers"):
        try:
            from importlib.metadata import version

            versions[name] = version(name)
        except ImportError:
            continue
    device = torch.cuda.get_device_name() if place.cuda else "no GPU"
    return {"device": device, "devices": torch.cuda.device_count(), "cores": os.cpu_count(), "versions": versions}


def _free_port() -> int:
    """Below those that connections get by themselves: one may be taken between now and its use."""
    while True:
        port = random.randrange(20000, 30000)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("", port))
            return port


if __name__ == "__main__":
    main()
