"""Metrics of held-out prompts against every choice of their answers."""

from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.coordinator.observe.step_metrics import held_out

REWARDS = st.integers(1, 6).flatmap(
    lambda n: st.lists(st.lists(st.floats(-5, 5), min_size=n, max_size=n), min_size=1, max_size=4)
)


@given(REWARDS)
def test_best_and_worst_of_k_are_means_over_all_choices(rewards: list[list[float]]) -> None:
    n = len(rewards[0])
    found = held_out("math", rewards)
    assert found.pop(f"val-core/math/reward/mean@{n}") == pytest.approx(sum(map(sum, rewards)) / len(rewards) / n)
    for k in {2, 4, n} & set(range(2, n + 1)):
        choices = [list(combinations(each, k)) for each in rewards]
        best, worst = (sum(sum(map(of, each)) / len(each) for each in choices) / len(choices) for of in (max, min))
        part = "core" if k == n else "aux"
        assert found.pop(f"val-{part}/math/reward/best@{k}/mean") == pytest.approx(best, abs=1e-9)
        assert found.pop(f"val-aux/math/reward/worst@{k}/mean") == pytest.approx(worst, abs=1e-9)
    assert not found


def test_of_rewards_of_0_and_1_the_best_is_pass_at_k() -> None:
    found = held_out("math", [[1.0, 0.0, 0.0, 0.0], [0.0] * 4])
    assert found["val-core/math/reward/best@4/mean"] == 0.5
    assert found["val-aux/math/reward/best@2/mean"] == pytest.approx(0.25)
