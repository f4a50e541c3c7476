"""Runs the cases of one launch on every rank, one after the other. Started by `benchmarks.megatron`.

    torchrun ... -m benchmarks.megatron.rank FOLDER

FOLDER/cases.json names the cases; rank 0 appends each one's figures to FOLDER/results.jsonl. A case that fails ends the
process, because what it leaves on the device would falsify the next case.
"""

import faulthandler
import gc
import json
import os
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.megatron import compare, speed
from services.trainer.ranks.world import World

KINDS: dict[str, Callable[[World, dict[str, Any]], dict[str, Any]]] = {
    "compare": compare.trained,
    "huggingface": compare.plain,
    "deepep": compare.deepep,
    "speed": speed.speed,
    "profile": speed.profiled,
    "scores": speed.scoring_head,
    "pass": speed.logprob_pass,
}


def main() -> None:
    folder = Path(sys.argv[1])
    world = World.join()
    results = folder / "results.jsonl"
    for case in json.loads((folder / "cases.json").read_text()):
        faulthandler.dump_traceback_later(case["limit_s"], exit=True)
        began = time.perf_counter()
        changed = case.get("environment", {})
        os.environ |= changed
        try:
            answer = {"ok": True, **KINDS[case["kind"]](world, case)}
        except BaseException as error:
            traceback.print_exc()
            text = "".join(traceback.format_exception(error))[-3000:]
            _append(results, {"name": case["name"], "rank": world.rank, "ok": False, "error": text})
            os._exit(1)
        faulthandler.cancel_dump_traceback_later()
        for name in changed:
            del os.environ[name]
        if world.rank == 0:
            _append(results, {"name": case["name"], **answer, "wall_s": time.perf_counter() - began})
        _clean()
        dist.barrier()
    sys.stdout.flush()
    os._exit(0)  # process groups that are still open would complain


def _append(file: Path, line: dict[str, Any]) -> None:
    with file.open("a") as out:
        out.write(json.dumps(line) + "\n")


def _clean() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        getattr(torch._C, "_host_emptyCache", lambda: None)()  # host memory that copies go through


if __name__ == "__main__":
    main()
