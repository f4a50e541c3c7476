"""A trainer's rank in its own process: holds random weights of a shape and sends them when it is told to."""

import contextlib
import multiprocessing
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from importlib import import_module
from multiprocessing.connection import Connection
from typing import Any

import torch

from millrace.bench.layouts import TrainerLayout, manifest
from millrace.bench.values import fill
from millrace.contracts.v1 import weights_pb2
from millrace.megatron.architectures.published import shape_of
from millrace.weights.plans import wire_layouts
from millrace.weights.plans.manifest import Content, Manifest
from millrace.weights.plans.memory import Memory
from millrace.weights.transfer.channels.gloo import GlooChannel
from millrace.weights.transfer.channels.rendezvous import Rendezvous, nccl_id
from millrace.weights.transfer.checksum import checksum
from millrace.weights.transfer.pipeline import SendPipeline
from millrace.weights.transfer.session import PublicationSession
from tests.layouts import whole_layout

MODEL, ADAPTER = "model", "adapter"
"""The parts that a rank sends."""


class Rank:
    """One rank, and what it holds of one manifest. Its methods are called by name from the other end of a pipe."""

    def __init__(self, published: Manifest, layout: TrainerLayout, rank: int, device: torch.device) -> None:
        self._device = device
        self._rank = rank
        self._manifest = published
        self._memory = layout.memory(rank, published, device)
        self._whole: Memory | None = None
        self._planner = wire_layouts.Planner()
        self._session = PublicationSession()
        self._sending: tuple[bytes, SendPipeline] | None = None
        self._group: Any = None

    def layout(self) -> bytes:
        return self._memory.layout.boxes.encode()

    def nccl_id(self) -> bytes:
        return nccl_id(self._device.type == "cuda")

    def fill(self, version: int) -> None:
        for memory in (self._memory, self._whole):
            if memory is not None:
                fill(memory, version)
        self._synchronize()

    def prepare(self, sides: bytes, content: int) -> bytes:
        """The plan's hash."""
        published = replace(self._manifest, content=Content(content))
        plan = self._planner.plan(published, weights_pb2.Sides.FromString(sides))
        if self._sending is None or self._sending[0] != plan.hash:
            self._sending = (plan.hash, SendPipeline(plan, self._rank, self._memory))
        return plan.hash

    def send(
        self, port: int, communicator: str, world_size: int, nccl_id: bytes, key: str, limit_s: float
    ) -> dict[str, Any]:
        """Sends a version; the first time it joins the communicator."""
        assert self._sending is not None
        rendezvous = Rendezvous("127.0.0.1", port, communicator, self._rank, world_size, nccl_id, self._device, limit_s)
        self._session.begin()
        sums, times = self._session.run(rendezvous, key, time.monotonic() + limit_s, self._sending[1].run)
        return {"sums": dict(sums), "transfer": times.whole_s, "pack": times.pack_s, "verify": times.verify_s}

    def hold_whole(self) -> None:
        """Holds every tensor whole too, as a single sender would."""
        if self._whole is None:
            buffers = [torch.empty(t.shape, dtype=torch.bfloat16, device=self._device) for t in self._manifest.tensors]
            self._whole = Memory(self._manifest, whole_layout(self._manifest), buffers)

    def broadcast(self, port: int, world_size: int, key: str, limit_s: float) -> list[int]:
        """Sends every tensor whole, as gather-and-broadcast does, the oracle of the other path; their checksums."""
        assert self._whole is not None
        channel = GlooChannel.join("127.0.0.1", port, key=key, rank=0, world_size=world_size, timeout_s=limit_s)
        sums = []
        for buffer in self._whole.buffers:
            tensor = buffer.cpu()
            sums.append(checksum(tensor))
            channel.broadcast(tensor)
        channel.close()
        return sums

    def join_baseline(self, port: int, world_size: int) -> None:
        """Joins vLLM's own transfer: one sender that holds every tensor whole."""
        init = {"master_address": "127.0.0.1", "master_port": port, "world_size": world_size}
        self._group = _vllm_transfer().trainer_init(init)

    def send_baseline(self, packed: bool) -> float:
        assert self._whole is not None
        began = time.perf_counter()
        tensors = zip((t.name for t in self._manifest.tensors), self._whole.buffers, strict=True)
        _vllm_transfer().trainer_send_weights(tensors, {"group": self._group, "packed": packed})
        self._synchronize()
        return time.perf_counter() - began

    def _synchronize(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize()


def _vllm_transfer() -> Any:
    """vLLM's own class for weight transfers; its methods differ from release to release."""
    return import_module("vllm.distributed.weight_transfer.nccl_engine").NCCLWeightTransferEngine


def serve(pipe: Connection, shape: str, trainer: str, rank: int, device: str, adapter: bytes) -> None:
    """Runs in the process: answers (part, method, arguments) with (result, "") or (None, traceback). Ends with the
    pipe. `adapter` is the manifest of an adapter that the ranks hold besides the model, split by rows; empty for
    none."""
    on = torch.device(device)
    if on.type == "cuda":
        torch.cuda.set_device(on)
    layout = TrainerLayout(shape_of(shape), trainer)
    served = {MODEL: Rank(manifest(layout.shape), layout, rank, on)}
    if adapter:
        published = Manifest.from_proto(weights_pb2.Manifest.FromString(adapter))
        served[ADAPTER] = Rank(published, TrainerLayout(layout.shape, f"fsdp={layout.ranks}"), rank, on)
    answer(pipe, served)


def answer(pipe: Connection, served: Mapping[str, Any]) -> None:
    """Answers the calls of a `RemoteRank` with the methods of `served`, until the pipe ends."""
    with torch.no_grad():
        while True:
            try:
                part, method, arguments = pipe.recv()
            except EOFError:
                return
            try:
                pipe.send((getattr(served[part], method)(*arguments), ""))
            except Exception:
                pipe.send((None, traceback.format_exc()))


class RemoteRank:
    """The other end of a rank's pipe. It makes one call at a time."""

    def __init__(self, pipe: Connection) -> None:
        self._pipe = pipe
        self._lock = threading.Lock()

    def call(self, part: str, method: str, *arguments: Any, limit_s: float = 120.0) -> Any:
        """Blocks. Raises RuntimeError with the traceback of the rank, TimeoutError past the limit."""
        with self._lock:
            self._pipe.send((part, method, arguments))
            if not self._pipe.poll(limit_s):
                raise TimeoutError(f"a trainer's rank did not answer {method} within {limit_s:g} s.")
            result, failure = self._pipe.recv()
        if failure:
            raise RuntimeError(failure)
        return result


@contextlib.contextmanager
def remote(serve: Callable[..., None], *arguments: Any) -> Iterator[RemoteRank]:
    """A process that runs `serve(pipe, *arguments)`, which answers calls. It is killed at the end of the block."""
    context = multiprocessing.get_context("spawn")
    near, far = context.Pipe()
    process = context.Process(target=serve, args=(far, *arguments), daemon=True)
    process.start()
    far.close()
    try:
        yield RemoteRank(near)
    finally:
        process.kill()
        process.join()
