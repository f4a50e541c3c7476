"""One step of this project beside one of its peers: the same GPUs, weights, prompts, answers, lengths and precision.

    python -m benchmarks.peers ours --steps 7
    python -m benchmarks.peers ours --backend megatron --case staleness-0-streaming
    MILLRACE_PEERS_VERL=/venvs/verl/lib/python3.12/site-packages python -m benchmarks.peers verl --case fsdp2
    MILLRACE_PEERS_TRL=/venvs/trl/lib/python3.12/site-packages python -m benchmarks.peers trl --case server

Hosts differ in speed by a quarter, so compare only what ran on one machine, one run after the other. Of two GPUs this
project trains on one and generates on the other; a hybrid peer does both on both. Prints a JSON object for each run:
the seconds of each step after the first two, and what the system itself says of them.
"""

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.peers import trl, verl
from benchmarks.peers.work import SHAPES, made_work


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("system", choices=("ours", "verl", "trl", "make"))
    parser.add_argument("--case", action="append", help="as often as needed; all of the system if there is none")
    parser.add_argument("--work", type=Path, default=Path("/tmp/millrace-peers"), help="folder of model and prompts")
    parser.add_argument("--shape", choices=tuple(SHAPES), default="1.4b")
    parser.add_argument("--steps", type=int, default=7)
    parser.add_argument("--gpus", type=int, default=2)
    parser.add_argument("--backend", default="fsdp2", help="of this project's trainer")
    parser.add_argument("--limit-s", type=float, default=3600.0, help="for all runs together")
    parser.add_argument("--set", action="append", default=[], help="another setting, in the system's own words")
    options = parser.parse_args()
    work = made_work(options.work / options.shape, options.shape)
    for row in runs(work, options):
        print(json.dumps({"shape": options.shape, **row}), flush=True)


def runs(work: Path, options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    if options.system == "verl":
        for case in options.case or verl.CASES:
            yield verl.run_verl(work, case, options.steps, options.limit_s, options.gpus, options.set)
    elif options.system == "trl":
        for case in options.case or trl.CASES:
            yield trl.run_trl(work, case, options.steps, options.limit_s, options.set)
    elif options.system == "ours":
        from benchmarks.peers import ours

        cases = options.case or list(ours.CASES)
        yield from ours.run_ours(work, cases, options.steps, options.limit_s, options.backend, options.set)


if __name__ == "__main__":
    main()
