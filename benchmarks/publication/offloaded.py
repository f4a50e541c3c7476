"""Publications of an FSDP2 trainer whose weights are on its GPU, and of one with `offload_parameters`: the seconds, and
the memory of both ends.

    python -m benchmarks.publication.offloaded --shape qwen3-8b --layers 12

Random weights of a published shape, cut in layers, in the real backend on one GPU; its sender publishes to one receiver
that wants every tensor whole. The receiver has the second GPU. With one GPU both share it, and NCCL sends over sockets:
then only the seconds of packing say something about the trainer. `gathered` is the path that gathers every tensor and
broadcasts it over Gloo, into host memory of the receiver. After each case the receiver must hold the same bytes. On a
host without a GPU everything runs on the CPU over Gloo, to try the program. Prints a table; `--output` writes JSON.
"""

import argparse
import contextlib
import json
import os
import tempfile
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch
from rich.console import Console
from rich.table import Table

from benchmarks.publication.sender import RemoteRank, answer, remote
from benchmarks.shapes import config_of, cut, trainer_spec
from benchmarks.training import draw_fsdp2_weights
from millrace.bench.publication import SHARING
from millrace.contracts.v1 import trainer_pb2 as pb
from millrace.contracts.v1 import weights_pb2
from millrace.ids import Version
from millrace.megatron.architectures.published import SHAPES, shape_of
from millrace.weights.phases import PublicationId
from millrace.weights.plans import wire_layouts
from millrace.weights.plans.manifest import Manifest
from millrace.weights.plans.memory import Memory
from millrace.weights.transfer.channels.gloo import GlooChannel
from millrace.weights.transfer.channels.rendezvous import Rendezvous
from millrace.weights.transfer.checksum import checksum
from millrace.weights.transfer.pipeline import ReceivePipeline
from millrace.weights.transfer.session import PublicationSession
from services.trainer.backends import build
from services.trainer.publication.sender import Sender
from services.trainer.ranks.world import World
from tests.layouts import whole_layout
from tests.peak_memory import Peak

LIMIT_S = 120.0
MIB = 1 << 20
PART = "it"
"""The part of a process that its pipe calls: each has one."""


@dataclass(frozen=True)
class Case:
    """How the trainer keeps its weights, and how it sends them."""

    offload: bool
    path: weights_pb2.Path


CASES = {
    "on the GPU": Case(False, weights_pb2.PATH_SHARDED),
    "offloaded": Case(True, weights_pb2.PATH_SHARDED),
    "offloaded, gathered": Case(True, weights_pb2.PATH_GATHER_BROADCAST),
}


class Watch:
    """Memory of this process while something runs, above what it had before."""

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self.figures: dict[str, float] = {}

    @contextlib.contextmanager
    def during(self) -> Iterator[None]:
        host, device = Peak(), 0
        if self._on_gpu:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            device = torch.cuda.memory_allocated()
        try:
            yield
        finally:
            reached = torch.cuda.max_memory_allocated() if self._on_gpu else 0
            self.figures = {"host": host.grown / MIB, "device": (reached - device) / MIB}

    def at_rest(self) -> dict[str, float]:
        """What the process holds. Pinned memory is what torch's allocator has taken, which rounds up."""
        figures = {"rss": psutil.Process().memory_info().rss / MIB, "device": 0.0, "pinned": 0.0}
        if self._on_gpu:
            torch.cuda.synchronize()
            figures["device"] = torch.cuda.memory_allocated() / MIB
            figures["pinned"] = torch.cuda.host_memory_stats().get("allocated_bytes.current", 0) / MIB
        return figures


class Trainer:
    """The only rank of a trainer, without its service."""

    def __init__(self, folder: str, offload: bool, lora: int | None) -> None:
        draw_fsdp2_weights()
        torch.manual_seed(0)
        self._world = World.join()
        on_gpu = self._world.device.type == "cuda"
        spec = trainer_spec(
            Path(folder),
            lora={"rank": lora, "alpha": lora, "merge": True} if lora else None,
            dtype="bfloat16" if on_gpu else "float32",
            token_budget=4096,
            backend_options={"offload_parameters": offload, "compile_layers": False},
        )
        self._backend = build(spec, self._world.device)
        self._sender = Sender(0, "trainer-bench")
        self._watch = Watch(self._world.device)

    def describe(self) -> bytes:
        description = self._sender.describe(pb.DescribeSendRequest(dtype="bfloat16"), self._backend)
        return description.SerializeToString()

    def prepare(self, request: bytes) -> bytes:
        asked = pb.PrepareSendRequest.FromString(request)
        return self._sender.prepare_send(asked, self._backend, Version(asked.publication.version)).SerializeToString()

    def transfer(self, ref: bytes) -> tuple[bytes, dict[str, float]]:
        request = pb.TransferSendRequest(publication=weights_pb2.PublicationRef.FromString(ref))
        with self._watch.during():
            sent = self._sender.transfer(request, self._backend, Version(request.publication.version))
        return sent.SerializeToString(), self._watch.figures

    def finish(self) -> None:
        self._sender.finish(failed=False)

    def at_rest(self) -> dict[str, float]:
        return self._watch.at_rest()


class Receiver:
    """One worker that holds every tensor whole, in the second GPU's memory if there is one."""

    def __init__(self, manifest: bytes) -> None:
        gpus = torch.cuda.device_count()
        self._device = torch.device("cuda", int(gpus > 1)) if gpus else torch.device("cpu")
        if gpus:
            torch.cuda.set_device(self._device)
        self._manifest = Manifest.from_proto(weights_pb2.Manifest.FromString(manifest))
        buffers = [
            torch.zeros(t.shape, dtype=getattr(torch, t.dtype), device=self._device) for t in self._manifest.tensors
        ]
        self._memory = Memory(self._manifest, whole_layout(self._manifest), buffers)
        self._session = PublicationSession()
        self._pipeline: ReceivePipeline | None = None
        self._watch = Watch(self._device)

    def layout(self) -> bytes:
        return wire_layouts.encode([self._memory.layout.boxes]).SerializeToString()

    def receive(self, sides: bytes, ref: bytes, prepared: bytes) -> tuple[dict[int, int], dict[str, float]]:
        """Receives by the sharded path into spare memory. The checksum of each message, and the memory that it took."""
        at, key = pb.PrepareSendResponse.FromString(prepared).rendezvous, _key(ref)
        plan = wire_layouts.Planner().plan(self._manifest, weights_pb2.Sides.FromString(sides))
        with self._watch.during():
            self._pipeline = self._pipeline or ReceivePipeline(plan, 1, self._memory, staged=True)
            self._session.begin()
            where = Rendezvous.of_rank(at, 1, self._device, LIMIT_S)
            got = self._session.run(where, key, time.monotonic() + LIMIT_S, self._pipeline.run)
        return dict(got.sums), self._watch.figures

    def apply(self) -> None:
        assert self._pipeline is not None
        self._pipeline.apply()

    def gather(self, ref: bytes, prepared: bytes) -> tuple[list[int], dict[str, float]]:
        """Receives as an engine's worker does whose tensors come whole: into host memory, then into the parameters."""
        at, sums, whole = pb.PrepareSendResponse.FromString(prepared).rendezvous, [], []
        with self._watch.during():
            channel = GlooChannel.join(
                at.host, at.port, key=_key(ref), rank=1, world_size=at.world_size, timeout_s=LIMIT_S
            )
            for info in self._manifest.tensors:
                whole.append(torch.empty(info.shape, dtype=getattr(torch, info.dtype)))
                channel.broadcast(whole[-1])
                sums.append(checksum(whole[-1]))
            for buffer, tensor in zip(self._memory.buffers, whole, strict=True):
                buffer.copy_(tensor)
            channel.close()
        return sums, self._watch.figures

    def held(self) -> list[int]:
        """The checksum of each tensor, after which it is zero."""
        sums = [checksum(buffer) for buffer in self._memory.buffers]
        for buffer in self._memory.buffers:
            buffer.zero_()
        return sums


def _key(ref: bytes) -> str:
    return PublicationId.from_proto(weights_pb2.PublicationRef.FromString(ref)).key


def serve(pipe: Connection, kind: type[Trainer] | type[Receiver], host: str, *arguments: Any) -> None:
    """Runs in the process. `host`: its name for NCCL, empty for the true one."""
    os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
    # Both processes are on this host. By itself Gloo takes the address of the host's name, which may not be reachable.
    os.environ |= {"MILLRACE_HOST": "127.0.0.1", "GLOO_SOCKET_IFNAME": "lo"}
    if host:
        os.environ["NCCL_HOSTID"] = host
    torch.set_grad_enabled(False)
    answer(pipe, {PART: kind(*arguments)})


def measured(case: Case, folder: str, options: argparse.Namespace) -> dict[str, Any]:
    """Publications by one case: medians of the seconds, memory in MiB, and what the receiver holds at the end."""
    shared = "" if torch.cuda.device_count() != 1 else f"{SHARING}-1"
    with remote(serve, Trainer, "", folder, case.offload, options.lora) as trainer:
        description = pb.DescribeSendResponse.FromString(trainer.call(PART, "describe", limit_s=LIMIT_S))
        assert description.layouts.of_rank, (
            "the trainer's memory is not described in boxes: nothing can be sent by shards"
        )
        with remote(serve, Receiver, shared, description.manifest.SerializeToString()) as receiver:
            sides = weights_pb2.Sides(senders=description.layouts)
            sides.receivers.MergeFromString(receiver.call(PART, "layout", limit_s=LIMIT_S))
            rest = trainer.call(PART, "at_rest")
            runs = [
                publication(number, case, description.gpu, sides, trainer, receiver)
                for number in range(options.repeats + 1)
            ]
            held = receiver.call(PART, "held")
    figures = {name: float(np.median([run[name] for run in runs[1:]])) for name in runs[0]}
    return {"at_rest": rest, "figures": figures, "held": held, "bytes": Manifest.from_proto(description.manifest).bytes}


def publication(
    number: int, case: Case, gpu: bool, sides: weights_pb2.Sides, trainer: RemoteRank, receiver: RemoteRank
) -> dict[str, float]:
    """One publication through all its phases. Seconds; MiB that the transfer took on both ends."""
    ref = weights_pb2.PublicationRef(job_id="bench", version=number, epoch=1)
    gathered = case.path == weights_pb2.PATH_GATHER_BROADCAST
    request = pb.PrepareSendRequest(
        publication=ref,
        path=case.path,
        receivers=[weights_pb2.Receiver(member_id="receiver", first_rank=1, world_size=1)],
        dtype="bfloat16",
        deadline_s=LIMIT_S,
        sides=None if gathered else sides,
        gpu=gpu and not gathered,
    )
    named, began = ref.SerializeToString(), time.perf_counter()
    prepared = trainer.call(PART, "prepare", request.SerializeToString(), limit_s=LIMIT_S)
    arguments = ("gather", named, prepared) if gathered else ("receive", sides.SerializeToString(), named, prepared)
    with ThreadPoolExecutor(1) as threads:
        receiving = threads.submit(lambda: receiver.call(PART, *arguments, limit_s=LIMIT_S))
        answered, taken = trainer.call(PART, "transfer", named, limit_s=LIMIT_S)
        got, taken_there = receiving.result()
    sent = pb.TransferSendResponse.FromString(answered)
    sums = dict(enumerate(sent.checksums.values))
    assert all(sums[content] == value for content, value in (enumerate(got) if gathered else got.items()))
    if not gathered:
        receiver.call(PART, "apply")
    seconds = time.perf_counter() - began
    trainer.call(PART, "finish")
    report = sent.report
    return {
        "publication s": seconds,
        "gather or pack s": report.gather_s,
        "wire s": report.wire_s,
        "checksums s": report.verify_s,
        "trainer, host MiB": taken["host"],
        "trainer, GPU MiB": taken["device"],
        "receiver, host MiB": taken_there["host"],
        "receiver, GPU MiB": taken_there["device"],
    }


def show(found: Mapping[str, Mapping[str, Any]]) -> None:
    table = Table("", *found)
    rows = [each["at_rest"] for each in found.values()]
    for name, title in (("rss", "resident"), ("pinned", "pinned host memory"), ("device", "GPU memory")):
        table.add_row(f"trainer at rest: {title}, MiB", *(f"{row[name]:,.0f}" for row in rows))
    for name in next(iter(found.values()))["figures"]:
        values = [each["figures"][name] for each in found.values()]
        table.add_row(name, *(f"{value:.3f}" if name.endswith(" s") else f"{value:,.0f}" for value in values))
    Console().print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=[n for n, s in SHAPES.items() if s.latent is None], default="tiny")
    parser.add_argument("--layers", type=int, help="fewer layers than the shape has")
    parser.add_argument("--lora", type=int, metavar="RANK", help="publish the weights merged with an adapter")
    parser.add_argument("--repeats", type=int, default=5, help="timed publications, after one that is not timed")
    parser.add_argument("--only", default="", help=f"with semicolons between: {'; '.join(CASES)}")
    parser.add_argument("--output", type=Path, help="write the figures there, as JSON")
    options = parser.parse_args()
    shape = cut(shape_of(options.shape), options.layers)
    chosen = {name: case for name, case in CASES.items() if not options.only or name in options.only.split(";")}
    found = {}
    with tempfile.TemporaryDirectory(prefix="millrace-bench-") as folder:
        Path(folder, "config.json").write_text(json.dumps(config_of(shape)))
        for name, case in chosen.items():
            found[name] = measured(case, folder, options)
            print(f"{name}: {found[name]['figures']['publication s']:.3f} s", flush=True)
    alike = len({tuple(each.pop("held")) for each in found.values()}) == 1
    show(found)
    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    asked = {**vars(options), "output": None, "layers": shape.layers}
    print(f"the receiver held the same bytes after each case: {alike}; {gpus or 'CPU'}")
    if options.output is not None:
        options.output.write_text(json.dumps({**asked, "gpus": gpus, "alike": alike, "cases": found}, indent=1))
    if not alike:
        raise SystemExit("the receiver held other bytes after one case than after another")


if __name__ == "__main__":
    main()
