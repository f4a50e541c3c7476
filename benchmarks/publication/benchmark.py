"""One engine, its receiver and the trainer's ranks: publications by each mode, while requests run."""

import argparse
import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, replace
from typing import Any

from benchmarks.publication.sender import ADAPTER, MODEL, RemoteRank
from millrace.contracts.v1 import rollout_pb2, weights_pb2
from millrace.ids import MemberId
from millrace.local.ports import free_port
from millrace.weights.phases import PublicationId
from millrace.weights.plans import wire_layouts
from millrace.weights.plans.boxes import Boxes
from millrace.weights.plans.gather_broadcast import gather_broadcast
from millrace.weights.plans.manifest import Content, Manifest
from millrace.weights.plans.sharded import ShardedPlan
from millrace.weights.transfer.store import serve_store
from services.rollout.engine import Sampling
from services.rollout.engines import create
from services.rollout.weights.receiver import PublicationReceiver

MODES = {
    "shadow": weights_pb2.COMMIT_MODE_SHADOW,
    "inplace": weights_pb2.COMMIT_MODE_INPLACE,
}
BASELINES = {"vllm-packed": True, "vllm-each": False}
BROADCAST = "broadcast"
PARTS = {Content.MODEL: MODEL, Content.BASE: MODEL, Content.ADAPTER: ADAPTER}
"""The part of the trainer's ranks that each content is sent from."""
REQUESTS, PROMPT, ANSWER = 16, 32, 64
LIMIT_S = 120.0


@dataclass
class Agreed:
    """What the trainer's ranks and the engine's workers agreed on for the publications of one content."""

    manifest: Manifest
    sides: weights_pb2.Sides
    plan: ShardedPlan
    store: Any
    port: int
    nccl_id: bytes
    known: bool = False
    """The receiver knows the plan."""
    joined: bool = False
    """All are in the communicator."""


class PublicationBenchmark:
    """One engine, its receiver, and the trainer's ranks."""

    def __init__(self, options: argparse.Namespace, ranks: list[RemoteRank]) -> None:
        self._ranks = ranks
        self.engine: Any = create(options.engine)
        self._receiver = PublicationReceiver(self.engine, MemberId("rollout-bench"), "keep", lambda _: None)
        self._attempts = 0
        self._tokens = 0
        self._content = Content.MODEL
        self.agreed: Agreed

    async def agree(self, published: Manifest) -> None:
        """From now on this is published. Computes the plan from the layouts of both sides, and makes the store of the
        communicator."""
        self._content = published.content
        senders = [Boxes.decode(layout) for layout in await self._all("layout")]
        began = time.perf_counter()
        receivers = await self.engine.describe(published)
        self.describe_s = time.perf_counter() - began
        sides = weights_pb2.Sides(senders=wire_layouts.encode(senders), receivers=wire_layouts.encode(receivers))
        plan = wire_layouts.Planner().plan(published, sides)
        store, port = serve_store("127.0.0.1", plan.world_size, LIMIT_S)
        self.agreed = Agreed(published, sides, plan, store, port, await self._of(0, "nccl_id"))

    async def add_adapter(self, adapter: Manifest, version: int) -> None:
        """The engine gets the model as the base of an adapter, and from now on the adapter is published."""
        await self.agree(replace(self.agreed.manifest, content=Content.BASE))
        await self.publish(version, "inplace")
        await self.agree(adapter)
        await self.fill(version + 1)
        await self.publish(version + 1, "inplace")

    async def publish(self, version: int, mode: str) -> dict[str, float]:
        """All phases of one sharded publication; seconds by phase."""
        ref, began, agreed = self._next(version), time.perf_counter(), self.agreed
        world, communicator = agreed.plan.world_size, f"bench-{agreed.manifest.content.name}"
        request = rollout_pb2.PrepareReceiveRequest(
            publication=ref,
            manifest=None if agreed.known else agreed.manifest.to_proto(),
            path=weights_pb2.PATH_SHARDED,
            rendezvous=weights_pb2.Rendezvous(
                host="127.0.0.1",
                port=agreed.port,
                world_size=world,
                key=communicator,
                standing=agreed.joined,
                nccl_id=agreed.nccl_id,
            ),
            sides=None if agreed.known else agreed.sides,
            plan_hash=agreed.plan.hash,
            mode=MODES[mode],
            receiver=weights_pb2.Receiver(first_rank=len(self._ranks), world_size=self.engine.world_size),
            deadline_s=LIMIT_S,
        )
        request = rollout_pb2.PrepareReceiveRequest.FromString(request.SerializeToString())

        async def prepare() -> list[bytes]:
            content = agreed.manifest.content.value
            return await self._all("prepare", agreed.sides.SerializeToString(), content)

        async def send(key: str) -> tuple[list[int], float]:
            sent = await self._all("send", agreed.port, communicator, world, agreed.nccl_id, key, LIMIT_S)
            sums = {content: value for answer in sent for content, value in answer["sums"].items()}
            return [sums[content] for content in range(len(agreed.plan.sizes))], max(
                answer["transfer"] for answer in sent
            )

        figures = await self._phases(began, request, prepare, send)
        agreed.known = agreed.joined = True
        return figures

    async def broadcast(self, version: int) -> dict[str, float]:
        """The same phases by gather-and-broadcast, the oracle."""
        ref, world = self._next(version), 1 + self.engine.world_size
        _store, port = serve_store("127.0.0.1", world, LIMIT_S)
        plan_hash, began = gather_broadcast(self.agreed.manifest, world).hash, time.perf_counter()
        request = rollout_pb2.PrepareReceiveRequest(
            publication=ref,
            manifest=self.agreed.manifest.to_proto(),
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
        self.agreed.known = False
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
        """From PREPARE to COMMIT. `prepare` and `send` are the senders' part: they return the plan's hashes, and the
        checksums with the seconds of the slowest sender."""
        publication = PublicationId.from_proto(request.publication)
        agreed, hashes = await asyncio.gather(self._receiver.agree_on_plan(request), prepare())
        assert set(hashes) == {agreed.plan_hash}, "sender and receiver have different plans"
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
        joined = self.engine._llm.collective_rpc("init_weight_transfer_engine", kwargs={"init_info": init})
        await asyncio.gather(self._of(0, "join_baseline", port, init["world_size"]), joined)

    async def baseline(self, packed: bool) -> dict[str, float]:
        """One of vLLM's own transfers, from rank 0, which holds every tensor whole."""
        tensors = self.agreed.manifest.tensors
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
        """The checksum of every parameter of every worker."""
        checksums: list[dict[str, int]] = await self.engine.checksums()
        return checksums

    @contextlib.asynccontextmanager
    async def load(self) -> AsyncIterator[None]:
        """Requests run inside the context."""
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
            # The first answers of an engine may take long.
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
        return await asyncio.to_thread(self._ranks[rank].call, PARTS[self._content], method, *arguments)

    async def _all(self, method: str, *arguments: Any) -> list[Any]:
        return list(await asyncio.gather(*(self._of(rank, method, *arguments) for rank in range(len(self._ranks)))))
