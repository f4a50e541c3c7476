"""The members of the fleet: their weights, which of them are alive, and the epoch. Heartbeats are in memory only."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator

import structlog

from millrace.contracts.method import Request, Response, Unary
from millrace.contracts.v1 import fleet_pb2
from millrace.errors import InvalidState, NotFound, Unavailable
from millrace.ids import Epoch, MemberId
from millrace.rest import FleetView, MemberKind
from millrace.wire.channel import PROTOCOL_VERSION, Peer
from millrace.wire.deadlines import DEADLINES_S
from services.coordinator.state.bell import Bell
from services.coordinator.state.member import KINDS, Member, Patience, Pulse
from services.coordinator.store import Store

log = structlog.get_logger(__name__)
PROBE_S = 1.0
PROBES_AT_ONCE = 32
"""Silent members whose addresses are tried at a time: a coordinator that is late for all heartbeats is not to be held
up more by looking for everybody."""
HUNG_AFTER = 6.0
"""A silent member whose address still takes connections counts as busy for this many times lost_after_s."""
LOST_SHOWN_S = 120.0
"""How long a lost member is still shown."""
LONGEST_WORDS = 4000
"""Characters of a member's last words that are kept."""


Gone = Callable[[Member, str], Awaitable[None]]
LastWords = Callable[[MemberId, str], Awaitable[None]]
MOST_PARTITIONS = 64


class Fleet:
    """All members. Each change of membership raises the epoch."""

    def __init__(self, store: Store, patience: Patience) -> None:
        self.patience = patience
        self.epoch = Epoch(0)
        self.bell = Bell()
        """Rings at every change of the fleet."""
        self._store = store
        self._members: dict[MemberId, Member] = {}
        self._lost: dict[MemberId, Member] = {}
        self._peers: dict[MemberId, Peer] = {}
        self._deadlines: dict[str, dict[str, float]] = {}
        self._on_gone: list[Gone] = []
        self._on_drain: list[Callable[[Member], None]] = []
        self._on_last_words: list[LastWords] = []
        self._on_partition: list[Callable[[str], None]] = []
        self._partitions: set[str] = set()

    def on_gone(self, call: Gone) -> None:
        """Registers `call(member, why)`, which runs after a member was lost, has left, or was cut."""
        self._on_gone.append(call)

    def on_last_words(self, call: LastWords) -> None:
        """Registers `call(member_id, words)`, which runs when the next life of a dead process reports how it ended."""
        self._on_last_words.append(call)

    def on_drain(self, call: Callable[[Member], None]) -> None:
        """Registers `call(member)`, which runs as soon as a member drains."""
        self._on_drain.append(call)

    def on_partition(self, call: Callable[[str], None]) -> None:
        """Registers `call(name)`, which runs once for each partition, before its first member is in the fleet."""
        self._on_partition.append(call)
        for name in sorted(self._partitions):
            call(name)

    def add_partition(self, name: str) -> None:
        """Makes the partition known, if it is not. It stays until the coordinator ends. Raises InvalidState if there
        are too many."""
        if name in self._partitions:
            return
        if len(self._partitions) >= MOST_PARTITIONS:
            what = f"the partition {name} would be one more than the {MOST_PARTITIONS} that a fleet can have."
            raise InvalidState(what, "use the name of another one, or start the coordinator again without those.")
        self._partitions.add(name)
        for call in self._on_partition:
            call(name)

    async def load(self) -> None:
        """Reads the members from the store. Those that are gone will be found by their silence."""
        self.epoch, members = await self._store.members.all()
        known = sorted(map(Member.from_json, members.values()), key=lambda member: member.joined_s)
        self._members = {member.id: member for member in known}
        for member in known:
            member.lost_after_s = self.patience_now.lost_after_s
            self.add_partition(member.partition)

    @property
    def patience_now(self) -> Patience:
        """The intervals for as many members as there are."""
        return self.patience.of_fleet(len(self._members))

    # Calls of members.

    async def register(self, request: fleet_pb2.RegisterRequest) -> Epoch:
        """Makes the caller a member; answers the epoch. Raises InvalidState for another protocol version or a request
        that is not valid."""
        if request.protocol_version != PROTOCOL_VERSION:
            what = (
                f"{request.member_id} at {request.address} (release {request.release}) speaks protocol "
                f"{request.protocol_version}, this coordinator {PROTOCOL_VERSION}."
            )
            raise InvalidState(what, "run the same release of millrace everywhere.")
        if request.kind not in KINDS or not request.member_id or ":" not in request.address:
            what = f"member {request.member_id!r} at {request.address!r} of kind {request.kind} cannot be registered."
            raise InvalidState(what, "send an id, host:port and a kind.")
        member = Member.of(request)
        if (known := self._members.get(member.id)) and known.home != member.home:
            what = f"{member.id} is of the partition {known.partition}, and registers in {member.partition}."
            raise InvalidState(what, "end its process and start it again: a member stays in the partition it names.")
        if known and known.address == request.address:
            known.pulse, known.lost_after_s = Pulse(), self.patience_now.lost_after_s
            return self.epoch
        self.add_partition(member.partition)
        if request.HasField("previous"):
            await self._hear(request.previous)
        for old in [m for m in self._members.values() if m.address == member.address and m.id != member.id]:
            await self._remove(old, old.last_words.partition("\n")[0] or f"{member.id} took its address")
        self.epoch = await self._store.members.join(member.id, member.to_json())
        await self._drop_peer(member.id)
        self._members[member.id] = member
        member.lost_after_s = self.patience_now.lost_after_s
        self._lost.pop(member.id, None)
        log.info(
            "member joined",
            member=member.id,
            address=member.address,
            engine=member.engine,
            partition=member.partition,
            epoch=self.epoch,
        )
        self.bell.ring()
        return self.epoch

    async def _hear(self, previous: fleet_pb2.PreviousLife) -> None:
        """Records how a member's process ended, as its next life reports. The report may come before the silence was
        noticed."""
        member_id = MemberId(previous.member_id)
        words = "\n".join(part for part in (previous.ended, previous.last_words) if part)[:LONGEST_WORDS]
        if (member := self._members.get(member_id)) is not None:
            member.last_words = words
        for call in self._on_last_words:
            await call(member_id, words)

    def heartbeat(self, beat: fleet_pb2.HeartbeatRequest) -> Member:
        """Notes a heartbeat. Raises NotFound if the member has to register again."""
        member = self._members.get(MemberId(beat.member_id))
        if member is None:
            raise NotFound(f"{beat.member_id} is not a member: it was silent or never registered.", "register again.")
        member.pulse, member.lost_after_s = member.pulse.next(beat), self.patience_now.lost_after_s
        settled = time.monotonic() - member.weights_at > 3 * self.patience.heartbeat_s
        if member.kind is MemberKind.ROLLOUT and beat.version < 0 and member.weights is not None and settled:
            log.warning("member reports that it has no weights", member=member.id)
            member.weights = member.configured = None
            self.bell.ring()
        return member

    def heard(self, member_id: MemberId) -> None:
        """Notes another sign of life than a heartbeat."""
        if member := self._members.get(member_id):
            member.heard_at = time.monotonic()

    async def drain(self, member_id: str) -> Member:
        """No new leases to the member. Raises NotFound."""
        member = self.member(member_id)
        member.draining = True
        await self.keep(member)
        for call in self._on_drain:
            call(member)
        self.bell.ring()
        return member

    async def leave(self, member_id: str, reason: str, *, failed: bool = False) -> None:
        """Removes a member that left because it was asked to, or because something in it `failed`."""
        if member := self._members.get(MemberId(member_id)):
            member.left = not failed
            member.last_words = reason if failed else ""
            await self._remove(member, reason if failed else f"left: {reason}" if reason else "left")

    # Finding lost members.

    async def watch(self) -> None:
        """Removes members that are silent for too long, until cancelled."""
        while True:
            await asyncio.sleep(self.patience.heartbeat_s / 2)
            silent = sorted(
                (m for m in self._members.values() if m.silent_s > m.lost_after_s), key=lambda member: member.probed_at
            )[:PROBES_AT_ONCE]
            async with self._store.connection.outlasted():
                for member, why in zip(silent, await asyncio.gather(*map(self._verdict, silent)), strict=True):
                    if why and not member.gone.is_set():
                        await self._remove(member, why)

    async def _verdict(self, member: Member) -> str:
        """Why a silent member counts as lost; empty while it may only be busy."""
        silent = f"silent for {member.silent_s:.1f} s"
        member.probed_at = time.monotonic()
        if why := await self._unreachable(member):
            return f"{silent}, and {why}"
        return silent if member.silent_s > HUNG_AFTER * member.lost_after_s else ""

    async def _unreachable(self, member: Member) -> str:
        """Why the member's address takes no connection; empty if it does."""
        host, _, port = member.address.rpartition(":")
        try:
            async with asyncio.timeout(PROBE_S):
                _, writer = await asyncio.open_connection(host.strip("[]"), int(port))
        except (OSError, TimeoutError, ValueError) as error:
            return f"{member.address} cannot be reached: {error or type(error).__name__}"
        writer.close()
        return ""

    async def _remove(self, member: Member, why: str) -> None:
        self.epoch = await self._store.members.remove(member.id)
        self._members.pop(member.id, None)
        self._lost[member.id], member.why_gone = member, why
        member.gone.set()
        log.warning("member gone", member=member.id, address=member.address, why=why, epoch=self.epoch)
        await self._drop_peer(member.id)
        await self._tell_gone(member, why)

    async def cut(self, member: Member, why: str) -> None:
        """Takes the member out of service after a failure: its leases go to others, and it has to be configured again,
        after a wait that grows with each failure. A member that cannot be reached is removed."""
        await self.suspect(member)
        member.weights = member.configured = None
        member.failed()
        if not member.gone.is_set():
            self.epoch = await self._store.members.grow()
            await self.keep(member)
            await self._tell_gone(member, why)

    async def _tell_gone(self, member: Member, why: str) -> None:
        for call in self._on_gone:
            await call(member, why)
        self.bell.ring()

    async def suspect(self, member: Member) -> None:
        """Removes a member that did not answer a call, if its address cannot be reached either."""
        if not member.gone.is_set() and (why := await self._unreachable(member)):
            await self._remove(member, f"it does not answer, and {why}")

    async def hand_over(self, member: Member, partition: str) -> None:
        """Makes a replica a member of another partition. It works on for its old job until it is configured for the job
        there: then it returns its leases with what they have got. Not while weights are on their way to or from it."""
        member.came_from, member.partition, member.joined_s = member.partition, partition, time.time()
        member.weights = member.configured = member.unconfigured = None
        member.failures, member.retry_at = 0, 0.0
        if (peer := self._peers.get(member.id)) is not None:
            peer.deadlines = self.deadlines(partition)
        self.epoch = await self._store.members.grow()
        await self.keep(member)
        self.bell.ring()

    async def grow(self) -> None:
        """Raises the epoch: answers to earlier publications are refused from now on."""
        self.epoch = await self._store.members.grow()

    async def keep(self, *members: Member) -> None:
        """Stores the members as they are now."""
        await self._store.members.put_all({member.id: member.to_json() for member in members})

    # Reading, and calling members.

    def member(self, member_id: str) -> Member:
        """The member with this id. Raises NotFound."""
        if member := self._members.get(MemberId(member_id)):
            return member
        raise NotFound(f"{member_id} is not in the fleet.", "list the members with `millrace fleet` or GET /v1/fleet.")

    def of_kind(self, kind: MemberKind) -> Iterator[Member]:
        """The members of all partitions that are of a kind, those first that joined first."""
        return (member for member in self._members.values() if member.kind is kind)

    def deadlines(self, partition: str) -> dict[str, float]:
        """Deadlines of calls to the members of a partition, in seconds by method."""
        return self._deadlines.setdefault(partition, dict(DEADLINES_S))

    async def call(self, member: Member, method: Unary[Request, Response], request: Request) -> Response:
        """Calls a member. Raises as Peer.call, and Unavailable as soon as the member is lost."""
        lost = Unavailable(f"{member.id} at {member.address} was lost during {method.name}.", "start it again.")
        if member.gone.is_set():
            raise lost
        if member.id not in self._peers:
            self._peers[member.id] = Peer(
                member.address, self.deadlines(member.partition), self._store.leadership.epoch
            )
        try:
            answer = await self._peers[member.id].call(method, request)
            member.heard_at = time.monotonic()
            return answer
        except asyncio.CancelledError:
            # Closing the channel of a lost member cancels its calls. The caller may be cancelled, too.
            caller = asyncio.current_task()
            if member.gone.is_set() and caller is not None and not caller.cancelling():
                raise lost from None
            raise

    def view(self, leases: dict[MemberId, int]) -> FleetView:
        """The fleet as REST shows it. `leases`: how many each member holds."""
        now = time.monotonic()
        self._lost = {i: m for i, m in self._lost.items() if now - m.pulse.at < LOST_SHOWN_S}
        views = [m.view(leases.get(m.id, 0)) for m in (*self._members.values(), *self._lost.values())]
        return FleetView(
            epoch=self.epoch,
            trainers=[v for v in views if v.kind == MemberKind.TRAINER],
            replicas=[v for v in views if v.kind == MemberKind.ROLLOUT],
        )

    async def _drop_peer(self, member_id: MemberId) -> None:
        if peer := self._peers.pop(member_id, None):
            await peer.close()

    async def close(self) -> None:
        for member_id in list(self._peers):
            await self._drop_peer(member_id)
