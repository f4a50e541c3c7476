"""Whole weights beside what changed in them, over a slow link or between two GPUs.

    python -m benchmarks.publication.delta --mbit 1000                # two network namespaces; needs root
    python -m benchmarks.publication.delta --shape qwen3-8b           # on a host with two GPUs: at full link speed
    python -m benchmarks.publication.delta --shape qwen3-8b --mbit 1000   # the same over sockets, each of that speed

One rank holds the bfloat16 weights of a published shape, one worker receives them in spare memory and puts them in
place. Between two publications AdamW takes its first step from random gradients, in float32, which changes every weight
by about the learning rate: later steps change less. Each version is sent three times: whole, as `publication.path:
sharded` sends it; against the version before; and against itself. A publication lasts from the order to both sides
until the version is compared in its place. At the end of each the checksums of all parameters are compared. Prints a
table and writes JSON; the status is not 0 where something was not exact.
"""

import argparse
import contextlib
import json
import os
import socket
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from benchmarks.publication.sender import RemoteRank, answer, remote
from benchmarks.shapes import cut
from millrace.bench.layouts import manifest
from millrace.bench.values import fill
from millrace.megatron.architectures.published import SHAPES, shape_of
from millrace.weights.plans.manifest import Manifest
from millrace.weights.plans.memory import Memory
from millrace.weights.plans.sharded import plan
from millrace.weights.transfer.channels.rendezvous import Rendezvous, join, nccl_id
from millrace.weights.transfer.checksum import checksum
from millrace.weights.transfer.delta.exchange import ReceivingDeltas, SendingDeltas, Snapshot
from millrace.weights.transfer.pipeline import ReceivePipeline, SendPipeline
from millrace.weights.transfer.store import serve_store
from tests.hosts.network import DEVICE, Host, Network
from tests.layouts import whole_layout

LIMIT_S = 300.0
PART = "side"
"""The part of a process that its pipe calls: each has one."""
SO_MAX_PACING_RATE = 47
"""The socket option of Linux for bytes/s; Python has no name for it."""
OVER_SOCKETS = {
    "NCCL_P2P_DISABLE": "1",
    "NCCL_SHM_DISABLE": "1",
    "NCCL_NET": "Socket",
    "NCCL_SOCKET_IFNAME": "lo",
    "NCCL_SOCKET_NTHREADS": "1",
    "NCCL_NSOCKS_PERTHREAD": "1",
    "NCCL_MAX_NCHANNELS": "1",
}
"""Environment with which NCCL sends all bytes from one GPU to another over one socket."""
WEIGHT_DECAY = 0.01


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=[n for n, s in SHAPES.items() if s.latent is None], default="qwen3-0.6b")
    parser.add_argument("--layers", type=int, default=8, help="of the shape; 0: all")
    parser.add_argument(
        "--mbit",
        type=float,
        default=0.0,
        help="speed of the link in Mbit/s; 0: as it is. Between two GPUs that of each socket",
    )
    parser.add_argument("--lr", default="1e-6,1e-5,1e-4", help="learning rates")
    parser.add_argument("--repeats", type=int, default=3, help="publications of each kind for each learning rate")
    parser.add_argument("--message-mb", type=int, default=128, help="MiB that a side sends in one round")
    parser.add_argument("--threads", type=int, default=1, help="of torch, for each side")
    parser.add_argument("--output", type=Path, help="write the figures there, as JSON")
    options = parser.parse_args()
    result = measure(options)
    if options.output:
        options.output.write_text(json.dumps(result, indent=1))
    show(result)
    sys.stdout.flush()
    if not result["exact"]:
        sys.exit("the receiver does not hold what was sent")


class Side:
    """One end of the publications, in its own process. Its methods are called by name over a pipe."""

    def __init__(self, rank: int, options: argparse.Namespace, device: torch.device) -> None:
        torch.set_num_threads(options.threads)
        shape = shape_of(options.shape)
        published: Manifest = manifest(cut(shape, options.layers))
        buffers = [torch.zeros(t.shape, dtype=torch.bfloat16, device=device) for t in published.tensors]
        self._memory = Memory(published, whole_layout(published), buffers)
        boxes = [self._memory.layout.boxes]
        self._plan = plan(published, boxes, boxes, options.message_mb << 20)
        self._rank, self._device = rank, device
        self._step = 0

    def start(self, host: str) -> dict[str, Any]:
        """Rank 0 serves the store; the other answers nothing of use."""
        if self._rank:
            return {}
        self._store, port = serve_store(host, 2, LIMIT_S)
        return {"port": port, "nccl_id": nccl_id(self._device.type == "cuda"), "bytes": self._memory.manifest.bytes}

    def connect(self, host: str, port: int, identity: bytes) -> None:
        rendezvous = Rendezvous(host, port, "bench", self._rank, 2, identity, self._device, LIMIT_S)
        self._channel = join(rendezvous, lambda: None)
        self._channel.deadline = time.monotonic() + 3600.0
        if self._rank:
            self._receiving = ReceivePipeline(self._plan, 1, self._memory, staged=True)
            return
        self._sending = SendPipeline(self._plan, 0, self._memory)
        self._snapshot = Snapshot(self._plan.hash, self._sending.packed, self._sending.device)
        fill(self._memory, 1)
        random = torch.Generator(self._device).manual_seed(0)
        for buffer in self._memory.buffers:  # near enough to trained weights: normal, 0.02
            buffer.copy_(torch.randn(buffer.shape, generator=random, device=self._device) * 0.02)
        self._master = [buffer.float() for buffer in self._memory.buffers]

    def pace(self, mbit: float) -> None:
        """Bounds how fast each TCP socket of this process sends from now on."""
        for entry in Path("/proc/self/fd").iterdir():
            with contextlib.suppress(OSError), socket.socket(fileno=os.dup(int(entry.name))) as end:
                if end.type == socket.SOCK_STREAM and end.family in (socket.AF_INET, socket.AF_INET6):
                    end.setsockopt(socket.SOL_SOCKET, SO_MAX_PACING_RATE, int(mbit * 1e6 / 8))

    def step(self, lr: float) -> None:
        """AdamW's first step, one tensor at a time."""
        self._step += 1
        random = torch.Generator(self._device).manual_seed(self._step)
        for master, buffer in zip(self._master, self._memory.buffers, strict=True):
            weight = torch.nn.Parameter(master)
            weight.grad = torch.randn(master.shape, generator=random, device=self._device)
            torch.optim.AdamW([weight], lr=lr, weight_decay=WEIGHT_DECAY).step()
            buffer.copy_(weight.detach())
            master.copy_(weight.detach())

    def publish(self, kind: str) -> dict[str, float]:
        """One version, by `kind`: whole, first (whole, and kept) or delta."""
        began = time.perf_counter()
        figures = self._send(kind) if self._rank == 0 else self._receive(kind)
        if self._device.type == "cuda":
            torch.cuda.synchronize()
        return figures | {"seconds": time.perf_counter() - began}

    def _send(self, kind: str) -> dict[str, float]:
        if kind == "whole":
            _, times = self._sending.run(self._channel)
            return {"pack": times.pack_s, "sum": times.verify_s, "sent": float(self._sending.bytes)}
        exchange = SendingDeltas(self._channel, self._snapshot, self._sending.stream, whole=kind == "first")
        _, times = self._sending.run(exchange)
        changed = exchange.changed_words / exchange.packed_words
        seconds = {"pack": times.pack_s, "sum": times.verify_s, "encode": exchange.encode_s}
        return seconds | {"sent": float(exchange.sent_bytes), "changed": changed}

    def _receive(self, kind: str) -> dict[str, float]:
        if kind == "whole":
            times, decode_s = self._receiving.run(self._channel).times, 0.0
        else:
            exchange = ReceivingDeltas(self._channel, self._receiving.stream)
            times = self._receiving.run(exchange, onto_base=kind == "delta").times
            decode_s = exchange.decode_s
        apply_s, compare_s = self._receiving.apply()
        seconds = {"base": times.apply_s, "decode": decode_s, "received_sum": times.verify_s}
        return seconds | {"apply": apply_s, "compare": compare_s}

    def checksums(self) -> list[int]:
        return [checksum(buffer) for buffer in self._memory.buffers]


def serve(pipe: Connection, rank: int, options: argparse.Namespace, host: Host | None) -> None:
    """Runs in the process of a side, on `host` of a network. Ends with the pipe."""
    if host is not None:
        host.enter()
        os.environ["GLOO_SOCKET_IFNAME"] = DEVICE  # the host's name has no address
    device = torch.device(f"cuda:{rank}" if torch.cuda.is_available() else "cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
        if options.mbit:
            os.environ.update(OVER_SOCKETS)
    answer(pipe, {PART: Side(rank, options, device)})


class Sides:
    """Both processes, the sender first."""

    def __init__(self, sides: Sequence[RemoteRank], address: str) -> None:
        self._sides = sides
        self._threads = ThreadPoolExecutor(len(sides))
        began, _ = self.both("start", address)
        self.bytes = began["bytes"]
        self.both("connect", address, began["port"], began["nccl_id"])

    def both(self, method: str, *arguments: Any) -> list[Any]:
        return list(self._threads.map(lambda side: side.call(PART, method, *arguments, limit_s=LIMIT_S), self._sides))

    def step(self, lr: float) -> None:
        self._sides[0].call(PART, "step", lr, limit_s=LIMIT_S)

    def publish(self, kind: str) -> dict[str, float]:
        sent, received = self.both("publish", kind)
        slower = max(sent.pop("seconds"), received.pop("seconds"))
        figures: dict[str, float] = sent | received | {"seconds": slower}
        return figures

    def exact(self) -> bool:
        ours, theirs = self.both("checksums")
        return bool(ours == theirs)


@contextlib.contextmanager
def started(options: argparse.Namespace, network: Network | None) -> Iterator[Sides]:
    hosts = [network[name] if network else None for name in ("trainer", "replica")]
    with contextlib.ExitStack() as held:
        sides = [held.enter_context(remote(serve, rank, options, host)) for rank, host in enumerate(hosts)]
        yield Sides(sides, hosts[0].address if hosts[0] else "127.0.0.1")


@contextlib.contextmanager
def network_of(options: argparse.Namespace) -> Iterator[Network | None]:
    """Two hosts with a slow link between them; None for a link as it is, and between GPUs."""
    if not options.mbit or torch.cuda.is_available():
        yield None
        return
    with Network(["trainer", "replica"]) as network:
        network.throttle("replica", options.mbit)
        yield network


def measure(options: argparse.Namespace) -> dict[str, Any]:
    with network_of(options) as network, started(options, network) as sides:
        sides.publish("first")
        if options.mbit and network is None:
            sides.both("pace", options.mbit)
        exact, rows = sides.exact(), {}
        for lr in [float(part) for part in options.lr.split(",")]:
            found: dict[str, list[dict[str, float]]] = {"whole": [], "delta": [], "nothing": []}
            for _ in range(options.repeats):
                sides.step(lr)
                found["delta"].append(sides.publish("delta"))
                exact = exact and sides.exact()
                found["nothing"].append(sides.publish("delta"))
                found["whole"].append(sides.publish("whole"))
                exact = exact and sides.exact()
            rows[f"{lr:g}"] = {kind: _medians(figures) for kind, figures in found.items()}
            print(json.dumps({"lr": lr, **rows[f"{lr:g}"]}), flush=True)
    settings = {k: str(v) if isinstance(v, Path) else v for k, v in vars(options).items()}
    return settings | {"bytes": sides.bytes, "gpu": torch.cuda.is_available(), "exact": exact, "rows": rows}


def _medians(figures: list[dict[str, float]]) -> dict[str, float]:
    return {name: float(np.median([f[name] for f in figures])) for name in figures[0]}


def show(result: dict[str, Any]) -> None:
    link = f"{result['mbit']:g} Mbit/s" if result["mbit"] else "the link as it is"
    place = "GPUs" if result["gpu"] else f"CPU, {result['threads']} threads a side"
    console = Console(width=160)
    console.print(f"{result['shape']}, {result['bytes'] / 1e9:.3f} GB in bfloat16, {link}, {place}")
    table = Table(
        "lr", "changed", "whole, s", "delta, s", "times", "nothing changed, s", "MB whole", "MB delta", "encode, s"
    )
    table.add_column("base + decode, s")
    for lr, row in result["rows"].items():
        whole, delta = row["whole"], row["delta"]
        table.add_row(
            lr,
            f"{delta['changed']:.2%}",
            f"{whole['seconds']:.3f}",
            f"{delta['seconds']:.3f}",
            f"{whole['seconds'] / delta['seconds']:.1f}",
            f"{row['nothing']['seconds']:.3f}",
            f"{whole['sent'] / 1e6:.1f}",
            f"{delta['sent'] / 1e6:.1f}",
            f"{delta['encode']:.3f}",
            f"{delta['base'] + delta['decode']:.3f}",
        )
    console.print(table)
    console.print(f"exact: {result['exact']}")


if __name__ == "__main__":
    main()
