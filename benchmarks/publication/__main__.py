"""Publications into a real engine under load, compared with vLLM's own `nccl` weight transfer in the same engine.

    python -m benchmarks.publication --shape qwen3-30b-a3b --modes shadow,inplace,vllm-packed

Random weights of a published shape lie on the trainer's ranks, one GPU each; the engine takes the GPUs that are left.
On a host without GPUs everything runs on the CPU over Gloo, without vLLM's transfer. A publication goes through all its
phases, from the order to prepare until generation resumes under the new version, with the messages that the services
send; sixteen requests run all the time. `broadcast` sends every tensor whole over Gloo, through the engine's loader. At
the end the engine's parameters after a sharded publication must be bit for bit what they are after a broadcast or after
vLLM's own transfer. With `--lora RANK` the engine serves an adapter of all linear layers of that rank, and publications
of the adapter alone follow those of the whole weights. Prints a table and writes JSON.
"""

import argparse
import asyncio
import contextlib
import json
import os
import platform
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks.publication.benchmark import ANSWER, BASELINES, BROADCAST, MODES, PROMPT, PublicationBenchmark
from benchmarks.publication.sender import remote, serve
from benchmarks.shapes import config_of
from millrace.bench.layouts import TrainerLayout, manifest
from millrace.bench.publication import SHARING
from millrace.demo.tokenizer import byte_tokenizer
from millrace.local.host import visible_devices
from millrace.megatron.architectures.published import SHAPES, shape_of
from millrace.spec import JobSpec, parse
from millrace.telemetry import logs
from millrace.weights.plans.manifest import Content, Manifest, TensorInfo
from services.rollout.engines.adapter import adapter_shape


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=[n for n, s in SHAPES.items() if s.latent is None], default="tiny")
    parser.add_argument("--trainer", default="tp=1", help="as of millrace bench publication")
    parser.add_argument("--engine", choices=("vllm", "sglang", "transformers"), default="vllm")
    parser.add_argument("--engine-options", type=json.loads, default={}, help="as JSON")
    parser.add_argument(
        "--share-gpus", action="store_true", help="the engine uses the ranks' GPUs too: not for timings"
    )
    parser.add_argument("--modes", default="shadow,inplace", help=f"of {', '.join([*MODES, BROADCAST, *BASELINES])}")
    parser.add_argument(
        "--repeats", type=int, default=10, help="timed publications by mode, after one that is not timed"
    )
    parser.add_argument("--lora", type=int, metavar="RANK", help="publish an adapter of this rank too, in both modes")
    parser.add_argument("--output", type=Path, help="write the figures there, as JSON")
    options = parser.parse_args()
    logs.configure("bench")
    with tempfile.TemporaryDirectory(prefix="millrace-bench-") as folder:
        result = asyncio.run(measure(Path(folder), options))
    if options.output:
        options.output.write_text(json.dumps(result, indent=1))
    show(result)
    sys.stdout.flush()
    if result["as_the_oracle"] is False:
        sys.exit("the engine holds other parameters than after the oracle")


def job(folder: Path, options: argparse.Namespace) -> JobSpec:
    (folder / "config.json").write_text(json.dumps(config_of(shape_of(options.shape))))
    byte_tokenizer().save_pretrained(folder)
    engine_options = dict(options.engine_options)
    if BASELINES.keys() & set(options.modes.split(",")):
        engine_options["weight_transfer_config"] = {"backend": "nccl"}
    return parse(
        {
            "name": "bench",
            "output": str(folder / "output"),
            "model": {"path": str(folder)} | ({"lora": {"rank": options.lora, "merge": False}} if options.lora else {}),
            "data": {"files": ["rows.jsonl"], "max_prompt_tokens": 2 * PROMPT},
            "reward": {"function": "exact", "workers": 1},
            "rollout": {"dtype": "bfloat16", "max_response_tokens": ANSWER, "engine_options": engine_options},
            "trainer": {"token_budget": 2 * PROMPT + ANSWER},
        }
    )


def adapter_of(spec: JobSpec) -> Manifest | None:
    """The adapter that the job publishes; None for a job without one."""
    if (shape := adapter_shape(spec)) is None:
        return None
    tensors: list[TensorInfo] = []
    for layer in shape.layers:
        tensors.append(TensorInfo(layer.lora_a, (shape.rank, layer.inputs), spec.rollout.dtype))
        tensors.append(TensorInfo(layer.lora_b, (layer.outputs, shape.rank), spec.rollout.dtype))
    return Manifest(tuple(tensors), Content.ADAPTER)


def _gpus() -> int:
    """The number of GPUs. No CUDA context is made: the processes that this one starts must not inherit one."""
    import torch

    return torch.cuda.device_count()


async def measure(folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    senders = TrainerLayout(shape_of(options.shape), options.trainer).ranks
    gpus = _gpus()
    modes = [mode for mode in options.modes.split(",") if mode]
    if unknown := set(modes) - MODES.keys() - BASELINES.keys() - {BROADCAST}:
        raise SystemExit(f"there is no mode {', '.join(sorted(unknown))}.")
    if gpus == 0 and set(modes) & BASELINES.keys():
        raise SystemExit("vLLM's own transfer needs GPUs.")
    spec = job(folder, options)
    adapter = adapter_of(spec)
    sent = adapter.to_proto().SerializeToString() if adapter is not None else b""
    with contextlib.ExitStack() as held:
        ranks = []
        for rank in range(senders):
            device = f"cuda:{rank}" if gpus else "cpu"
            ranks.append(held.enter_context(remote(serve, options.shape, options.trainer, rank, device, sent)))
        if gpus:
            os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(visible_devices()[0 if options.share_gpus else senders :])
            if options.share_gpus:
                os.environ["NCCL_HOSTID"] = SHARING
        bench = PublicationBenchmark(options, ranks)
        try:
            began = time.perf_counter()
            await bench.engine.start(spec)
            print(f"the engine is up after {time.perf_counter() - began:.1f} s", flush=True)
            await bench.agree(manifest(shape_of(options.shape)))
            return await rounds(bench, options, modes, adapter)
        finally:
            await bench.engine.stop()


async def rounds(
    bench: PublicationBenchmark, options: argparse.Namespace, modes: list[str], adapter: Manifest | None
) -> dict[str, Any]:
    oracles = [mode for mode in modes if mode not in MODES]
    if oracles:
        await bench.hold_whole()
    if set(modes) & BASELINES.keys():
        await bench.join_baseline()
    version = 1
    await bench.fill(version)
    await bench.publish(version, "inplace" if "shadow" not in modes else "shadow")
    async with bench.load():
        found, version = await timed(bench, options, modes, version)
        began, before = time.perf_counter(), bench._tokens
        await asyncio.sleep(5.0)
        quiet = (bench._tokens - before) / (time.perf_counter() - began)
    agreed, describe_s = bench.agreed, bench.describe_s
    alike = await same(bench, version, oracles[0]) if oracles else None
    if adapter is not None:
        await bench.add_adapter(adapter, version + 10)
        async with bench.load():
            alone, _ = await timed(bench, options, list(MODES), version + 20)  # an adapter fits in either
        found |= {f"adapter {mode}": figures for mode, figures in alone.items()}
    return {
        **{k: str(v) if isinstance(v, Path) else v for k, v in vars(options).items()},
        "engine_release": bench.engine.release,
        "device": bench.engine.device,
        "workers": bench.engine.world_size,
        "python": platform.python_version(),
        "bytes": agreed.manifest.bytes,
        "tensors": len(agreed.manifest.tensors),
        "messages": len(agreed.plan.hops),
        "describe_s": describe_s,
        "adapter": None if adapter is None else {"bytes": adapter.bytes, "tensors": len(adapter.tensors)},
        "tokens_per_s": quiet,
        "figures": {mode: _summary(figures) for mode, figures in found.items()},
        "as_the_oracle": alike,
    }


async def timed(
    bench: PublicationBenchmark, options: argparse.Namespace, modes: list[str], version: int
) -> tuple[dict[str, list[dict[str, float]]], int]:
    """Publications by each mode after `version`: their figures, and the last version."""
    found: dict[str, list[dict[str, float]]] = {mode: [] for mode in modes}
    for mode in modes:
        for number in range(options.repeats + 1):
            version += 1
            if not number:  # later versions send the same bytes, which takes as long
                await bench.fill(version)
            figures = await bench.by(mode, version)
            if number:
                found[mode].append(figures)
        print(f"{mode}: {np.median([f['whole'] for f in found[mode]]):.4f} s", flush=True)
    return found, version


async def same(bench: PublicationBenchmark, version: int, oracle: str) -> bool:
    """Whether the engine holds a version, bit for bit, after a sharded publication as after the oracle."""
    await bench.fill(version + 1)
    await bench.by(oracle, version + 1)
    expected = await bench.checksums()
    await bench.fill(version + 2)
    await bench.publish(version + 2, "shadow")
    other = await bench.checksums()
    await bench.fill(version + 1)
    await bench.publish(version + 3, "shadow")
    held = await bench.checksums()
    weights = [name for name in expected[0] if ".lora_" not in name]
    kept = [name for name in weights if other[0][name] == expected[0][name]]
    assert not kept, f"another version did not change {kept[:5]}"
    return held == expected


def _summary(figures: list[dict[str, float]]) -> dict[str, dict[str, float]]:
    return {
        name: {
            "p50": float(np.median([f[name] for f in figures])),
            "p95": float(np.percentile([f[name] for f in figures], 95)),
        }
        for name in figures[0]
    }


def show(result: dict[str, Any]) -> None:
    console = Console()
    console.print(
        f"{result['shape']}: trainer {result['trainer']} → {result['engine']} {result['engine_release']} with "
        f"{result['workers']} workers on {result['device']}; {result['tensors']} tensors, "
        f"{result['bytes'] / 1e9:.3f} GB in {result['messages']} messages; layouts learned in "
        f"{result['describe_s']:.1f} s; {result['tokens_per_s']:.0f} tokens/s meanwhile"
    )
    table = Table("seconds, p50 (p95)", *result["figures"])
    for name in ("whole", "prepare", "transfer", "wire", "verify", "commit", "apply", "pause"):
        cells = [figures.get(name) for figures in result["figures"].values()]
        table.add_row(name, *("" if cell is None else f"{cell['p50']:.4f} ({cell['p95']:.4f})" for cell in cells))
    console.print(table)
    if (adapter := result["adapter"]) is not None:
        fewer = f"{result['bytes'] / adapter['bytes']:.0f} times fewer bytes"
        console.print(f"adapter: {adapter['tensors']} tensors, {adapter['bytes'] / 1e6:.1f} MB: {fewer}")
    if result["as_the_oracle"] is not None:
        console.print(f"bit for bit as after the oracle: {result['as_the_oracle']}")


if __name__ == "__main__":
    main()
