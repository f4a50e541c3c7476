"""Publications into a real engine under load, beside vLLM's own `nccl` weight transfer in the same engine and run.

    python -m benchmarks.publication --shape qwen3-30b-a3b --modes shadow,inplace,vllm-packed

Random weights of a published shape lie on the trainer's ranks, one GPU each; the engine takes the GPUs that are left
(on a host without any, everything runs on the CPU over Gloo, without the baseline). A publication goes through all its
phases, from the order to prepare until generation goes on under the new version, with the messages that the services
send; sixteen requests run all the while. `broadcast` sends every tensor whole over Gloo, through the engine's loader.
At the end the engine's parameters after one of ours must be bit for bit what they are after that, or after vLLM's own.
Prints a table and writes JSON.
"""

import argparse
import asyncio
import contextlib
import json
import multiprocessing
import os
import platform
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks.publication.sender import Remote, serve
from benchmarks.shapes import config_of
from demo.tokenizer import byte_tokenizer
from millrace.bench.layouts import TrainerSide, manifest
from millrace.bench.publication import SHARING
from millrace.bench.shapes import SHAPES, shape_of
from millrace.ids import MemberId
from millrace.local.devices import visible_devices
from millrace.local.ports import free_port
from millrace.spec import JobSpec, parse
from millrace.telemetry import logs
from millrace.weights.phases import PublicationId
from millrace.weights.plans import wire_layouts as wire
from millrace.weights.plans.boxes import Boxes
from millrace.weights.plans.gather_broadcast import gather_broadcast
from millrace.weights.transfer.channels.gloo import serve_store
from millrace.wire.v1 import rollout_pb2, weights_pb2
from services.rollout.engine import Sampling
from services.rollout.engines import create
from services.rollout.weights.receiver import PublicationReceiver

MODES = {
    "shadow": weights_pb2.COMMIT_MODE_SHADOW,
    "inplace": weights_pb2.COMMIT_MODE_INPLACE,
}
BASELINES = {"vllm-packed": True, "vllm-each": False}
BROADCAST = "broadcast"
REQUESTS, PROMPT, ANSWER = 16, 32, 64
LIMIT_S = 120.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=[n for n, s in SHAPES.items() if s.latent is None], default="tiny")
    parser.add_argument("--trainer", default="tp=1", help="as of millrace bench publication")
    parser.add_argument("--engine", choices=("vllm", "sglang", "transformers"), default="vllm")
    parser.add_argument("--engine-options", type=json.loads, default={}, help="as JSON")
    parser.add_argument("--share-gpus", action="store_true", help="the engine takes the ranks' too: not for timings")
    parser.add_argument("--modes", default="shadow,inplace", help=f"of {', '.join([*MODES, BROADCAST, *BASELINES])}")
    parser.add_argument("--repeats", type=int, default=10, help="timed ones of each mode, after one that is not")
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
        sys.exit("what we published differs from what was put in place by the other way")


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
            "model": {"path": str(folder)},
            "data": {"files": ["rows.jsonl"], "max_prompt_tokens": 2 * PROMPT},
            "reward": {"function": "exact", "workers": 1},
            "rollout": {"dtype": "bfloat16", "max_response_tokens": ANSWER, "engine_options": engine_options},
            "trainer": {"token_budget": 2 * PROMPT + ANSWER},
        }
    )


class Bench:
    """One engine, its receiver, and the trainer's ranks."""

    def __init__(self, options: argparse.Namespace, ranks: list[Remote]) -> None:
        self._ranks = ranks
        self.engine: Any = create(options.engine)
        self._receiver = PublicationReceiver(self.engine, MemberId("rollout-bench"), "keep", lambda _: None)
        self._manifest = manifest(shape_of(options.shape))
        self._attempts = 0
        self._tokens = 0
        self._key_joined = self._prepared = False

    async def agree(self) -> None:
        """Both sides tell what they hold and want, and the communicator gets its name."""
        senders = [Boxes.decode(told) for told in await self._all("layout")]
        began = time.perf_counter()
        receivers = await self.engine.describe(self._manifest)
        self.describe_s = time.perf_counter() - began
        self._sides = weights_pb2.Sides(senders=wire.encode(senders), receivers=wire.encode(receivers))
        self._world = len(senders) + len(receivers)
        self._store, self._port = serve_store("127.0.0.1", self._world, LIMIT_S)
        self._nccl_id = await self._of(0, "nccl_id")
        self.plan = wire.Planner().plan(self._manifest, self._sides)

    async def publish(self, version: int, mode: str) -> dict[str, float]:
        """All phases of one publication."""
        ref, began = self._next(version), time.perf_counter()
        request = rollout_pb2.PrepareReceiveRequest(
            publication=ref,
            manifest=None if self._prepared else self._manifest.to_proto(),
            path=weights_pb2.PATH_SHARDED,
            rendezvous=weights_pb2.Rendezvous(
                host="127.0.0.1",
                port=self._port,
                world_size=self._world,
                key="bench",
                standing=self._key_joined,
                nccl_id=self._nccl_id,
            ),
            sides=None if self._prepared else self._sides,
            plan_hash=self.plan.hash,
            mode=MODES[mode],
            receiver=weights_pb2.Receiver(first_rank=len(self._ranks), world_size=self.engine.world_size),
            deadline_s=LIMIT_S,
        )
        request = rollout_pb2.PrepareReceiveRequest.FromString(request.SerializeToString())

        async def prepare() -> list[bytes]:
            return await self._all("prepare", self._sides.SerializeToString())

        async def send(key: str) -> tuple[list[int], float]:
            sent = await self._all("send", self._port, self._world, self._nccl_id, key, LIMIT_S)
            sums = {content: value for told in sent for content, value in told["sums"].items()}
            return [sums[content] for content in range(len(self.plan.sizes))], max(told["transfer"] for told in sent)

        figures = await self._phases(began, request, prepare, send)
        self._prepared = self._key_joined = True
        return figures

    async def broadcast(self, version: int) -> dict[str, float]:
        """The same phases, by the path that is the oracle."""
        ref, world = self._next(version), 1 + self.engine.world_size
        _store, port = serve_store("127.0.0.1", world, LIMIT_S)
        plan_hash, began = gather_broadcast(self._manifest, world).hash, time.perf_counter()
        request = rollout_pb2.PrepareReceiveRequest(
            publication=ref,
            manifest=self._manifest.to_proto(),
            path=weights_pb2.PATH_GATHER_BROADCAST,
            rendezvous=weights_pb2.Rendezvous(host="127.0.0.1", port=port, world_size=world),
            plan_hash=plan_hash,
            receiver=weights_pb2.Receiver(first_rank=1, world_size=self.engine.world_size),
            deadline_s=LIMIT_S,
        )

        async def prepare() -> list[bytes]:
            return [plan_hash]

        async def send(key: str) -> tuple[list[int], float]:
            return await self._of(0, "broadcast", port, world, key, LIMIT_S), 0.0

        figures = await self._phases(began, request, prepare, send)
        self._prepared = False
        return figures

    def _next(self, version: int) -> weights_pb2.PublicationRef:
        self._attempts += 1
        return weights_pb2.PublicationRef(job_id="bench", version=version, epoch=1, attempt=self._attempts)

    async def _phases(
        self,
        began: float,
        request: rollout_pb2.PrepareReceiveRequest,
        prepare: Callable[[], Awaitable[list[bytes]]],
        send: Callable[[str], Awaitable[tuple[list[int], float]]],
    ) -> dict[str, float]:
        """From PREPARE to COMMIT. `prepare` and `send` are the senders' part: the plan's hashes; the checksums, and the
        seconds of the slowest."""
        publication = PublicationId.from_proto(request.publication)
        agreed, hashes = await asyncio.gather(self._receiver.prepare(request), prepare())
        assert set(hashes) == {agreed}, "the sides plan differently"
        prepared = time.perf_counter()
        await self._receiver.transfer(publication)
        sums, sent_s = await send(publication.key)
        transferred = time.perf_counter()
        await self._receiver.verify(publication, tuple(sums))
        verified = time.perf_counter()
        report = await self._receiver.commit(publication)
        ended = time.perf_counter()
        return {
            "whole": ended - began,
            "prepare": prepared - began,
            "transfer": transferred - prepared,
            "wire": max(report.wire_s, sent_s),
            "verify": verified - transferred,
            "commit": ended - verified,
            "pause": report.pause_s,
            "apply": report.apply_s,
            "loader_bytes": float(report.loader_bytes),
        }

    async def hold_whole(self) -> None:
        await self._of(0, "hold_whole")

    async def join_baseline(self) -> None:
        port = free_port()
        init = {"master_address": "127.0.0.1", "master_port": port, "rank_offset": 1}
        init["world_size"] = 1 + self.engine.world_size
        told = self.engine._llm.collective_rpc("init_weight_transfer_engine", kwargs={"init_info": init})
        await asyncio.gather(self._of(0, "join_baseline", port, init["world_size"]), told)

    async def baseline(self, packed: bool) -> dict[str, float]:
        """One of vLLM's own transfers, from rank 0, where every tensor lies whole."""
        tensors = self._manifest.tensors
        update = {
            "names": [t.name for t in tensors],
            "dtype_names": [t.dtype for t in tensors],
            "shapes": [list(t.shape) for t in tensors],
            "packed": packed,
        }
        llm = self.engine._llm
        began = time.perf_counter()
        await llm.pause_generation(mode="keep", clear_cache=False)
        paused = time.perf_counter()
        await llm.collective_rpc("start_weight_update")
        received = llm.collective_rpc("update_weights", kwargs={"update_info": update})
        wire_s, _ = await asyncio.gather(self._of(0, "send_baseline", packed), received)
        await llm.collective_rpc("finish_weight_update")
        written = time.perf_counter()
        await llm.resume_generation()
        ended = time.perf_counter()
        return {"whole": written - paused, "wire": wire_s, "pause": ended - began, "transfer": written - paused}

    async def by(self, mode: str, version: int) -> dict[str, float]:
        if mode in BASELINES:
            return await self.baseline(BASELINES[mode])
        return await (self.broadcast(version) if mode == BROADCAST else self.publish(version, mode))

    async def fill(self, version: int) -> None:
        await self._all("fill", version)

    async def checksums(self) -> list[dict[str, int]]:
        """Of every parameter of every worker."""
        checksums: list[dict[str, int]] = await self.engine.checksums()
        return checksums

    @contextlib.asynccontextmanager
    async def load(self) -> AsyncIterator[None]:
        """Requests run inside."""
        asked, answered = Sampling(max_response_tokens=ANSWER), asyncio.Event()

        async def ask(first: int) -> None:
            while True:
                prompt = [(first * 31 + i * 7) % 256 for i in range(PROMPT)]
                answer = await self.engine.generate(prompt, asked)
                self._tokens += len(answer.tokens)
                answered.set()

        tasks = [asyncio.create_task(ask(number)) for number in range(REQUESTS)]
        try:
            first = asyncio.create_task(answered.wait())
            # An engine's first answers may take long.
            done, _ = await asyncio.wait([first, *tasks], timeout=LIMIT_S, return_when=asyncio.FIRST_COMPLETED)
            for ended in done:
                ended.result()
            if not done:
                raise TimeoutError(f"the engine answered nothing within {LIMIT_S:g} s.")
            yield
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _of(self, rank: int, method: str, *arguments: Any) -> Any:
        return await asyncio.to_thread(self._ranks[rank].call, method, *arguments)

    async def _all(self, method: str, *arguments: Any) -> list[Any]:
        return list(await asyncio.gather(*(self._of(rank, method, *arguments) for rank in range(len(self._ranks)))))


def _gpus() -> int:
    """Without touching them: this process starts others that must not inherit a context."""
    import torch

    return torch.cuda.device_count()


async def measure(folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    senders = TrainerSide(shape_of(options.shape), options.trainer).ranks
    gpus = _gpus()
    modes = [mode for mode in options.modes.split(",") if mode]
    if unknown := set(modes) - MODES.keys() - BASELINES.keys() - {BROADCAST}:
        raise SystemExit(f"there is no mode {', '.join(sorted(unknown))}.")
    if gpus == 0 and set(modes) & BASELINES.keys():
        raise SystemExit("vLLM's own transfer needs GPUs.")
    context = multiprocessing.get_context("spawn")
    ranks, processes = [], []
    for rank in range(senders):
        ours, theirs = context.Pipe()
        device = f"cuda:{rank}" if gpus else "cpu"
        arguments = (theirs, options.shape, options.trainer, rank, device)
        processes.append(context.Process(target=serve, args=arguments, daemon=True))
        processes[-1].start()
        theirs.close()
        ranks.append(Remote(ours))
    if gpus:
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(visible_devices()[0 if options.share_gpus else senders :])
        if options.share_gpus:
            os.environ["NCCL_HOSTID"] = SHARING
    bench = Bench(options, ranks)
    try:
        began = time.perf_counter()
        await bench.engine.start(job(folder, options))
        print(f"the engine is up after {time.perf_counter() - began:.1f} s", flush=True)
        await bench.agree()
        return await rounds(bench, options, modes)
    finally:
        await bench.engine.stop()
        for process in processes:
            process.kill()


async def rounds(bench: Bench, options: argparse.Namespace, modes: list[str]) -> dict[str, Any]:
    found: dict[str, list[dict[str, float]]] = {mode: [] for mode in modes}
    oracles = [mode for mode in modes if mode not in MODES]
    if oracles:
        await bench.hold_whole()
    if set(modes) & BASELINES.keys():
        await bench.join_baseline()
    version = 1
    await bench.fill(version)
    await bench.publish(version, "shadow")
    async with bench.load():
        for mode in modes:
            for number in range(options.repeats + 1):
                version += 1
                if not number:  # the bytes may stay: they are not looked at before they are sent
                    await bench.fill(version)
                figures = await bench.by(mode, version)
                if number:
                    found[mode].append(figures)
            print(f"{mode}: {np.median([f['whole'] for f in found[mode]]):.4f} s", flush=True)
        began, before = time.perf_counter(), bench._tokens
        await asyncio.sleep(5.0)
        quiet = (bench._tokens - before) / (time.perf_counter() - began)
    return {
        **{k: str(v) if isinstance(v, Path) else v for k, v in vars(options).items()},
        "engine_release": bench.engine.release,
        "device": bench.engine.device,
        "workers": bench.engine.world_size,
        "python": platform.python_version(),
        "bytes": bench._manifest.bytes,
        "tensors": len(bench._manifest.tensors),
        "messages": len(bench.plan.hops),
        "describe_s": bench.describe_s,
        "tokens_per_s": quiet,
        "figures": {mode: _summary(figures) for mode, figures in found.items()},
        "as_the_oracle": await same(bench, version, oracles[0]) if oracles else None,
    }


async def same(bench: Bench, version: int, oracle: str) -> bool:
    """Whether a version lies in the engine after ours, bit for bit, as after the oracle."""
    await bench.fill(version + 1)
    await bench.by(oracle, version + 1)
    theirs = await bench.checksums()
    await bench.fill(version + 2)
    await bench.publish(version + 2, "shadow")
    other = await bench.checksums()
    await bench.fill(version + 1)
    await bench.publish(version + 3, "shadow")
    ours = await bench.checksums()
    kept = [name for name in theirs[0] if other[0][name] == theirs[0][name]]
    assert not kept, f"another version changed nothing in {kept[:5]}"
    return ours == theirs


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
        f"{result['describe_s']:.1f} s; {result['tokens_per_s']:.0f} tokens/s beside"
    )
    table = Table("seconds, p50 (p95)", *result["figures"])
    for name in ("whole", "prepare", "transfer", "wire", "verify", "commit", "apply", "pause"):
        cells = [figures.get(name) for figures in result["figures"].values()]
        table.add_row(name, *("" if cell is None else f"{cell['p50']:.4f} ({cell['p95']:.4f})" for cell in cells))
    console.print(table)
    if result["as_the_oracle"] is not None:
        console.print(f"bit for bit what is put in place by the other way: {result['as_the_oracle']}")


if __name__ == "__main__":
    main()
