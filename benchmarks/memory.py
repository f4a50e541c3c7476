"""The memory of a trainer's rank with each switch, predicted and measured by part, with tokens a second.

    python -m benchmarks.memory --shape qwen3-8b --layers 8 --budget 16384

Random weights of a published shape, cut in layers; every micro-batch is full: sequences of `--length` tokens up to the
token budget. One update that is not timed, then `--updates`. Prints one table in GiB; with `--json FILE` the same as
JSON. A case that would begin after `--limit-s` is left out and named. On a machine without a GPU only what is kept is
measured. Under torchrun every rank takes part, and the values are those of the fullest.
"""

import argparse
import json
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.shapes import config_of, cut, trainer_spec
from benchmarks.training import draw_weights
from millrace.errors import MillraceError
from millrace.megatron.architectures.published import shape_of
from millrace.megatron.architectures.shape import ModelShape
from millrace.memory.ledger import KEPT
from millrace.spec import JobSpec
from services.trainer.backends import build
from services.trainer.memory.exhausted import forget_models
from services.trainer.memory.meter import MemoryMeter
from services.trainer.protocol.backend import Backend, TokenScores
from services.trainer.protocol.microbatch import MicroBatch
from services.trainer.ranks import collectives
from services.trainer.ranks.world import World

GIB = 1 << 30
LORA = {"rank": 32, "alpha": 32}


@dataclass(frozen=True)
class Case:
    """A backend with some switches on."""

    backend: str
    name: str
    options: Mapping[str, Any] = field(default_factory=dict)
    recompute: bool = False
    lora: bool = False


def selective(*modules: str) -> dict[str, Any]:
    return {"recompute": {"granularity": "selective", "modules": list(modules)}}


CASES = (
    Case("fsdp2", "none"),
    Case("fsdp2", "recompute", recompute=True),
    Case("fsdp2", "offload activations", {"offload_activations": True}),
    Case("fsdp2", "recompute, offload activations", {"offload_activations": True}, recompute=True),
    Case("fsdp2", "LoRA 32", lora=True),
    Case("fsdp2", "LoRA 32, recompute", recompute=True, lora=True),
    Case("fsdp2", "LoRA 32, recompute, offload parameters", {"offload_parameters": True}, recompute=True, lora=True),
    Case("fsdp2", "offload parameters", {"offload_parameters": True}),
    Case("fsdp2", "offload optimizer", {"offload_optimizer": True}),
    Case("fsdp2", "recompute, offload optimizer", {"offload_optimizer": True}, recompute=True),
    Case("fsdp2", "LoRA 32, recompute, offload activations", {"offload_activations": True}, recompute=True, lora=True),
    Case("megatron", "none"),
    Case("megatron", "recompute", recompute=True),
    Case("megatron", "recompute mlp, layernorm", selective("mlp", "layernorm")),
    Case("megatron", "moments in bfloat16", {"optimizer_moments": "bfloat16"}),
    Case("megatron", "LoRA 32", lora=True),
    Case("megatron", "optimizer offload 1", {"optimizer_offload_fraction": 1.0}),
)
"""The switches, each backend's first case without any."""


def job_spec(case: Case, folder: Path, budget: int, dtype: str) -> JobSpec:
    return trainer_spec(
        folder,
        lora=LORA if case.lora else None,
        backend=case.backend,
        dtype=dtype,
        token_budget=budget,
        activation_recompute=case.recompute,
        backend_options=dict(case.options),
    )


def loss(batch: MicroBatch, scores: TokenScores) -> tuple[Tensor, None]:
    assert scores.entropy_r is not None
    return -scores.logprobs_r.mean() + 0.0 * scores.entropy_r.sum(), None


def full_batches(count: int, budget: int, length: int, vocabulary: int) -> list[MicroBatch]:
    """Micro-batches of as many sequences as the budget holds."""
    random, rows = np.random.default_rng(0), max(1, budget // length)
    return [
        MicroBatch(
            tuple(range(rows)),
            (length,) * rows,
            (length - 1,) * rows,
            torch.from_numpy(random.integers(3, vocabulary, rows * length)),
        )
        for _ in range(count)
    ]


def update(backend: Backend, meter: MemoryMeter, batches: Sequence[MicroBatch]) -> float:
    """Seconds of one update, measured by part."""
    began = time.perf_counter()
    with meter.during("update_actor"):
        backend.forward_backward(batches, meter.watched(loss), temperature=1.0)
    with meter.during("update_actor"):
        norm = backend.gradient_norm()
        backend.optimizer_step(lr=1e-6, gradient_scale=min(1.0, 1.0 / (norm + 1e-6)))
    if backend.device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - began


def prepared(spec: JobSpec, world: World, options: argparse.Namespace) -> tuple[Backend, MemoryMeter, list[MicroBatch]]:
    """A backend, what measures it, and an update's micro-batches."""
    backend = build(spec, world.device)
    meter = MemoryMeter(spec, backend, world.rank, world.size)
    batches = full_batches(options.microbatches, options.budget, options.length, shape(options).vocabulary)
    meter.tokens = sum(batches[0].lengths)
    return backend, meter, batches


def measured(case: Case, folder: Path, world: World, options: argparse.Namespace) -> dict[str, Any]:
    """The row of a case: GiB of each part, predicted and measured, and tokens a second."""
    spec = job_spec(case, folder, options.budget, "bfloat16" if world.device.type == "cuda" else "float32")
    row: dict[str, Any] = {"backend": case.backend, "case": case.name}
    try:
        backend, meter, batches = prepared(spec, world, options)
        seconds = []
        for number in range(options.updates + 1):
            meter.begin_step(number + 1, options.budget)
            seconds.append(update(backend, meter, batches))
    except (MillraceError, torch.OutOfMemoryError) as error:
        return {**row, "error": str(error).splitlines()[0][:300]}
    found = collectives.maxima(meter.metrics())
    tokens = sum(sum(batch.lengths) for batch in batches) * options.updates * backend.data_parallel.size
    values = {name: value for name, value in found.items() if name.startswith("memory")}
    return {**row, "tokens_per_s": round(tokens / sum(seconds[1:])), **values}


def shape(options: argparse.Namespace) -> ModelShape:
    return cut(shape_of(options.shape), options.layers, options.vocabulary)


def table(rows: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Markdown: what is kept by part, the rest, the peak, and what the switch saved, each predicted → measured."""
    columns = (*KEPT, "rest", "peak", "saved")
    yield f"| backend | switches | tokens/s | {' | '.join(columns)} | peak off by |"
    yield f"|---|---|---|{'---|' * len(columns)}---|"
    first: dict[str, Mapping[str, Any]] = {}
    for row in rows:
        if "error" in row:
            yield f"| {row['backend']} | {row['case']} | {row['error']} |" + " |" * (len(columns) + 1)
            continue
        plain = first.setdefault(row["backend"], row)
        cells = [_pair(*_values(row, plain, column)) for column in columns]
        predicted, found = _values(row, plain, "peak")
        off = f"{predicted / found - 1:+.0%}" if predicted and found else "–"
        yield f"| {row['backend']} | {row['case']} | {row['tokens_per_s']:,} | {' | '.join(cells)} | {off} |"


def _values(row: Mapping[str, Any], plain: Mapping[str, Any], column: str) -> tuple[float, float]:
    """Predicted and measured GiB of a column; 0 where there is none."""
    if column == "saved":
        (before, found_before), (after, found_after) = _values(plain, plain, "peak"), _values(row, plain, "peak")
        return before - after, found_before - found_after
    return row.get(f"memory/update/predicted/{column}", 0.0), row.get(f"memory/update/{column}", 0.0)


def _pair(predicted: float, found: float) -> str:
    return f"{predicted:.1f} → {found:.1f}" if predicted or found else "–"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="qwen3-8b")
    parser.add_argument("--layers", type=int, help="fewer layers than the shape has")
    parser.add_argument("--vocabulary", type=int, help="another vocabulary than the shape has")
    parser.add_argument("--backends", default="fsdp2,megatron")
    parser.add_argument("--only", default="", help="names of cases, separated by semicolons; all without it")
    parser.add_argument("--budget", type=int, default=16384, help="tokens a micro-batch")
    parser.add_argument("--length", type=int, default=4096, help="tokens a sequence")
    parser.add_argument("--microbatches", type=int, default=2, help="of an update")
    parser.add_argument("--updates", type=int, default=2, help="timed ones, after one that is not")
    parser.add_argument("--limit-s", type=float, default=330.0)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    began, world = time.monotonic(), World.join()
    draw_weights()
    rows = []
    with tempfile.TemporaryDirectory() as name:
        (Path(name) / "config.json").write_text(json.dumps(config_of(shape(options))))
        chosen = [c for c in CASES if c.backend in options.backends.split(",")]
        for case in (c for c in chosen if not options.only or c.name in options.only.split(";")):
            if time.monotonic() - began > options.limit_s:
                rows.append({"backend": case.backend, "case": case.name, "error": "left out: no time left"})
                continue
            rows.append(measured(case, Path(name), world, options))
            forget_models(world.device)
            if world.rank == 0:
                print(json.dumps(rows[-1]), flush=True)
    if world.rank == 0:
        print("\n".join(table(rows)), flush=True)
        if options.json is not None:
            options.json.write_text(json.dumps(rows, indent=2))


if __name__ == "__main__":
    main()
