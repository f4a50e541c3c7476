"""A trainer and replicas that speak the real contract over real gRPC and compute nothing.

They stand in for engines where a fault has to be injected: `faults[method]` runs before the method answers and may
wait, raise, or kill.
"""

import asyncio
import json
import random
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from millrace.contracts.methods import FleetRpc, WorkRpc
from millrace.contracts.v1 import (
    common_pb2,
    fleet_pb2,
    rollout_pb2,
    rollout_pb2_grpc,
    trainer_pb2,
    trainer_pb2_grpc,
    weights_pb2,
    work_pb2,
)
from millrace.errors import Fenced, InvalidJob, InvalidState, MillraceError, NotFound, Unavailable
from millrace.ids import new_member_id
from millrace.weights.plans import wire_layouts
from millrace.weights.plans.boxes import Boxes
from millrace.weights.plans.gather_broadcast import gather_broadcast
from millrace.weights.plans.layout import most_dims
from millrace.weights.plans.manifest import Content, Manifest, TensorInfo
from millrace.wire.arrays import pack_floats, pack_logprobs, pack_tokens, unpack_logprobs
from millrace.wire.channel import PROTOCOL_VERSION, Peer
from millrace.wire.server import Server
from tests.layouts import whole_layout

MANIFEST = Manifest((TensorInfo("model.norm.weight", (8,), "float32"),))
CHECKSUMS = [7]
HALVES = [Boxes.of([(0, (start,), (4,))], most_dims(MANIFEST)) for start in (0, 4)]
"""What the trainer's two ranks hold."""
Fault = Callable[[object], Awaitable[None]]


def _manifest(content: "weights_pb2.Content") -> Manifest:
    """Every content has the same tensor here."""
    return Manifest(MANIFEST.tensors, Content.of(content))


def _plan_hash(of: weights_pb2.Sides | None, world_size: int, manifest: Manifest) -> bytes:
    return gather_broadcast(manifest, world_size).hash if of is None else wire_layouts.Planner().plan(manifest, of).hash


class Faults(dict[str, Fault]):
    """By method. A fault is gone after `times` calls."""

    def once(self, method: str, error: Exception, times: int = 1) -> None:
        left = times

        async def fault(_: object) -> None:
            nonlocal left
            left -= 1
            if left <= 0:
                del self[method]
            raise error

        self[method] = fault

    async def strike(self, method: str, request: object) -> None:
        if method in self:
            await self[method](request)


FETCH_S = 10.0
"""Deadline of a trainer's Work/Fetch. To a coordinator that stands still, gRPC itself notices after 30 s."""
REGISTRATIONS = 20
"""Attempts of a member to register, half a second apart."""


class Member:
    """Registers, beats, and registers again when it was forgotten."""

    kind = fleet_pb2.MEMBER_KIND_ROLLOUT
    name = "rollout"
    engine = "vllm"
    world_size = 1

    def __init__(self, coordinator: str) -> None:
        self.id = new_member_id(self.name)
        self.coordinator = Peer(coordinator)
        self.faults = Faults()
        self.version = -1
        self.tokens = 0
        self.running = 0
        self.protocol_version = PROTOCOL_VERSION
        self.port = 0
        """Of its server; 0: a free one."""
        self.partition = ""
        self.previous: fleet_pb2.PreviousLife | None = None
        """How its process' life before ended."""
        self.server: Server
        self._tasks: list[asyncio.Task[None]] = []

    def servicers(self) -> Mapping[str, Callable[..., None]]:
        raise NotImplementedError

    async def start(self) -> None:
        self.server = Server(self.servicers(), "127.0.0.1", self.port)
        await self.server.start()
        await self.register()
        self._tasks = [asyncio.create_task(self._beat())]

    async def register(self) -> None:
        request = fleet_pb2.RegisterRequest(
            member_id=self.id,
            kind=self.kind,
            address=f"127.0.0.1:{self.server.port}",
            protocol_version=self.protocol_version,
            engine=self.engine,
            world_size=self.world_size,
            host="test",
            device="cpu",
            metrics_port=9400,
            previous=self.previous,
            partition=self.partition,
        )
        for left in reversed(range(REGISTRATIONS)):
            try:
                await self.coordinator.call(FleetRpc.Register, request)
                return
            except Unavailable:  # of several coordinators another one may begin to lead
                if not left:
                    raise
                await asyncio.sleep(0.5)

    async def _beat(self) -> None:
        while True:
            await asyncio.sleep(0.2)
            beat = fleet_pb2.HeartbeatRequest(
                member_id=self.id, version=self.version, tokens=self.tokens, running=self.running
            )
            try:
                await self.coordinator.call(FleetRpc.Heartbeat, beat)
            except NotFound:
                await self.register()
            except MillraceError:
                continue

    async def leave(self) -> None:
        """Says goodbye, so that nobody looks for it."""
        if self._tasks:
            for task in self._tasks:
                task.cancel()
            try:
                goodbye = fleet_pb2.LeaveRequest(member_id=self.id, reason="the test is over")
                await self.coordinator.call(FleetRpc.Leave, goodbye)
            except MillraceError:
                pass
            await self.die()

    async def die(self) -> None:
        """As by SIGKILL: nothing is said to anybody."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._tasks = []
        await self.server.stop(0)
        await self.coordinator.close()

    async def come_back(self) -> None:
        """With all that it held: its host had only been cut off."""
        self.coordinator = Peer(self.coordinator.address)
        await self.start()


COPIES: dict[str, dict[str, Any]] = {}
"""The states that simulated trainers send each other, by the key of the rendezvous."""


class SimulatedTrainer(Member, trainer_pb2_grpc.TrainerServicer):
    kind = fleet_pb2.MEMBER_KIND_TRAINER
    name = "trainer"
    engine = "fsdp2"

    def __init__(self, coordinator: str, step_s: float = 0.0, save_s: float = 0.0, ranks: int = 1) -> None:
        super().__init__(coordinator)
        self.world_size = ranks
        self.job_id = ""
        self.configuration = ""
        self.step_s = step_s
        self.save_s = save_s
        """Until a checkpoint that was begun is there."""
        self.saved: set[str] = set()
        self.received: list[int] = []
        """Versions that another trainer sent it."""
        self.most_at_once = 0
        """Checkpoints that were being written."""
        self.saving: dict[str, dict[str, Any]] = {}
        self.trained: dict[int, list[str]] = {}
        """Prompts by step, of this lineage."""
        self.every: Counter[str] = Counter()
        """How often each prompt was trained, all lineages."""
        self.stalest = 0
        self.configured: list[str] = []
        self.last: trainer_pb2.StepResponse | None = None
        self.added: list[trainer_pb2.StepRequest] = []
        """The parts of the step in progress."""
        self.parts: dict[int, int] = {}
        """Number of parts of each step."""
        self.paths: list[int] = []
        """Of every publication that was prepared."""
        self.sent: list[tuple[Content, list[str]]] = []
        """Of every publication that was prepared: what, and to whom."""
        self.sent_whole: list[bool] = []
        """Of every transfer, whether everything was asked for."""
        self._preparing: weights_pb2.PublicationRef | None = None
        self._base: weights_pb2.PublicationRef | None = None
        """The last publication that succeeded."""
        self._asked: list[str] = []
        self._joined: list[str] = []
        """Receivers of the last publication that succeeded: they are in the communicator."""
        self._stepping = asyncio.Lock()

    def servicers(self) -> Mapping[str, Callable[..., None]]:
        return {"millrace.v1.Trainer": lambda server: trainer_pb2_grpc.add_TrainerServicer_to_server(self, server)}

    async def Configure(self, request, context):
        await self.faults.strike("Configure", request)
        if (request.job_id, request.configuration) != (self.job_id, self.configuration):
            self.job_id, self.configuration, self.last = request.job_id, request.configuration, None
            self.version, self.trained = 0, {}
            self.configured.append(request.checkpoint)
            if request.checkpoint:
                self._read(request.checkpoint)
            self.added = []
        return trainer_pb2.ConfigureTrainerResponse(
            version=self.version, world_size=1, parameters=8, microbatches_at_once=1
        )

    def _check(self, job_id: str) -> None:
        if job_id != self.job_id:
            raise Fenced(f"the trainer holds {self.job_id or 'no job'}, not {job_id}.")

    def _read(self, folder: str) -> None:
        saved = json.loads((Path(folder) / "state.json").read_text())
        self.version = saved["version"]
        self.trained = {int(step): prompts for step, prompts in saved["trained"].items()}

    async def Load(self, request, context):
        await self.faults.strike("Load", request)
        self._check(request.job_id)
        self._read(request.path)
        self.last, self.added = None, []
        return trainer_pb2.LoadResponse(version=self.version)

    async def CopyState(self, request, context):
        await self.faults.strike("CopyState", request)
        self._check(request.job_id)
        assert request.version == self.version
        answer = trainer_pb2.CopyStateResponse(version=self.version)
        for receiver in request.receivers:
            key = f"{receiver}/{self.version}/{len(COPIES)}"
            COPIES[key] = {"version": self.version, "trained": dict(self.trained)}
            answer.rendezvous.add(host="127.0.0.1", port=1, world_size=2, key=key)
        return answer

    async def ReceiveState(self, request, context):
        await self.faults.strike("ReceiveState", request)
        self._check(request.job_id)
        assert request.configuration == self.configuration
        state = COPIES[request.rendezvous.key]
        assert state["version"] == request.version
        self.version, self.trained, self.last, self.added = state["version"], dict(state["trained"]), None, []
        self.received.append(self.version)
        return trainer_pb2.ReceiveStateResponse(version=self.version)

    async def AddPart(self, request, context):
        async with self._stepping:
            part = request.part
            await self.faults.strike("AddPart", part)
            self._check(part.job_id)
            if part.step == self.version and self.last is not None:
                return trainer_pb2.AddPartResponse()
            self._check_next(part)
            if self.added[part.part : part.part + 1] != [part]:
                self._check_parts(part)
                await self._fetch(part)
                await asyncio.sleep(self.step_s / 2)
                self.added = [*self.added[: part.part], part]
            await self.faults.strike("AddPartDone", part)
            return trainer_pb2.AddPartResponse()

    def _check_next(self, request: trainer_pb2.StepRequest) -> None:
        request.traceparent = ""
        if request.step != self.version + 1:
            raise Fenced(f"step {request.step} is not the next: the trainer is at version {self.version}.")

    def _check_parts(self, request: trainer_pb2.StepRequest) -> None:
        if request.part and len(self.added) != request.part:
            raise Fenced(f"part {request.part} is not the next: the trainer has {len(self.added)}.")

    async def Step(self, request, context):
        async with self._stepping:
            await self.faults.strike("Step", request)
            self._check(request.job_id)
            if request.step == self.version and self.last is not None:
                return self.last
            self._check_next(request)
            self._check_parts(request)
            shown = await self._fetch(request)
            await asyncio.sleep(self.step_s)
            self.version = request.step
            whole = [*self.added[: request.part], request]
            self.added, self.parts[request.step] = [], len(whole)
            assert len({(part.token_budget, part.step_groups) for part in whole}) == 1
            prompts = [group.prompt_id for part in whole for group in part.groups]
            assert len(prompts) == request.step_groups
            self.trained[request.step] = prompts
            self.every.update(prompts)
            self.last = trainer_pb2.StepResponse(
                version=self.version,
                metrics={
                    "actor/grad_norm": 1.0,
                    "rollout_corr/k3_kl": 0.001,
                    "timing_s/update_actor": 99.0,
                    "memory/scoring/predicted/weights": 5.5,
                    "memory/update/predicted/weights": 5.25,
                    "memory/update/predicted/logits": 1.0,
                    "memory/update/weights": 5.0 + 0.01 * request.step,
                    "memory/update/rest": 1.5,
                },
                shown=shown,
            )
            await self.faults.strike("StepDone", request)
            return self.last

    async def _fetch(self, request: trainer_pb2.StepRequest) -> list[trainer_pb2.TrainedGroup]:
        """Fetches the groups; answers what to tell of those that are shown."""
        wanted = [group.prompt_id for group in request.groups]
        fetch = work_pb2.FetchRequest(job_id=request.job_id, prompt_ids=wanted)
        peer = Peer(request.work_address, {WorkRpc.Fetch.key: FETCH_S})
        groups = [group async for group in peer.stream(WorkRpc.Fetch, fetch)]
        await peer.close()
        assert [group.prompt_id for group in groups] == wanted
        for ref, group in zip(request.groups, groups, strict=True):
            announced = ref.response_tokens or [one.response_tokens for one in ref.trajectories]
            assert list(announced) == [len(t.tokens) // 4 for t in group.trajectories]
            oldest = min(span.version for t in group.trajectories for span in t.versions)
            self.stalest = max(self.stalest, self.version - oldest)
            self.tokens += sum(len(t.logprobs) // 4 for t in group.trajectories)
        return [self.told(group) for ref, group in zip(request.groups, groups, strict=True) if ref.shown]

    def told(self, group: common_pb2.Group) -> trainer_pb2.TrainedGroup:
        """Every token is a tenth of a nat less likely than the engine said; advantages of an answer are 0, 1, ..."""
        told = trainer_pb2.TrainedGroup(prompt_id=group.prompt_id)
        for trajectory in group.trajectories:
            logprobs = unpack_logprobs(trajectory.logprobs)
            told.trajectories.add(logprobs=pack_logprobs(logprobs - 0.1), advantages=pack_floats(range(len(logprobs))))
        return told

    async def DescribeWeights(self, request, context):
        await self.faults.strike("DescribeWeights", request)
        self._check(request.job_id)
        manifest = _manifest(request.content).to_proto()
        return trainer_pb2.DescribeSendResponse(manifest=manifest, layouts=wire_layouts.encode(HALVES), deltas=True)

    async def PreparePublication(self, request, context):
        await self.faults.strike("PreparePublication", request)
        self._check(request.publication.job_id)
        if request.publication.version != self.version:
            raise InvalidState(f"asked for {request.publication.version}, the trainer holds {self.version}.")
        sharded = request.path in (weights_pb2.PATH_SHARDED, weights_pb2.PATH_DELTA)
        first = len(HALVES) if sharded else 1
        assert [receiver.first_rank for receiver in request.receivers][:1] == [first]
        self.paths.append(request.path)
        manifest = _manifest(request.content)
        self._asked = [receiver.member_id for receiver in request.receivers]
        self.sent.append((manifest.content, self._asked))
        standing = sharded and self._asked == self._joined
        world_size = first + sum(receiver.world_size for receiver in request.receivers)
        base, self._preparing = self._base, request.publication
        return trainer_pb2.PrepareSendResponse(
            manifest=manifest.to_proto(),
            rendezvous=weights_pb2.Rendezvous(host="127.0.0.1", port=1, world_size=world_size, standing=standing),
            plan_hash=_plan_hash(request.sides if sharded else None, world_size, manifest),
            base=base if standing and request.path == weights_pb2.PATH_DELTA else None,
        )

    async def TransferPublication(self, request, context):
        await self.faults.strike("TransferPublication", request)
        self.sent_whole.append(request.whole)
        report = weights_pb2.MemberReport(member_id=self.id, bytes=MANIFEST.bytes, gather_s=0.01, wire_s=0.02)
        return trainer_pb2.TransferSendResponse(checksums=weights_pb2.Checksums(values=CHECKSUMS), report=report)

    async def FinishPublication(self, request, context):
        await self.faults.strike("FinishPublication", request)
        self._base = None if request.failure else self._preparing
        self._joined = [] if request.failure else self._asked
        return trainer_pb2.FinishSendResponse()

    async def Save(self, request, context):
        await self.faults.strike("Save", request)
        self.saving[request.path] = {"version": self.version, "trained": dict(self.trained)}
        return trainer_pb2.SaveResponse(version=self.version, seconds=0.0)

    async def FinishSave(self, request, context):
        if request.path not in self.saving:
            raise NotFound(f"no checkpoint was begun at {request.path}.")
        state = self.saving[request.path]
        self.most_at_once = max(self.most_at_once, len(self.saving.keys() - self.saved))
        await self.faults.strike("FinishSave", request)
        await asyncio.sleep(self.save_s)
        write_state(Path(request.path), state)
        self.saved.add(request.path)
        await self.faults.strike("SaveDone", request)
        return trainer_pb2.FinishSaveResponse(version=state["version"], bytes=8, seconds=self.save_s)

    async def GetStatus(self, request, context):
        await self.faults.strike("GetStatus", request)
        state = trainer_pb2.TRAINER_STATE_READY if self.job_id else trainer_pb2.TRAINER_STATE_IDLE
        return trainer_pb2.TrainerStatus(
            member_id=self.id,
            state=state,
            job_id=self.job_id,
            configuration=self.configuration,
            version=self.version,
            world_size=self.world_size,
            microbatches_at_once=1 if self.job_id else 0,
        )


def write_state(folder: Path, state: dict[str, object]) -> None:
    """Writes the checkpoint of a simulated trainer."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "state.json").write_text(json.dumps(state))


def improving(lease: work_pb2.Lease, version: int, chance: random.Random) -> float:
    """A reward that grows with the version."""
    return version + 0.1 * chance.random()


@dataclass
class Shape:
    """What a simulated replica generates."""

    tokens: int = 4
    seconds: float = 0.0
    """For one group."""
    capacity: int = 16
    """Samples."""
    reward: Callable[[work_pb2.Lease, int, random.Random], float | None] = improving
    """Of one sample under a version; None where scoring fails."""
    turns: int = 1
    """Of each trajectory. Before each but the first two tokens are given, and each but the first earns 0.25."""
    trajectories: int = 1
    """Of each episode. Each but the first has a prompt of its own, and each but the last no reward."""


class SimulatedReplica(Member, rollout_pb2_grpc.RolloutServicer):
    def __init__(self, coordinator: str, shape: Shape | None = None) -> None:
        super().__init__(coordinator)
        self.shape = shape or Shape()
        self.configured: list[str] = []
        self.publications: list[int] = []
        """Versions committed."""
        self.leased: list[str] = []
        """Prompts, in order."""
        self.fenced = 0
        self.held: dict[str, work_pb2.Lease] = {}
        self.extending = True
        self.plan_hash = b""
        self.agreed = b""
        self.told_whole: list[bool] = []
        """Of each PREPARE, whether it came with manifest and sides or named the plan only."""
        self.asked: list[str] = []
        """The methods of publications that were called."""
        self.joins_phases = True
        """Whether it takes two phases in one call. Replicas of earlier releases do not."""
        self.dtype = "float32"
        self.lacks_ipc = False
        """Whether reward functions are not separated from its IPC."""
        self.takes_deltas = True
        """Whether it can receive changes alone. Replicas of earlier releases cannot."""
        self.loses_base = False
        """Whether it says that it lacks the base that a publication names."""
        self._prepared: weights_pb2.PublicationRef | None = None
        self._placed: weights_pb2.PublicationRef | None = None
        self.describes = True
        """Whether it can tell its layout."""
        self.copied: list[int] = []
        """Versions sent to siblings."""
        self.finished: list[tuple[int, str]] = []
        """Attempts of copies that were called over, and the failures."""
        self.dying: asyncio.Task[None] | None = None
        self.in_place: set[Content] = set()
        """The contents that were committed since it was configured for this job."""
        self._incoming, self._content = -1, Content.MODEL
        self._chance = random.Random(0)

    def servicers(self) -> Mapping[str, Callable[..., None]]:
        return {"millrace.v1.Rollout": lambda server: rollout_pb2_grpc.add_RolloutServicer_to_server(self, server)}

    async def start(self) -> None:
        await super().start()
        self._tasks += [asyncio.create_task(self._pull()), asyncio.create_task(self._extend())]

    # Publication.

    async def Configure(self, request, context):
        await self.faults.strike("Configure", request)
        self.configured.append(request.job_id)
        if self.configured[-2:-1] != [request.job_id]:
            self.version, self.in_place = -1, set()
        missing = [rollout_pb2.MissingBoundary(boundary=rollout_pb2.BOUNDARY_IPC, reason="refused")]
        return rollout_pb2.ConfigureRolloutResponse(
            missing_boundaries=missing if self.lacks_ipc else [],
            world_size=1,
            dtype=self.dtype,
            seconds=0.0,
            has_base=Content.BASE in self.in_place,
        )

    async def DescribeWeights(self, request, context):
        await self.faults.strike("DescribeWeights", request)
        layouts = wire_layouts.encode(
            [whole_layout(Manifest.from_proto(request.manifest)).boxes] if self.describes else []
        )
        return rollout_pb2.DescribeReceiveResponse(layouts=layouts, deltas=self.takes_deltas)

    async def PreparePublication(self, request, context):
        self.asked.append("PreparePublication")
        await self.faults.strike("PreparePublication", request)
        whole = request.HasField("manifest")
        self.told_whole.append(whole)
        if whole:
            sharded = request.path in (weights_pb2.PATH_SHARDED, weights_pb2.PATH_DELTA)
            manifest = Manifest.from_proto(request.manifest)
            self._content = manifest.content
            assert self._content is not Content.ADAPTER or Content.BASE in self.in_place
            self.agreed = _plan_hash(request.sides if sharded else None, request.rendezvous.world_size, manifest)
        elif request.plan_hash != self.agreed:
            return rollout_pb2.PrepareReceiveResponse()
        if begun := request.begin and self.joins_phases:
            await self._begin(request)
        lacks = request.HasField("base") and (self.loses_base or request.base != self._placed)
        self._prepared = request.publication
        plan_hash = self.plan_hash or self.agreed
        return rollout_pb2.PrepareReceiveResponse(plan_hash=plan_hash, begun=begun, lacks_base=lacks)

    async def TransferPublication(self, request, context):
        self.asked.append("TransferPublication")
        await self._begin(request)
        return rollout_pb2.TransferReceiveResponse()

    async def _begin(self, request):
        await self.faults.strike("TransferPublication", request)
        self._incoming = request.publication.version

    async def VerifyPublication(self, request, context):
        self.asked.append("VerifyPublication")
        await self.faults.strike("VerifyPublication", request)
        assert list(request.checksums.values) == CHECKSUMS
        if not (request.commit and self.joins_phases):
            return rollout_pb2.VerifyReceiveResponse()
        try:
            return rollout_pb2.VerifyReceiveResponse(report=await self._commit(request))
        except MillraceError as error:
            return rollout_pb2.VerifyReceiveResponse(
                commit_failure=str(error), commit_refused=isinstance(error, InvalidJob)
            )

    async def CommitPublication(self, request, context):
        self.asked.append("CommitPublication")
        return rollout_pb2.CommitReceiveResponse(report=await self._commit(request))

    async def _commit(self, request):
        await self.faults.strike("CommitPublication", request)
        self.in_place.add(self._content)
        self._placed = self._prepared
        if self._content is not Content.BASE:
            self.version = self._incoming
            self.publications.append(self.version)
        report = weights_pb2.MemberReport(member_id=self.id, bytes=MANIFEST.bytes, apply_s=0.01, pause_s=0.005)
        report.loader_names.append("model.norm.weight")
        return report

    async def AbortPublication(self, request, context):
        await self.faults.strike("AbortPublication", request)
        return rollout_pb2.AbortReceiveResponse()

    # Copies to siblings.

    async def DescribeCopy(self, request, context):
        await self.faults.strike("DescribeCopy", request)
        layouts = wire_layouts.encode([whole_layout(MANIFEST).boxes] if self.describes else [])
        assert Content.of(request.content) in self.in_place
        return trainer_pb2.DescribeSendResponse(manifest=_manifest(request.content).to_proto(), layouts=layouts)

    async def PrepareCopy(self, request, context):
        await self.faults.strike("PrepareCopy", request)
        if request.publication.version != self.version:
            raise Fenced(f"a copy of {request.publication.version} was asked for, {self.version} is served.")
        assert [receiver.first_rank for receiver in request.receivers][:1] == [1]
        world_size = 1 + sum(receiver.world_size for receiver in request.receivers)
        return trainer_pb2.PrepareSendResponse(
            manifest=_manifest(request.content).to_proto(),
            rendezvous=weights_pb2.Rendezvous(host="127.0.0.1", port=1, world_size=world_size, passing=True),
            plan_hash=_plan_hash(request.sides, world_size, _manifest(request.content)),
        )

    async def TransferCopy(self, request, context):
        await self.faults.strike("TransferCopy", request)
        self.copied.append(self.version)
        report = weights_pb2.MemberReport(member_id=self.id, bytes=MANIFEST.bytes, gather_s=0.01, wire_s=0.02)
        return trainer_pb2.TransferSendResponse(checksums=weights_pb2.Checksums(values=CHECKSUMS), report=report)

    async def FinishCopy(self, request, context):
        await self.faults.strike("FinishCopy", request)
        self.finished.append((request.publication.attempt, request.failure))
        return trainer_pb2.FinishSendResponse()

    async def GetStatus(self, request, context):
        await self.faults.strike("GetStatus", request)
        return rollout_pb2.RolloutStatus(
            member_id=self.id, state=rollout_pb2.ENGINE_STATE_SERVING, version=self.version
        )

    # Work.

    async def _pull(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            while True:
                free = max(0, self.shape.capacity - self.running)
                if free == 0:
                    await asyncio.sleep(0.01)
                    continue
                request = work_pb2.LeaseRequest(member_id=self.id, free_samples=free, wait_s=2.0)
                try:
                    answer = await self.coordinator.call(WorkRpc.Lease, request)
                except MillraceError:
                    await asyncio.sleep(0.1)
                    continue
                for lease in answer.leases:
                    self.leased.append(lease.prompt_id)
                    self.held[lease.ref.lease_id] = lease
                    self.running += lease.sampling.samples
                    tasks.create_task(self._answer(lease))

    async def _answer(self, lease: work_pb2.Lease) -> None:
        try:
            await self.faults.strike("Generate", lease)
            await asyncio.sleep(self.shape.seconds)
            request = work_pb2.CompleteRequest(member_id=self.id, ref=lease.ref, group=self.group(lease))
            await self.faults.strike("Complete", request)
            while True:
                try:
                    await self.coordinator.call(WorkRpc.Complete, request)
                    return
                except (Fenced, NotFound):
                    self.fenced += 1
                    return
                except MillraceError:
                    await asyncio.sleep(0.1)
        finally:
            self.running -= lease.sampling.samples
            self.held.pop(lease.ref.lease_id, None)

    async def _extend(self) -> None:
        while True:
            await asyncio.sleep(0.3)
            if self.held and self.extending:
                leases = [lease.ref for lease in self.held.values()]
                request = work_pb2.ExtendRequest(member_id=self.id, leases=leases)
                try:
                    await self.coordinator.call(WorkRpc.Extend, request)
                except MillraceError:
                    continue

    def group(self, lease: work_pb2.Lease) -> common_pb2.Group:
        group = common_pb2.Group(
            job_id=lease.ref.job_id,
            prompt_id=lease.prompt_id,
            purpose=lease.purpose,
            data_source=lease.data_source,
            prompt_tokens=pack_tokens([1, 2, 3]),
            prompt_text=lease.prompt,
            ground_truth=lease.ground_truth,
            member_id=self.id,
            engine=self.engine,
            traceparent=lease.traceparent,
            issued_s=lease.issued_s,
            trajectories=[one for _ in range(lease.sampling.samples) for one in self._episode(lease)],
            images=lease.images,
            image_mark=json.dumps({"type": "image"}) if lease.images else "",
        )
        if self.shape.trajectories > 1:
            group.episode_trajectories.extend([self.shape.trajectories] * lease.sampling.samples)
        self.tokens += sum(len(one.logprobs) // 4 for one in group.trajectories)
        return group

    def _episode(self, lease: work_pb2.Lease) -> list[common_pb2.Trajectory]:
        episode = [self._trajectory(lease) for _ in range(self.shape.trajectories)]
        for one in episode[1:]:
            one.prompt_tokens = pack_tokens(range(5))
        for one in episode[:-1]:
            one.ClearField("reward")
        for one in episode if self.shape.turns > 1 else []:
            self._add_turns(one)
        return episode

    def _add_turns(self, one: common_pb2.Trajectory) -> None:
        tokens = self.shape.tokens
        one.ClearField("versions")
        one.ClearField("text")
        one.tokens = pack_tokens(range(self.shape.turns * (tokens + 2) - 2))
        one.logprobs = pack_logprobs([-1.0] * self.shape.turns * tokens)
        for turn in range(self.shape.turns):
            start = turn * (tokens + 2)
            one.versions.add(version=self.version, start=start, end=start + tokens)
            told = {"reward": 0.25, "given_text": "<tool>"} if turn else {}
            one.turns.add(start=start, end=start + tokens, text=f"turn {turn}", **told)

    def _trajectory(self, lease: work_pb2.Lease) -> common_pb2.Trajectory:
        tokens = self.shape.tokens
        trajectory = common_pb2.Trajectory(
            tokens=pack_tokens(range(tokens)),
            logprobs=pack_logprobs([-1.0] * tokens),
            versions=[common_pb2.VersionSpan(version=self.version, start=0, end=tokens)],
            stop_reason=common_pb2.STOP_REASON_END_OF_TURN,
            text="answer",
        )
        reward = self.shape.reward(lease, self.version, self._chance)
        if reward is None:
            trajectory.reward_failure = "raised ValueError: no"
        else:
            trajectory.reward = reward
        return trajectory
