"""Which groups a step is trained on: the same with parts as without, in whatever order the groups are completed."""

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from millrace.ids import PromptId
from services.coordinator.stages.feed import Arrived, is_due
from services.coordinator.state.group import GroupSummary

STEPS = 3


def complete(place: int) -> GroupSummary:
    prompt = PromptId(f"0-{place}")
    return GroupSummary(prompt, "sums", 1, [1], [1.0], [0], 0, 1.0, 0.1, "rollout-1", entry=f"7-{place}")


@dataclass
class Replay:
    """A job whose prompts are completed in a given order, whatever the steps take. The trainer is free from the look
    after a step on, and takes parts at any of its looks."""

    prompts: int
    in_flight: int
    wait_for_slow: bool
    completed: Sequence[int]
    """Which of the unanswered prompts is completed next, by its place among them."""
    seen_at: Sequence[int]
    """Groups that are completed up to each look."""
    late: Sequence[int]
    """Groups that are completed between the two reads of each look."""
    gives: Callable[[int], bool]
    """Whether the trainer takes a part at the look of this number."""
    batches: list[set[str]] = field(default_factory=list)
    parts: int = 0

    def run(self) -> list[set[str]]:
        """The entries of each step's batch."""
        order, unanswered = itertools.cycle(self.completed), [f"7-{place}" for place in range(self.in_flight)]
        issued, done, look = self.in_flight, dict[str, GroupSummary](), 0
        while len(self.batches) < STEPS:
            given_to_trainer: list[GroupSummary] = []
            while True:
                look += 1
                self._complete(order, unanswered, done, self.seen_at[look % len(self.seen_at)])
                read = unanswered[: self.prompts]
                self._complete(order, unanswered, done, self.late[look % len(self.late)])
                arrived = Arrived.of(done.values(), read, self.prompts)
                taken = {group.prompt_id for group in given_to_trainer}
                if last := arrived.last_part(taken, self.prompts, wait_for_slow=self.wait_for_slow):
                    break
                if self.gives(look) and (early := arrived.early_part(taken)):
                    given_to_trainer += early
                    self.parts += 1
            batch = [*given_to_trainer, *last]
            assert len(batch) == self.prompts
            self.batches.append({group.entry for group in batch})
            for group in batch:
                del done[group.entry]
            unanswered += [f"7-{place}" for place in range(issued, issued + self.prompts)]
            issued += self.prompts
        return self.batches

    def _complete(self, order: Iterator[int], unanswered: list[str], done: dict[str, GroupSummary], count: int) -> None:
        for _ in range(min(count, len(unanswered))):
            entry = unanswered.pop(next(order) % len(unanswered))
            done[entry] = complete(int(entry.removeprefix("7-")))


def given_parts(look: int) -> bool:
    return True


@st.composite
def replays(draw: st.DrawFn) -> tuple[Replay, Replay]:
    """The same job with a trainer that takes parts at some looks, and with one that takes none."""
    prompts = draw(st.integers(1, 6))
    seen_at = [*draw(st.lists(st.integers(0, 3), min_size=1, max_size=6)), 1]
    late = draw(st.lists(st.integers(0, 2), min_size=1, max_size=6))
    completed = draw(st.lists(st.integers(0, 30), min_size=1, max_size=30))
    gives = draw(st.lists(st.booleans(), min_size=1, max_size=6))
    of = (prompts, prompts * draw(st.integers(1, 3)), draw(st.booleans()), completed, seen_at, late)
    return Replay(*of, lambda look: gives[look % len(gives)]), Replay(*of, lambda _: False)


@given(replays())
@settings(max_examples=300)
def test_the_batches_do_not_depend_on_parts(jobs: tuple[Replay, Replay]) -> None:
    streams, waits = jobs
    assert streams.run() == waits.run()
    assert waits.parts == 0


def test_a_part_holds_no_group_that_an_earlier_prompt_could_displace() -> None:
    """Of prompts 0 to 5 the first two have no answer: a step of four may begin with 2 and 3, and not with 4."""
    arrived = Arrived.of([complete(4), complete(3), complete(2)], ["7-0", "7-1", "7-5"], 4)
    assert [group.entry for group in arrived.early_part(set())] == ["7-2", "7-3"]
    assert [group.entry for group in arrived.early_part({PromptId("0-3")})] == ["7-2"]
    assert arrived.last_part(set(), 4, wait_for_slow=False) == []
    arrived = Arrived.of([complete(place) for place in (5, 4, 3, 2)], ["7-0", "7-1"], 4)
    batch = arrived.last_part({PromptId("0-2"), PromptId("0-3")}, 4, wait_for_slow=False)
    assert [group.entry for group in batch] == ["7-4", "7-5"]
    assert arrived.last_part(set(), 4, wait_for_slow=True) == []


def test_a_group_that_is_completed_between_the_two_reads_counts_once() -> None:
    arrived = Arrived.of([complete(0), complete(1), complete(2)], ["7-0", "7-3"], 3)
    assert [group.entry for group in arrived.first] == ["7-0", "7-1", "7-2"]


def test_without_the_unanswered_prompts_no_group_is_certain() -> None:
    arrived = Arrived.of([complete(1), complete(0)], None, 3)
    assert arrived.early_part(set()) == [] and [group.entry for group in arrived.complete] == ["7-0", "7-1"]


def test_at_staleness_0_the_trainer_may_begin_with_every_complete_group() -> None:
    """As many prompts are in flight as a step needs."""
    job = Replay(4, 4, False, [3, 1, 0], [1], [0], given_parts)
    job.run()
    assert job.parts == 3 * STEPS


@pytest.mark.parametrize(
    ("groups", "missing", "due"),
    [(0, 2, False), (3, 5, False), (4, 5, True), (1, 3, False), (1, 2, True), (0, 0, False)],
    ids=["none", "too few", "a micro-batch", "before the last quarter", "the last quarter", "nothing left"],
)
def test_a_part_fills_a_micro_batch_unless_it_is_of_the_last_groups(groups: int, missing: int, due: bool) -> None:
    """Each group has two tokens."""
    assert is_due([complete(place) for place in range(groups)], missing, wanted=8, tokens=8) is due
