"""Metrics of the answers to held-out prompts, against slow versions and numbers by hand."""

import statistics
from collections import Counter
from itertools import combinations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from millrace.ids import PromptId
from millrace.telemetry.metrics.catalogue import check
from millrace.telemetry.metrics.declaration import Owner
from millrace.validation import limits
from services.coordinator.observe.step_metrics import held_out, main_values
from services.coordinator.state.group import GroupSummary

REWARDS = st.integers(1, 6).flatmap(
    lambda n: st.lists(st.lists(st.floats(-5, 5), min_size=n, max_size=n), min_size=1, max_size=4)
)


def group(rewards: list[float], accuracies: list[float] | None = None, votes: list[str] | None = None) -> GroupSummary:
    count = len(rewards)
    return GroupSummary(
        PromptId("e0-0"), "math", 3, [4] * count, rewards, [0] * count, 0, 2.0, 0.5, "rollout-0", accuracies, votes
    )


@given(REWARDS)
def test_best_and_worst_of_k_are_means_over_all_choices(rewards: list[list[float]]) -> None:
    n = len(rewards[0])
    found = held_out("math", [group(each) for each in rewards])
    check(found, [Owner.COORDINATOR])
    assert found.pop(f"val-core/math/reward/mean@{n}") == pytest.approx(sum(map(sum, rewards)) / len(rewards) / n)
    if n > 1:
        std = statistics.fmean(statistics.pstdev(each) for each in rewards)
        assert found.pop(f"val-aux/math/reward/std@{n}") == pytest.approx(std, abs=1e-9)
    for k in {2, 4, n} & set(range(2, n + 1)):
        choices = [list(combinations(each, k)) for each in rewards]
        best, worst = (sum(sum(map(of, each)) / len(each) for each in choices) / len(choices) for of in (max, min))
        part = "core" if k == n else "aux"
        assert found.pop(f"val-{part}/math/reward/best@{k}/mean") == pytest.approx(best, abs=1e-9)
        assert found.pop(f"val-aux/math/reward/worst@{k}/mean") == pytest.approx(worst, abs=1e-9)
    assert not found


def test_of_rewards_of_0_and_1_the_best_is_pass_at_k() -> None:
    found = held_out("math", [group([1.0, 0.0, 0.0, 0.0]), group([0.0] * 4)])
    assert found["val-core/math/reward/best@4/mean"] == 0.5
    assert found["val-aux/math/reward/best@2/mean"] == pytest.approx(0.25)


def test_best_of_many_answers() -> None:
    """Of 4096 answers 10^1231 sets of 2048 can be drawn, more than a float can count."""
    found = held_out("math", [group([1.0, *[0.0] * (limits.MOST_SAMPLES - 1)])])
    assert found["val-aux/math/reward/best@2048/mean"] == pytest.approx(0.5)
    assert found["val-aux/math/reward/worst@2/mean"] == 0.0


def majority_slowly(values: list[float], votes: list[str], k: int) -> tuple[float, float]:
    """verl's bootstrap, draw by draw: seed 42, 1000 draws with replacement, the first vote wins a tie."""
    won = []
    np.random.seed(42)
    for drawn in np.random.choice(len(values), size=(1000, k), replace=True):
        counts = Counter(votes[index] for index in drawn)
        most = max(counts.values())
        winner = next(votes[index] for index in drawn if counts[votes[index]] == most)
        won.append(next(values[index] for index in drawn if votes[index] == winner))
    return statistics.fmean(won), statistics.pstdev(won)


def test_the_majority_is_verls_bootstrap() -> None:
    """Also where answers with the same vote have other rewards, and where no vote is most frequent."""
    rows = [
        ([1.0, 0.0, 0.0, 1.0, 0.5], list("abbac")),
        ([0.2, 0.4, 0.6, 0.8, 1.0], list("vwxyz")),
        ([1.0, 0.9, 0.8, 0.0, 0.0], list("aaabb")),
    ]
    found = held_out("math", [group(rewards, votes=votes) for rewards, votes in rows])
    check(found, [Owner.COORDINATOR])
    for k, section in ((2, "aux"), (4, "aux"), (5, "core")):
        expected = [majority_slowly(*row, k) for row in rows]
        for place, name in enumerate(("mean", "std")):
            value = found[f"val-{section}/math/reward/maj@{k}/{name}"]
            assert value == pytest.approx(statistics.fmean(each[place] for each in expected))


def test_where_all_agree_the_majority_is_certain_and_without_every_vote_there_is_none() -> None:
    agreed = held_out("math", [group([0.7] * 4, votes=["8"] * 4)])
    majority = [agreed[f"val-core/math/reward/maj@4/{name}"] for name in ("mean", "std")]
    assert majority == pytest.approx([0.7, 0])
    some = held_out("math", [group([1.0, 0.0], votes=["8", "9"]), group([1.0, 0.0])])
    alone = held_out("math", [group([1.0], votes=["8"])])
    assert not [name for name in (*some, *alone) if "maj@" in name]


def test_an_accuracy_takes_the_reward_s_place_in_the_core() -> None:
    """The reward has shaping in it; what counts as right is `acc`."""
    groups = [group([0.3, 1.2], [0.0, 1.0], ["7", "8"]), group([0.1, 0.2], [0.0, 0.0], ["1", "1"])]
    found = held_out("math", groups)
    check(found, [Owner.COORDINATOR])
    core = {name for name in found if name.startswith("val-core/")}
    assert core == {f"val-core/math/acc/{name}" for name in ("mean@2", "best@2/mean", "maj@2/mean", "maj@2/std")}
    assert (found["val-core/math/acc/mean@2"], found["val-core/math/acc/best@2/mean"]) == (0.25, 0.5)
    assert found["val-aux/math/acc/std@2"] == 0.25
    assert found["val-aux/math/reward/mean@2"] == pytest.approx(0.45)
    assert found["val-aux/math/reward/best@2/mean"] == pytest.approx(0.7)
    assert statistics.fmean(main_values(groups)) == found["val-core/math/acc/mean@2"]
    one_lacks_it = held_out("math", [*groups, group([1.0, 1.0])])
    assert statistics.fmean(main_values([*groups, group([1.0, 1.0])])) == pytest.approx(3.8 / 6)
    assert "val-core/math/reward/mean@2" in one_lacks_it and not [name for name in one_lacks_it if "/acc/" in name]
