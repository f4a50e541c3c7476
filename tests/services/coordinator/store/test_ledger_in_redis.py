"""The Lua scripts against a model in Python that uses the pure table: whatever the order of calls, both agree."""

import asyncio
from collections.abc import Set
from dataclasses import dataclass, field, replace
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from millrace.drops import Drop, DropReason
from millrace.errors import Fenced
from millrace.ids import Fence, LeaseId, MemberId, PromptId, Purpose, Version
from millrace.rest import JobState
from services.coordinator.state.faults import PROMPT_BUDGET, SUSPECT_AFTER
from services.coordinator.state.group import GroupSummary
from services.coordinator.state.lease import Claim, Draft, DroppedPrompt, LeaseRef
from services.coordinator.state.ledger import Counts, Move, PromptState, after
from services.coordinator.store import Prompts, Store
from services.coordinator.store import prompts as prompts_in_redis
from services.coordinator.store.prompts import Rewound
from tests.services.coordinator.redis import a_job, queued

MEMBERS = [MemberId("rollout-a"), MemberId("rollout-b")]
JOB = a_job()
AGES = st.lists(st.integers(0, 3), min_size=1, max_size=4)
NO_REWARD = Drop(DropReason.REWARD_FAILED, "raised ValueError")


@dataclass
class Model:
    """What should be in Redis."""

    states: dict[PromptId, PromptState] = field(default_factory=dict)
    counts: Counts = field(default_factory=Counts)
    settled: dict[PromptId, int] = field(default_factory=dict)
    waiting: set[PromptId] = field(default_factory=set)
    leases: dict[LeaseId, tuple[PromptId, Fence, MemberId]] = field(default_factory=dict)
    answered: dict[LeaseId, Fence] = field(default_factory=dict)
    deaths: dict[PromptId, int] = field(default_factory=dict)
    """Members that died while they held a prompt."""
    newest: dict[PromptId, int] = field(default_factory=dict)
    """The newest version that sampled tokens of a prompt's group."""
    step: int = 0
    lineage: int = 0

    def move(self, prompt: PromptId, move: Move) -> None:
        state = self.states.get(prompt)
        self.counts = self.counts.moved(state, move)
        self.states[prompt] = after(state, move)

    def suspects(self, state: PromptState) -> set[PromptId]:
        return {prompt for prompt in self.at(state) if self.deaths.get(prompt, 0) >= SUSPECT_AFTER}

    def at(self, state: PromptState) -> set[PromptId]:
        return {prompt for prompt, where in self.states.items() if where is state}


def lease(lease_id: LeaseId, fence: Fence) -> LeaseRef:
    return LeaseRef(Purpose.TRAIN, lease_id, fence)


def summary(prompt: PromptId, oldest: int = 0, newest: int = 0) -> GroupSummary:
    group = GroupSummary(prompt, "sums", 3, [4, 4], [1.0, 0.0], [oldest, oldest], 0, 0.0, 0.0, "rollout-a")
    return group if newest <= oldest else replace(group, newest=[oldest, newest])


class LedgerMachine(RuleBasedStateMachine):
    url = ""

    def __init__(self) -> None:
        super().__init__()
        self.runner = asyncio.Runner()
        self.store = Store(self.url)
        self.run = self.runner.run
        self.run(self.store.connection.do("FLUSHALL"))
        self.run(self.store.jobs.create(JOB))
        self.prompts: Prompts = self.store.prompts(JOB.id)
        self.model = Model()
        self.fences: dict[LeaseId, list[Fence]] = {}

    def teardown(self) -> None:
        self.run(self.store.close())
        self.runner.close()

    # Issue.

    @rule(count=st.integers(1, 4), bad=st.booleans())
    def issue(self, count: int, bad: bool) -> None:
        first = len(self.model.states)
        drafts: list[Draft] = [queued(f"0-{first + n}") for n in range(count)]
        if bad:
            drafts[0] = DroppedPrompt(drafts[0].prompt_id, Drop(DropReason.BAD_ROW, "it cannot be read"))
        assert self.run(self.prompts.issue(drafts, self.model.step, (first, first + count)))
        assert not self.run(self.prompts.issue(drafts, self.model.step, (first, first + count)))
        for draft in drafts:
            self.model.move(draft.prompt_id, Move.ISSUE)
            if isinstance(draft, DroppedPrompt):
                self.model.move(draft.prompt_id, Move.DROP)
                self.model.settled[draft.prompt_id] = self.model.step

    @rule(count=st.integers(1, 4))
    def reissue(self, count: int) -> None:
        waiting = self.run(self.prompts.waiting(count))
        assert len(waiting) == min(count, len(self.model.waiting))
        self.run(self.prompts.reissue([queued(p) for p in waiting], self.model.step))
        self.model.waiting -= set(waiting)
        self.model.counts = Counts(**{**vars(self.model.counts), "waiting": len(self.model.waiting)})

    # Leases.

    @rule(member=st.sampled_from(MEMBERS), count=st.integers(1, 4))
    def lease(self, member: MemberId, count: int) -> None:
        held = dict(self.model.leases)
        found: list[Claim] | None = self.run(self.prompts.lease(member, count, self.model.lineage))
        claims = found or []
        assert not self.run(self.prompts.lease(member, count, self.model.lineage - 1))
        most = min(count, self.model.counts.queued - self.model.counts.waiting)
        claimed = {claim.row.prompt_id for claim in claims}
        if any(prompt in self.model.suspects(PromptState.LEASED) for prompt, _, m in held.values() if m == member):
            assert found is None, "nothing else while it works on a prompt that may kill it"
        elif suspects := self.model.suspects(PromptState.QUEUED):
            assert min(most, 1) <= len(claims) <= most
            assert len(claims) == 1 or not claimed & suspects, "such a prompt is leased alone"
        else:
            assert len(claims) == most
        for claim in claims:
            assert claim.row == queued(claim.row.prompt_id)
            lease_id, fence = claim.ref.id, claim.ref.fence
            assert all(fence > old for old in self.fences.get(lease_id, []))
            self.fences.setdefault(lease_id, []).append(fence)
            self.model.move(claim.row.prompt_id, Move.LEASE)
            self.model.leases[lease_id] = (claim.row.prompt_id, fence, member)

    def give_back(self, lease_id: LeaseId) -> PromptId:
        prompt, _, _ = self.model.leases.pop(lease_id)
        self.model.move(prompt, Move.GIVE_BACK)
        return prompt

    @precondition(lambda self: self.model.leases)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        lease_id = data.draw(st.sampled_from(sorted(self.model.leases)))
        fence = self.model.leases[lease_id][1]
        assert self.run(self.prompts.release([lease(lease_id, fence)])) == [self.give_back(lease_id)]
        assert self.run(self.prompts.release([lease(lease_id, fence)])) == []

    @rule()
    def expire(self) -> None:
        assert set(self.run(self.prompts.expire(0.0))) == {self.give_back(i) for i in list(self.model.leases)}

    @rule(member=st.sampled_from(MEMBERS), died=st.sampled_from(["", "it was ended by SIGSEGV"]))
    def take_back(self, member: MemberId, died: str) -> None:
        held = [lease_id for lease_id, (_, _, holder) in self.model.leases.items() if holder == member]
        queued_again, dropped = map(set, self.run(self.prompts.take_back(member, self.model.step, died)))
        assert self.run(self.prompts.take_back(member, self.model.step, died)) == ([], [])
        for prompt in [self.give_back(lease_id) for lease_id in held]:
            self.model.deaths[prompt] = self.model.deaths.get(prompt, 0) + bool(died)
            if died and self.model.deaths[prompt] >= PROMPT_BUDGET:
                assert prompt in dropped
                del self.model.deaths[prompt]
                self.model.move(prompt, Move.DROP)
                self.model.settled[prompt] = self.model.step
            else:
                assert prompt in queued_again

    @precondition(lambda self: self.fences)
    @rule(data=st.data())
    def extend(self, data: st.DataObject) -> None:
        lease_id = data.draw(st.sampled_from(sorted(self.fences)))
        fence = data.draw(st.sampled_from(self.fences[lease_id]))
        holds = lease_id in self.model.leases and self.model.leases[lease_id][1] == fence
        member = self.model.leases[lease_id][2] if holds else MEMBERS[0]
        asked = lease(lease_id, fence)
        assert self.run(self.prompts.extend(member, [asked])) == (set() if holds else {asked})

    # Answers.

    @rule(ages=AGES, trained=st.booleans())
    def generate(self, ages: list[int], trained: bool) -> None:
        """The way of most prompts; single calls in any order rarely come so far. `ages`: how many versions ago the
        newest tokens of each group were sampled. Every second group has tokens of the version before, too."""
        self.issue(len(ages), bad=False)
        self.lease(MEMBERS[0], len(ages))
        for number, (lease_id, (prompt, fence, _)) in enumerate(list(self.model.leases.items())):
            newest = max(0, self.model.step - ages[number % len(ages)])
            self.complete(lease_id, fence, prompt, newest - (newest > 0 and number % 2), newest)
        if trained:
            self.train_on(sorted(self.model.at(PromptState.GENERATED)))

    def complete(self, lease_id: LeaseId, fence: Fence, prompt: PromptId, oldest: int, newest: int) -> None:
        group = summary(prompt, oldest, newest)
        assert self.run(self.prompts.complete(lease(lease_id, fence), b"group " + prompt.encode(), group))
        self.model.newest[prompt] = newest
        del self.model.leases[lease_id]
        self.model.answered[lease_id] = fence
        self.model.move(prompt, Move.COMPLETE)
        self.model.deaths.pop(prompt, None)

    @precondition(lambda self: self.fences)
    @rule(data=st.data(), group=st.booleans())
    def answer(self, data: st.DataObject, group: bool) -> None:
        """Of any lease that ever was: held now, lost, or answered before."""
        lease_id = data.draw(st.sampled_from(sorted(self.fences)))
        fence = data.draw(st.sampled_from(self.fences[lease_id]))
        held = self.model.leases.get(lease_id)
        prompt = held[0] if held else PromptId("0-0")
        if group:
            call = self.prompts.complete(lease(lease_id, fence), b"group " + prompt.encode(), summary(prompt))
        else:
            call = self.prompts.refuse(lease(lease_id, fence), self.model.step, NO_REWARD)
        if held is not None and held[1] == fence:
            assert self.run(call)
            del self.model.leases[lease_id]
            self.model.answered[lease_id] = fence
            self.model.move(prompt, Move.COMPLETE if group else Move.REFUSE)
            if group:
                self.model.newest[prompt] = 0
                self.model.deaths.pop(prompt, None)
            else:
                self.model.settled[prompt] = self.model.step
        elif held is None and self.model.answered.get(lease_id) == fence:
            assert not self.run(call)
        else:
            try:
                self.run(call)
                raise AssertionError("an answer with an old fence was taken")
            except Fenced:
                pass

    # The end of a prompt.

    @precondition(lambda self: self.model.counts.generated)
    @rule(data=st.data())
    def drop(self, data: st.DataObject) -> None:
        prompt = data.draw(st.sampled_from(sorted(self.model.at(PromptState.GENERATED))))
        assert self.run(self.prompts.drop([prompt], self.model.step, DropReason.NO_SIGNAL)) == 1
        assert self.run(self.prompts.drop([prompt], self.model.step, DropReason.NO_SIGNAL)) == 0
        self.model.move(prompt, Move.DROP)
        self.model.settled[prompt] = self.model.step

    @precondition(lambda self: self.model.counts.generated)
    @rule(data=st.data())
    def regenerate(self, data: st.DataObject) -> None:
        prompt = data.draw(st.sampled_from(sorted(self.model.at(PromptState.GENERATED))))
        assert self.run(self.prompts.regenerate([prompt], self.model.step + 1)) == 1
        assert self.run(self.prompts.regenerate([prompt], self.model.step + 1)) == 0
        self.model.move(prompt, Move.REGENERATE)
        self.model.waiting.add(prompt)
        self.model.counts = Counts(**{**vars(self.model.counts), "waiting": len(self.model.waiting)})

    @precondition(lambda self: self.model.counts.generated)
    @rule(data=st.data())
    def train(self, data: st.DataObject) -> None:
        generated = sorted(self.model.at(PromptState.GENERATED))
        self.train_on(data.draw(st.lists(st.sampled_from(generated), min_size=1, unique=True)))

    def train_on(self, batch: list[PromptId]) -> None:
        step = self.model.step + 1
        assert self.run(self.prompts.train(batch, step, 1.0, "{}", ["sample"], 10))
        assert not self.run(self.prompts.train(batch, step, 1.0, "{}", ["sample"], 10))
        for prompt in batch:
            self.model.move(prompt, Move.TRAIN)
            self.model.settled[prompt] = step
        self.model.step = step

    @precondition(lambda self: self.model.step)
    @rule(back=st.integers(1, 3))
    def rewind(self, back: int) -> None:
        to = Version(max(0, self.model.step - back))
        complete = len(self.model.at(PromptState.GENERATED))
        rewound = self.run(self.prompts.rewind(to))
        self.go_back(to, {p for p, newest in self.model.newest.items() if newest <= to})
        self.undo()
        kept = len(self.model.at(PromptState.GENERATED))
        assert rewound == Rewound(len(self.model.waiting), kept, complete - kept)

    @rule(steps=st.integers(1, 3), ages=AGES, back=st.integers(1, 3))
    def rewind_with_complete_groups(self, steps: int, ages: list[int], back: int) -> None:
        for _ in range(steps):
            self.generate([0, 0], trained=True)
        self.generate(ages, trained=False)
        self.rewind(back)

    @precondition(lambda self: self.model.step)
    @rule(back=st.integers(1, 3), chunks=st.integers(0, 3), job_ends=st.booleans())
    def rewind_is_broken_off(self, back: int, chunks: int, job_ends: bool) -> None:
        """The coordinator ends in the middle of it: the next one finishes it, or closes the ledger with the job."""
        to = max(0, self.model.step - back)
        keys = [f"millrace:job:{JOB.id}:train", f"millrace:job:{JOB.id}"]
        self.run(self.store.connection.run("rewind", keys, [to]))
        lineage = self.model.lineage
        self.go_back(to)
        for _ in range(chunks):
            self.run(self.store.connection.run("undo", keys[:1], [1]))
            assert self.run(self.prompts.counts()).adds_up
            assert not self.run(self.prompts.lease(MEMBERS[0], 4, lineage))
        if job_ends:
            self.run(self.prompts.close(to + 1, DropReason.JOB_FAILED))
            self.drop_all()
            self.start()
        else:
            self.run(self.prompts.undo())
            assert not self.run(self.prompts.undo())
            self.undo()

    @rule()
    def close(self) -> None:
        assert self.run(self.prompts.close(self.model.step + 1, DropReason.JOB_FAILED)) == self.drop_all()

    def drop_all(self) -> int:
        flying = {p for state in (PromptState.QUEUED, PromptState.LEASED) for p in self.model.at(state)}
        flying |= self.model.at(PromptState.GENERATED)
        for prompt in flying:
            self.model.move(prompt, Move.DROP)
            self.model.settled[prompt] = self.model.step + 1
        self.model.leases, self.model.waiting, self.model.deaths = {}, set(), {}
        self.model.counts = Counts(**{**vars(self.model.counts), "waiting": 0})
        return len(flying)

    @rule()
    def start(self) -> None:
        """The job is taken up, for the first time or again."""
        before = self.run(self.store.jobs.get(JOB.id))
        self.run(self.store.jobs.update(JOB.id, state=JobState.QUEUED))
        self.run(self.store.jobs.move(JOB.id, JobState.STARTING, "starting"))
        job = self.run(self.store.jobs.get(JOB.id))
        assert (job.step, job.version, job.lineage) == (before.step, before.version, before.lineage + 1)
        assert self.run(self.prompts.undo()) and not self.run(self.prompts.undo())
        self.go_back(self.model.step)
        self.undo()

    def go_back(self, to: int, kept: Set[PromptId] = frozenset()) -> None:
        for lease_id in list(self.model.leases):
            self.give_back(lease_id)
        self.wait_again(self.model.at(PromptState.GENERATED) - kept)
        self.model.step, self.model.deaths = to, {}
        self.model.lineage += 1

    def undo(self) -> None:
        self.wait_again({p for p, step in self.model.settled.items() if step > self.model.step})

    def wait_again(self, undone: set[PromptId]) -> None:
        for prompt in undone:
            self.model.move(prompt, Move.REWIND)
            self.model.settled.pop(prompt, None)
        self.model.waiting |= undone
        self.model.counts = Counts(**{**vars(self.model.counts), "waiting": len(self.model.waiting)})

    # What must always hold.

    @invariant()
    def counts_are_those_of_the_model(self) -> None:
        counts = self.run(self.prompts.counts())
        assert counts == self.model.counts
        assert counts.adds_up

    @invariant()
    def groups_are_those_of_the_generated(self) -> None:
        generated, last = self.run(self.prompts.generated())
        assert self.run(self.prompts.generated(last)) == ([], last)
        assert self.run(self.prompts.generated(last - 1))[0] == generated[-1:] or not generated
        assert set(generated) == self.model.at(PromptState.GENERATED)
        assert all(self.run(self.prompts.group(p)) == b"group " + p.encode() for p in generated)
        assert {s.prompt_id for s in self.run(self.prompts.summaries(generated))} == set(generated)

    @invariant()
    def dropped_prompts_have_reasons(self) -> None:
        assert sum(self.run(self.prompts.view()).reasons.values()) == self.model.counts.dropped

    @invariant()
    def held_leases_are_those_of_the_model(self) -> None:
        held = self.run(self.prompts.held())
        for member in MEMBERS:
            assert held.get(member, 0) == sum(m == member for _, _, m in self.model.leases.values())
            assert self.run(self.prompts.holds_any(member)) == bool(held.get(member))


@pytest.mark.slow
@pytest.mark.parametrize("examples", [20, pytest.param(200, marks=pytest.mark.matrix)])  # more draws of the same moves
def test_scripts_and_table_agree(examples: int, redis_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    LedgerMachine.url = redis_url
    monkeypatch.setattr(prompts_in_redis, "UNDONE_AT_ONCE", 2)
    monkeypatch.setattr(prompts_in_redis, "CLOSED_AT_ONCE", 2)
    checks = settings(
        max_examples=examples,
        stateful_step_count=40,
        suppress_health_check=list(HealthCheck),
        print_blob=False,
    )
    run_state_machine_as_test(LedgerMachine, settings=checks)


def test_closing_drops_what_is_in_flight(redis_url: str) -> None:
    async def scenario() -> None:
        store = Store(redis_url)
        await store.connection.do("FLUSHALL")
        await store.jobs.create(JOB)
        prompts = store.prompts(JOB.id)
        names = [PromptId(f"0-{n}") for n in range(6)]
        await prompts.issue([queued(p) for p in names], 0, (0, 6))
        claims = await prompts.lease(MEMBERS[0], 3, 0)
        await prompts.complete(claims[0].ref, b"group", summary(claims[0].row.prompt_id))
        assert await prompts.close(0, DropReason.JOB_CANCELLED) == 6
        view = await prompts.view()
        assert (view.issued, view.dropped, view.reasons) == (6, 6, {DropReason.JOB_CANCELLED: 6})
        try:
            await prompts.complete(claims[1].ref, b"group", summary(names[1]))
            raise AssertionError("an answer to a closed ledger was taken")
        except Fenced:
            pass
        await store.close()

    asyncio.run(scenario())


def test_a_large_ledger_is_closed_in_parts(redis_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """No command of Redis drops them all, so that other commands are answered meanwhile. One of these completes a
    group."""
    prompts_in_flight = 2500

    async def scenario() -> None:
        store = Store(redis_url)
        await store.connection.do("FLUSHALL")
        await store.jobs.create(JOB)
        prompts = store.prompts(JOB.id)
        await prompts.issue([queued(PromptId(f"0-{n}")) for n in range(prompts_in_flight)], 0, (0, prompts_in_flight))
        claims = await prompts.lease(MEMBERS[0], prompts_in_flight, 0)
        await prompts.complete(claims[0].ref, b"group", summary(claims[0].row.prompt_id))
        counts: list[Counts] = []
        run = store.connection.run

        async def watched(name: str, *arguments: list[str]) -> object:
            answer = await run(name, *arguments)
            if name == "close":
                counts.append(await prompts.counts())
                if len(counts) == 1:
                    await prompts.complete(claims[-1].ref, b"group", summary(claims[-1].row.prompt_id))
            return answer

        monkeypatch.setattr(store.connection, "run", watched)
        assert await prompts.close(1, DropReason.JOB_CANCELLED) == prompts_in_flight
        assert [each.dropped for each in counts] == [1000, 2000, prompts_in_flight]
        assert all(each.adds_up for each in counts)
        left = {key.decode().rsplit(":", 1)[1] for key in await store.connection.do("KEYS", f"*:{Purpose.TRAIN}:*")}
        assert left == {"state", "counts", "settled", "reason", "reasons", claims[0].ref.id, claims[-1].ref.id}
        await store.close()

    asyncio.run(scenario())


def test_a_large_ledger_of_a_job_that_gives_way_is_dropped_in_parts(redis_url: str) -> None:
    """The transition that ends the ledger finds nothing in flight. Without it the prompts are issued again."""
    prompts_in_flight = 2500

    async def scenario() -> None:
        store = Store(redis_url)
        await store.connection.do("FLUSHALL")
        await store.jobs.create(JOB)
        prompts, run, parts = store.prompts(JOB.id), store.connection.run, list[int]()
        await prompts.issue([queued(PromptId(f"0-{n}")) for n in range(prompts_in_flight)], 0, (0, prompts_in_flight))

        async def watched(name: str, *arguments: list[str]) -> Any:
            before, answer = await prompts.counts(), await run(name, *arguments)
            parts.extend([(await prompts.counts()).dropped - before.dropped] if name in ("close", "move_job") else [])
            return answer

        store.connection.run = watched  # type: ignore[method-assign]
        assert await prompts.prepare_close(1, DropReason.JOB_PREEMPTED) == prompts_in_flight
        assert await prompts.undo()
        counts = await prompts.counts()
        assert (counts.waiting, counts.dropped, counts.adds_up) == (prompts_in_flight, 0, True)
        assert (await prompts.view()).reasons == {}

        await store.jobs.update(JOB.id, state=JobState.RUNNING)
        await prompts.prepare_close(1, DropReason.JOB_PREEMPTED)
        await store.jobs.move(JOB.id, JobState.QUEUED, "gives way")
        assert parts == [1000, 1000, 500, 1000, 1000, 500, 0]
        counts = await prompts.counts()
        assert (counts.dropped, counts.waiting, counts.in_flight, counts.adds_up) == (prompts_in_flight, 0, 0, True)
        assert not await prompts.undo()
        await store.close()

    asyncio.run(scenario())
