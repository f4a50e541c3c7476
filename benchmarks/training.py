"""An update by FSDP2 and by Megatron-Core on the same micro-batches, on one GPU or, under torchrun, on several.

    python -m benchmarks.training --shape qwen3-8b --layers 12 --lengths mixed,even --budgets 16384,32768

Random weights of a published shape, cut in layers; about 130,000 tokens an update and data-parallel rank, drawn anew
for each. `mixed`: lengths geometric with mean 430, at most 3,072; `even`: sequences of 4,096; a number: sequences of so
many tokens. Prints seconds of forward and backward, of the optimizer, tokens a second, MFU (of the GPUs' published rate
in bf16, counted as if all weights were trained) and the peak of memory of one GPU. Needs `gpu-megatron` installed for
that backend. `--profile` adds a line with the seconds that the GPU was busy in one more update, by kind of kernel.
What is being done goes to stderr, with the seconds since the start: a run that is cut shows where its time went.

Long sequences on two GPUs, shared by them (Ulysses) and not:

    torchrun --nproc-per-node 2 -m benchmarks.training --backends fsdp2 --shape qwen3-8b --layers 12 --recompute \\
        --lengths 32768,131072 --budgets 131072 --updates 2 --options '{"sequence_parallel_size": 2}' '{}'
"""

import argparse
import gc
import json
import os
import sys
import tempfile
import time
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.kernels import by_kind
from benchmarks.shapes import config_of, cut, trainer_spec
from millrace.megatron.architectures import read_shape
from millrace.megatron.architectures.published import shape_of
from millrace.megatron.architectures.shape import sequence_cost
from millrace.spec import JobSpec
from services.trainer.backends import build
from services.trainer.backends.fsdp2.loading import ModelFolder
from services.trainer.protocol.backend import Backend, LossFn, TokenScores
from services.trainer.protocol.microbatch import MicroBatch
from services.trainer.ranks.world import World
from services.trainer.step.phases import peak_flops

TOKENS = 130_000
PROMPT, LONGEST, EVEN = 32, 3072, 4096
MEAN_RESPONSE = 430
BEGAN = time.perf_counter()


@dataclass(frozen=True)
class Case:
    folder: Path
    backend: str
    lengths: str
    budget: int
    lora: int | None = None
    """Rank of the adapters; None trains all weights."""
    recompute: bool = False
    options: str = "{}"
    """Options of the backend, as JSON."""
    tokens: int = TOKENS
    """Least number of tokens of an update and data-parallel rank."""

    @property
    def length(self) -> int | None:
        """Tokens of every sequence; None where they are drawn."""
        return None if self.lengths == "mixed" else EVEN if self.lengths == "even" else int(self.lengths)


def micro_batches(case: Case, vocabulary: int, seed: int, ranks: int) -> list[list[MicroBatch]]:
    """An update's sequences of each data-parallel rank, in the order drawn, packed to the token budget. All ranks have
    the same number of micro-batches."""
    found = [_of_one_rank(case, vocabulary, np.random.default_rng((seed, rank))) for rank in range(ranks)]
    most = max(map(len, found))
    return [batches + [MicroBatch.pack([], [])] * (most - len(batches)) for batches in found]


def _of_one_rank(case: Case, vocabulary: int, random: np.random.Generator) -> list[MicroBatch]:
    packs: list[list[int]] = [[]]
    total = 0
    while total < case.tokens:
        length = case.length or min(LONGEST, PROMPT + int(random.geometric(1 / MEAN_RESPONSE)))
        if packs[-1] and sum(packs[-1]) + length > case.budget:
            packs.append([])
        packs[-1].append(length)
        total += length
    return [
        MicroBatch(
            tuple(range(len(pack))),
            tuple(pack),
            tuple(length - PROMPT for length in pack),
            torch.from_numpy(random.integers(3, vocabulary, sum(pack))),
        )
        for pack in packs
    ]


def loss(batch: MicroBatch, scores: TokenScores) -> tuple[Tensor, None]:
    assert scores.entropy_r is not None
    return -scores.logprobs_r.sum() / TOKENS + 0.0 * scores.entropy_r.sum(), None


def job_spec(case: Case) -> JobSpec:
    return trainer_spec(
        case.folder,
        lora={"rank": case.lora, "alpha": case.lora} if case.lora else None,
        backend=case.backend,
        dtype="bfloat16",
        token_budget=case.budget,
        activation_recompute=case.recompute,
        backend_options=json.loads(case.options),
        optimizer={"lr": 1e-6},
    )


def measured(case: Case, world: World, updates: int, profile: bool) -> Iterator[dict[str, Any]]:
    """The row of this case, and with `profile` one of its kernels."""
    shape = read_shape(case.folder)
    torch.manual_seed(0)  # each case has the same weights
    report(world, f"building {case.backend}, options {case.options}")
    backend, cost = build(job_spec(case), world.device), sequence_cost(shape)
    parallel, times, norms, flops, tokens = backend.data_parallel, [], [], [], []
    for seed in range(updates + 1):
        by_rank = micro_batches(case, shape.vocabulary, seed, parallel.size)
        everyone = [batch for batches in by_rank for batch in batches if batch.rows]
        flops.append(sum(cost.total(batch.lengths) for batch in everyone))
        tokens.append(sum(sum(batch.lengths) for batch in everyone))
        mine = by_rank[parallel.rank]
        report(world, f"update {seed} of {updates}, {len(mine)} micro-batches")
        *spent, norm = update(backend, mine, loss if seed else partial(reported_loss, world))
        times.append(spent)
        norms.append(norm)
        if not seed and torch.cuda.is_available():
            torch.cuda.reset_peak_memory_stats()
    seconds = [sum(parts) for parts in times]
    rates = sorted(work / spent for work, spent in zip(flops[1:], seconds[1:], strict=True))
    yield {
        "backend": case.backend,
        "gpus": world.size,
        "lengths": case.lengths,
        "budget": case.budget,
        "lora": case.lora,
        "recompute": case.recompute,
        "options": case.options,
        "trained_parameters": backend.parameters,
        "first_update_s": round(sum(times[0]), 2),
        "gradient_norms": [round(norm, 5) for norm in norms],
        "forward_backward_s": [round(parts[0], 3) for parts in times[1:]],
        "optimizer_s": [round(parts[1], 3) for parts in times[1:]],
        "tokens_per_s": round(sum(tokens[1:]) / sum(seconds[1:])),
        "mfu": round(rates[len(rates) // 2] / world.size / peak_flops(world.device), 4),
        "peak_gb": round(torch.cuda.max_memory_allocated() / 1e9, 1) if torch.cuda.is_available() else None,
    }
    if profile:
        report(world, "profiling an update")
        batches = micro_batches(case, shape.vocabulary, updates + 1, parallel.size)[parallel.rank]
        yield {"micro_batches": len(batches), **by_kind(lambda: update(backend, batches), world.device)}


def report(world: World, doing: str) -> None:
    """Says what is being done and how long after the start, at once."""
    if world.rank == 0:
        print(f"{time.perf_counter() - BEGAN:.1f} s: {doing}", file=sys.stderr, flush=True)


def reported_loss(world: World, batch: MicroBatch, scores: TokenScores) -> tuple[Tensor, None]:
    """The loss, and a line when the forward pass of the micro-batch is done: before the first one layers and kernels
    are compiled and tuned, after it those of the backward pass."""
    _synchronize()
    report(world, f"forward pass done, {sum(batch.lengths)} tokens")
    return loss(batch, scores)


def update(backend: Backend, batches: list[MicroBatch], loss_fn: LossFn[None] = loss) -> tuple[float, float, float]:
    """Seconds of forward and backward, seconds of the optimizer, and the norm of the gradient."""
    dist.barrier()
    _synchronize()
    began = time.perf_counter()
    backend.forward_backward(batches, loss_fn, temperature=1.0)
    _synchronize()
    between = time.perf_counter()
    norm = backend.gradient_norm()
    backend.optimizer_step(lr=1e-6, gradient_scale=min(1.0, 1.0 / (norm + 1e-6)))
    _synchronize()
    return between - began, time.perf_counter() - between, norm


def _synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def draw_weights(backends: Collection[str] = ("fsdp2", "megatron")) -> None:
    """The backends draw weights instead of reading a folder that would have to be written first."""
    if "megatron" in backends:
        from benchmarks.megatron import models

        models.draw_weights()
    draw_fsdp2_weights()


def draw_fsdp2_weights() -> None:
    """The fsdp2 backend draws weights instead of reading them."""
    ModelFolder.fill = lambda self, module, mesh, buffers: _filled(module)  # type: ignore[method-assign]


@torch.no_grad()
def _filled(module: torch.nn.Module) -> None:
    for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
        local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
        if name.endswith("inv_freq"):
            exponents = torch.arange(0, 2 * local.numel(), 2, device=local.device).float() / (2 * local.numel())
            local.copy_(1e6**-exponents)
        elif local.dim() > 1:  # a GPU draws for weights in host memory too: a CPU takes minutes
            drawn = torch.empty_like(local, device="cuda" if torch.cuda.is_available() else local.device)
            local.copy_(drawn.normal_(0.0, 0.02))
        else:
            local.fill_(0.0 if name.endswith("bias") else 1.0)


def cases(options: argparse.Namespace, root: Path) -> Iterator[Case]:
    shape = cut(shape_of(options.shape), options.layers, options.vocabulary)
    config = options.config.read_text() if options.config else json.dumps(config_of(shape))
    (root / "config.json").write_text(config)
    for lengths in options.lengths.split(","):
        for budget in options.budgets.split(","):
            for backend in options.backends.split(","):
                for rank in options.lora.split(","):
                    for chosen in options.options:
                        about = (root, backend, lengths, int(budget), int(rank) or None, options.recompute, chosen)
                        yield Case(*about, options.tokens)


def joined() -> World:
    """The ranks of torchrun, or this process alone without it."""
    alone = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29511", "RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}
    for name, value in alone.items():
        os.environ.setdefault(name, value)
    return World.join()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="qwen3-1.7b")
    parser.add_argument("--config", type=Path, help="a config.json, instead of a published shape")
    parser.add_argument("--layers", type=int, help="fewer layers than the shape has")
    parser.add_argument("--vocabulary", type=int, help="another vocabulary than the shape has")
    parser.add_argument("--backends", default="fsdp2,megatron")
    parser.add_argument("--lengths", default="mixed", help="of mixed, even, or numbers of tokens")
    parser.add_argument("--budgets", default="16384", help="tokens a micro-batch")
    parser.add_argument("--lora", default="0", help="ranks of adapters; 0 trains all weights")
    parser.add_argument("--recompute", action="store_true", help="recompute activations in the backward pass")
    parser.add_argument(
        "--options", nargs="+", default=["{}"], help="trainer.backend_options, as JSON, of each case; for one backend"
    )
    parser.add_argument("--tokens", type=int, default=TOKENS, help="an update and data-parallel rank, about")
    parser.add_argument("--profile", action="store_true", help="another update, by kind of kernel on the GPU")
    parser.add_argument("--updates", type=int, default=4, help="timed ones, after one that is not")
    options = parser.parse_args()
    world = joined()
    draw_weights(options.backends.split(","))
    with tempfile.TemporaryDirectory() as folder:
        for case in cases(options, Path(folder)):
            for row in measured(case, world, options.updates, options.profile):
                if world.rank == 0:
                    print(json.dumps(row), flush=True)
            gc.collect()
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
