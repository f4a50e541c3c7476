"""One rank of `millrace bench publication`: `python -m millrace.bench.rank JSON RANK PORT FOLDER`."""

import faulthandler
import json
import os
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch.distributed import TCPStore

from millrace.bench import broadcast
from millrace.bench.layouts import ReplicaLayout, TrainerLayout, manifest
from millrace.bench.values import fill, misplaced
from millrace.megatron.architectures.published import shape_of
from millrace.weights.plans.boxes import Boxes
from millrace.weights.plans.memory import Memory
from millrace.weights.plans.sharded import ShardedPlan, plan
from millrace.weights.transfer.channels.channel import Channel, ChannelMessage
from millrace.weights.transfer.channels.rendezvous import Rendezvous, join, nccl_id
from millrace.weights.transfer.pipeline import ReceivePipeline, SendPipeline

DUMP_BEFORE_LIMIT_S = 3.0
"""A rank writes its threads' stacks to its log this long before the run's limit."""
LINK_MESSAGES = 8
"""Messages in progress while the link is measured."""
BASELINE_REPEATS = 3
"""At most this many repeats of the baseline, which is slow."""


class Rank:
    """One rank of the benchmark: a sender, or a replica's worker."""

    def __init__(self, asked: dict[str, Any], rank: int, port: int) -> None:
        self._began = time.monotonic()
        self.asked, self.rank = asked, rank
        self.senders, self.world = asked["senders"], asked["senders"] + asked["workers"]
        gpu = rank % asked["gpus"] if asked["device"] == "cuda" else None
        self.device = torch.device("cpu") if gpu is None else torch.device("cuda", gpu)
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
        self._store: Any = TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=asked["limit_s"]))
        self._port = port
        self._barriers = 0

    @property
    def sends(self) -> bool:
        return self.rank < int(self.senders)

    def run(self) -> dict[str, Any]:
        memory = self._memory()
        self._say(f"{len(memory.manifest.tensors)} tensors are here in {len(memory.buffers)} buffers")
        made, planned = self._plan(memory)
        self._say(f"planned in {planned:.3f} s: {made.rounds} rounds")
        channel = self._join()
        self._say("joined")
        figures: dict[str, Any] = {"link_gbs": self._link(channel), "plan": self._plan_figures(made, memory, planned)}
        figures["modes"] = {}
        for mode in self.asked["modes"]:
            self._say(f"link {figures['link_gbs']:.1f} GB/s; {mode} begins")
            figures["modes"][mode] = self._mode(mode, made, memory, channel)
        self.barrier()
        channel.close()
        return figures

    def _say(self, what: str) -> None:
        """Writes to this rank's log, which is shown if the run fails."""
        print(f"{time.monotonic() - self._began:.1f} s: {what}", flush=True)

    def _memory(self) -> Memory:
        shape = shape_of(self.asked["shape"])
        published = manifest(shape)
        if self.sends:
            return TrainerLayout(shape, self.asked["trainer"]).memory(self.rank, published, self.device)
        side = ReplicaLayout(shape, self.asked["replica"])
        return side.memory((self.rank - self.senders) % side.ranks, published, self.device)

    def _plan(self, memory: Memory) -> tuple[ShardedPlan, float]:
        """Computes the plan from all ranks' layouts, and the seconds that takes; the ranks compare its hash."""
        self._store.set(f"layout/{self.rank}", memory.layout.boxes.encode())
        layouts = [Boxes.decode(self._store.get(f"layout/{rank}")) for rank in range(self.world)]
        began = time.perf_counter()
        made = plan(memory.manifest, layouts[: self.senders], layouts[self.senders :], self.asked["message_bytes"])
        planned = time.perf_counter() - began
        self._store.set(f"plan/{self.rank}", made.hash)
        assert {bytes(self._store.get(f"plan/{rank}")) for rank in range(self.world)} == {made.hash}
        return made, planned

    def _join(self) -> Channel:
        if self.rank == 0:
            self._store.set("identity", nccl_id(self.device.type == "cuda"))
        identity = bytes(self._store.get("identity"))
        rendezvous = Rendezvous(
            "127.0.0.1", self._port, "bench", self.rank, self.world, identity, self.device, self.asked["limit_s"]
        )
        channel = join(rendezvous, lambda: None)
        channel.deadline = self._began + self.asked["limit_s"]
        return channel

    def barrier(self) -> None:
        """Waits for all ranks. Through the store, so that no link is used."""
        self._barriers += 1
        key = f"barrier/{self._barriers}"
        if self._store.add(key, 1) == self.world:
            self._store.set(key + "/over", b"1")
        self._store.get(key + "/over")

    def _link(self, channel: Channel) -> float:
        """GB/s into this worker with large messages, each worker from a separate sender as long as there are enough. 0
        for ranks that receive nothing."""
        size = (1 << 30) if self.device.type == "cuda" else (1 << 23)
        data = torch.zeros(size, dtype=torch.uint8, device=self.device)
        count = min(self.senders, self.world - self.senders)
        best = 0.0
        for _ in range(3):
            self.barrier()
            began = time.perf_counter()
            for number in range(LINK_MESSAGES):
                if self.rank < count:
                    exchange = channel.exchange([ChannelMessage(number, self.senders + self.rank, data)], ())
                elif self.senders <= self.rank < self.senders + count:
                    exchange = channel.exchange((), [ChannelMessage(number, self.rank - self.senders, data)])
                else:
                    continue
            if self.rank < count or self.senders <= self.rank < self.senders + count:
                exchange.wait()
                best = max(best, LINK_MESSAGES * size / (time.perf_counter() - began) / 1e9)
        return best if not self.sends else 0.0

    def _plan_figures(self, made: ShardedPlan, memory: Memory, seconds: float) -> dict[str, Any]:
        return {
            "seconds": seconds,
            "hash": made.hash.hex()[:12],
            "tensors": len(memory.manifest.tensors),
            "bytes": memory.manifest.bytes,
            "pieces": len(made.pieces),
            "messages": len(made.hops),
            "rounds": made.rounds,
            "egress": int(made.egress().max()),
            "ingress": int(made.ingress().max()),
        }

    def _mode(self, mode: str, made: ShardedPlan, memory: Memory, channel: Channel) -> dict[str, Any]:
        if self.device.type == "cuda":
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
        steady = torch.cuda.memory_allocated() if self.device.type == "cuda" else 0
        publish, slot_bytes, received = self._publisher(mode, made, memory, channel)
        seconds: dict[str, list[float]] = {}
        wrong = peak = 0
        repeats = min(self.asked["repeats"], BASELINE_REPEATS) if mode == "broadcast" else self.asked["repeats"]
        for version in range(repeats + 1):
            if self.sends:
                fill(memory, version)
            if self.device.type == "cuda":
                torch.cuda.synchronize()
                torch.cuda.reset_peak_memory_stats()
            self.barrier()
            began = time.perf_counter()
            found = publish(version)
            found["whole"] = time.perf_counter() - began
            if self.device.type == "cuda":
                peak = max(peak, torch.cuda.max_memory_allocated() - steady)
            if version:
                for name, value in found.items():
                    seconds.setdefault(name, []).append(value)
            if not self.sends and version in (0, repeats):
                wrong += misplaced(memory, version)
        self.barrier()
        return {
            "seconds": seconds,
            "slot_bytes": slot_bytes,
            "received": received,
            "peak_bytes": peak,
            "misplaced": wrong,
        }

    def _publisher(
        self, mode: str, made: ShardedPlan, memory: Memory, channel: Channel
    ) -> tuple[Callable[[int], dict[str, float]], int, int]:
        """The function that runs one publication on this rank, the size of its slots, and the bytes that it
        receives."""
        if mode == "broadcast":
            received = 0 if self.sends else memory.manifest.bytes
            work = broadcast.Broadcast(memory, self.rank, self.senders, self.world, channel, self._layouts())
            return work.run, work.bytes, received
        if self.sends:
            sending = SendPipeline(made, self.rank, memory)
            return lambda version: self._send(sending, channel, f"{mode}/{version}"), sending.slot_bytes, 0
        receiving = ReceivePipeline(made, self.rank, memory, staged=mode == "shadow")
        run = self._receive
        return (
            lambda version: run(receiving, channel, f"{mode}/{version}", mode == "shadow"),
            receiving.slot_bytes,
            receiving.bytes,
        )

    def _layouts(self) -> list[Boxes]:
        return [Boxes.decode(self._store.get(f"layout/{rank}")) for rank in range(self.senders)]

    def _send(self, sending: SendPipeline, channel: Channel, key: str) -> dict[str, float]:
        sums, times = sending.run(channel)
        self._store.set(f"sums/{key}/{self.rank}", json.dumps({str(c): value for c, value in sums.items()}))
        spent = {"transfer": times.whole_s, "pack": times.pack_s, "sums": times.verify_s}
        return {**spent, "apply": 0.0, "compare": 0.0, "pause": 0.0}

    def _receive(self, receiving: ReceivePipeline, channel: Channel, key: str, staged: bool) -> dict[str, float]:
        """Checksums are compared before a staged version is put in place, as a replica does."""
        got = receiving.run(channel)
        sent: dict[str, int] = {}
        for rank in range(self.senders):
            sent |= json.loads(self._store.get(f"sums/{key}/{rank}"))
        assert all(sent[str(content)] == value for content, value in got.sums.items()), "a checksum differs"
        apply_s, compare_s = receiving.apply() if staged else (got.times.apply_s, 0.0)
        pause = apply_s + compare_s if staged else got.times.whole_s
        spent = {"transfer": got.times.whole_s, "pack": 0.0, "sums": got.times.verify_s}
        return {**spent, "apply": apply_s, "compare": compare_s, "pause": pause}


def main() -> None:
    asked, rank, port, folder = json.loads(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4])
    faulthandler.dump_traceback_later(max(1.0, asked["limit_s"] - DUMP_BEFORE_LIMIT_S))
    with torch.no_grad():
        figures = Rank(asked, rank, port).run()
    (folder / f"{rank}.json").write_text(json.dumps(figures))
    sys.stdout.flush()
    os._exit(0)  # without a teardown: threads inside libraries do not all survive one


if __name__ == "__main__":
    main()
