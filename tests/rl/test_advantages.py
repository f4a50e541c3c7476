"""Every advantage estimator against its paper's formula, by hand, and unmoved by what must not matter."""

import itertools
import math
from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor

from millrace.errors import InvalidJob
from millrace.rl.registry.catalogue import AlgorithmKind, find, names
from services.trainer.algorithms.functions import advantage
from tests.rl import reference_advantages as reference
from tests.rl.batches import Batch, make_batch, ragged


@dataclass(frozen=True)
class Case:
    """An estimator with options, and what its slow version is called with."""

    name: str
    options: dict = field(default_factory=dict)
    slow: dict | None = None
    """Where the slow version takes other arguments than the estimator."""
    without: frozenset[str] = frozenset()
    """Optional inputs that are left out."""

    def __str__(self) -> str:
        return f"{self.name}{self.options or ''}"


CASES = [
    Case("gae", {"gamma": 0.9, "lam": 0.8}),
    Case("gae", {"whiten": False}),
    Case("grpo"),
    Case("grpo", {"std": False}),
    Case("grpo", {"ddof": 0, "eps": 1e-4, "singleton": "reward"}),
    Case("grpo", {"std_over": "batch"}),
    Case("grpo", {"std_over": "batch", "ddof": 0, "eps": 1e-4, "singleton": "reward"}),
    Case("grpo_turns"),
    Case("grpo_turns", {"std": False, "singleton": "reward"}),
    Case("grpo_turns", {"ddof": 0, "eps": 1e-4}),
    Case("grpo_passk"),
    Case("grpo_passk", {"std": False}),
    Case("passk", {"k": 1}),
    Case("passk", {"k": 3, "threshold": 0.1}),
    Case("maxrl"),
    Case("rloo"),
    Case("reinforce_plus_plus", {"gamma": 0.9}),
    Case("reinforce_plus_plus", {"unbiased": False}),
    Case("reinforce_plus_plus_baseline"),
    Case("remax"),
    Case("opo"),
    Case("gpg"),
    Case("gpg", {"count": "rewards"}),
    Case("gdpo"),
    Case("gdpo", {"weights": (2.0, 0.5, 1.0), "batch": "tokens"}),
    Case("optimal_token_baseline", slow={}, without=frozenset({"weights_bt"})),
    Case("optimal_token_baseline", {"zero_tail": False}, slow={"zero_tail": False, "weighted": True}),
]
every_case = pytest.mark.parametrize("case", CASES, ids=str)


def extra_inputs(batch: Batch) -> dict[str, Tensor]:
    """Made from the batch, so that they follow its rows wherever these go."""
    rewards_b = torch.where(batch.mask_bt, batch.token_rewards_bt, 0).sum(dim=-1)
    return {
        "values_bt": batch.values_bt,
        "greedy_rewards_b": rewards_b.sin(),
        "rewards_bk": torch.stack([rewards_b.cos(), (3 * rewards_b).sin(), (rewards_b > 0).to(rewards_b.dtype)], dim=1),
        "old_logprobs_bt": batch.old_logprobs_bt,
        "sum_pi_squared_bt": (2 * batch.old_logprobs_bt).exp() * 1.1,
        "weights_bt": batch.rollout_logprobs_bt.exp() + 0.5,
        "turn_starts_bt": batch.mask_bt & ~torch.nn.functional.pad(batch.mask_bt, (1, 0))[:, :-1],
    }


def computed(case: Case, batch: Batch) -> tuple[Tensor, Tensor]:
    entry = find(AlgorithmKind.ADVANTAGE, case.name)
    extras = {key: value for key, value in extra_inputs(batch).items() if key in entry.inputs - case.without}
    return advantage(
        case.name,
        token_rewards_bt=batch.token_rewards_bt,
        mask_bt=batch.mask_bt,
        group_b=batch.group_b,
        **extras,
        **case.options,
    )


def slowly(case: Case, batch: Batch):
    extras = extra_inputs(batch)
    columns = {
        "rewards": batch.token_rewards_bt,
        "values": batch.values_bt,
        "old_logprobs": batch.old_logprobs_bt,
        "sum_pi_squared": extras["sum_pi_squared_bt"],
        "weights": extras["weights_bt"],
    }
    rows = {name: ragged(values_bt, batch.mask_bt) for name, values_bt in columns.items()}
    answers = [
        reference.Answer(
            group=int(batch.group_b[i]),
            several_rewards=extras["rewards_bk"][i].tolist(),
            greedy=float(extras["greedy_rewards_b"][i]),
            turns=[len(list(run)) for counts, run in itertools.groupby(batch.mask_bt[i].tolist()) if counts],
            **{name: row[i] for name, row in rows.items()},
        )
        for i in range(len(batch.group_b))
    ]
    result = getattr(reference, case.name)(answers, **(case.options if case.slow is None else case.slow))
    return result if isinstance(result, tuple) else (result, result)


@every_case
@pytest.mark.parametrize("seed", range(3))
def test_equals_the_papers_formula(case, seed):
    batch = make_batch(seed)
    if case.name in ("grpo_passk", "passk", "gpg", "maxrl"):  # with ties and rewards of 0, as verifiers give
        batch.token_rewards_bt[~batch.token_rewards_bt.isnan()] = 0.0
        for row in (0, 2, 5, 7, 8):
            batch.token_rewards_bt[row, int(batch.mask_bt[row].nonzero().max())] = 1.0 + 0.25 * (row == 2)
    for result_bt, expected in zip(computed(case, batch), slowly(case, batch), strict=True):
        assert result_bt.dtype == torch.float64
        assert not result_bt[~batch.mask_bt].any()
        for got, want in zip(ragged(result_bt, batch.mask_bt), expected, strict=True):
            assert got == pytest.approx(want, rel=1e-9, abs=1e-9)


@every_case
def test_batch_order_group_names_and_padding_do_not_matter(case):
    batch = make_batch(3)
    advantages_bt, returns_bt = computed(case, batch)
    order = torch.randperm(len(batch.group_b), generator=torch.Generator().manual_seed(0)).tolist()
    shuffled = batch.rows(order).padded(3)
    shuffled.group_b[:] = 100 - 7 * shuffled.group_b
    for result_bt, expected_bt in zip(computed(case, shuffled), (advantages_bt, returns_bt), strict=True):
        torch.testing.assert_close(result_bt[:, :-3], expected_bt[order])
        assert not result_bt[:, -3:].any()


@every_case
def test_a_group_alone_has_its_advantages_if_the_file_says_so(case):
    """`SEPARABLE`: the trainer may then begin with a part of a step's groups."""
    batch = make_batch(3)
    batch.token_rewards_bt[1] = 0.0
    whole_bt, alone_bt = computed(case, batch)[0], torch.zeros_like(batch.token_rewards_bt)
    for group in batch.group_b.unique():
        rows = (batch.group_b == group).nonzero().flatten().tolist()
        alone_bt[rows] = computed(case, batch.rows(rows))[0]
    same = torch.allclose(alone_bt, whole_bt, rtol=1e-9, atol=1e-12)
    assert same is find(AlgorithmKind.ADVANTAGE, case.name).is_separable(case.options)


@every_case
def test_fp32_stays_fp32_and_close(case):
    batch = make_batch(4)
    for result_bt, expected_bt in zip(computed(case, batch.to(torch.float32)), computed(case, batch), strict=True):
        assert result_bt.dtype == torch.float32
        torch.testing.assert_close(result_bt.double(), expected_bt, rtol=2e-4, atol=2e-5)


@every_case
def test_a_batch_without_any_token_gives_zeros(case):
    batch = make_batch(5)
    batch.mask_bt[:] = False
    for result_bt in computed(case, batch):
        assert not result_bt.any()


def test_every_estimator_is_tested():
    assert {case.name for case in CASES} == set(names(AlgorithmKind.ADVANTAGE))


def by_hand(name: str, rewards: list[float], lengths: list[int], **options) -> list[float]:
    """The advantage of each answer's first token; one group; the reward on the last token."""
    mask_bt = torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]
    token_rewards_bt = torch.zeros(mask_bt.shape, dtype=torch.float64)
    for row, (reward, length) in enumerate(zip(rewards, lengths, strict=True)):
        token_rewards_bt[row, length - 1] = reward
    group_b = torch.zeros(len(rewards), dtype=torch.long)
    return advantage(name, token_rewards_bt=token_rewards_bt, mask_bt=mask_bt, group_b=group_b, **options)[0][
        :, 0
    ].tolist()


@pytest.mark.parametrize(
    ("name", "rewards", "options", "expected"),
    [
        ("grpo", [1, 0, 0, 0], {"eps": 0.0}, [1.5, -0.5, -0.5, -0.5]),
        ("grpo", [1, 0, 0, 0], {"std": False}, [0.75, -0.25, -0.25, -0.25]),
        ("grpo", [1, 1], {}, [0, 0]),
        ("grpo", [7], {}, [0]),
        ("grpo", [7], {"singleton": "reward"}, [7]),
        ("rloo", [1, 0, 0, 0], {}, [1, -1 / 3, -1 / 3, -1 / 3]),
        ("rloo", [3, 1], {}, [2, -2]),
        ("grpo_passk", [5, 3, 1], {"std": False}, [2, 0, 0]),
        ("grpo_passk", [5, 5, 1], {"std": False}, [0, 0, 0]),
        # C(2,2)/C(4,2) = 1/6: R = 5/6, σ = √5/6; wrong answers lose the subset of the two wrong: C(1,1)/C(3,1) = 1/3.
        ("passk", [1, 1, 0, 0], {"k": 2}, [1 / math.sqrt(5), 1 / math.sqrt(5), -1 / math.sqrt(5), -1 / math.sqrt(5)]),
        ("passk", [1, 0], {"k": 3}, [0, 0]),
        ("maxrl", [1, 0, 0, 0], {}, [3, -1, -1, -1]),
        ("maxrl", [-1, 0], {}, [0, 0]),
        ("opo", [1, 0], {}, [1 - 0.25, -0.25]),
        ("gpg", [1, 0], {}, [0.5, -0.5]),
        ("gpg", [1, 0], {"count": "rewards"}, [1, -1]),
        ("reinforce_plus_plus_baseline", [3, 3], {}, [0, 0]),
    ],
)
def test_values_by_hand(name, rewards, options, expected):
    lengths = [1, 3] if name == "opo" else [2] * len(rewards)
    assert by_hand(name, rewards, lengths, **options) == pytest.approx(expected)


def test_grpo_turns_by_hand_credits_no_turn_with_what_came_before() -> None:
    """Both episodes earn 1, the second in its second turn, where the first earns nothing."""
    advantages_bt, returns_bt = advantage(
        "grpo_turns",
        token_rewards_bt=torch.tensor([[1.0, 9.0, 0.0, 0.0], [0.0, 9.0, 9.0, 1.0]], dtype=torch.float64),
        mask_bt=torch.tensor([[1, 0, 1, 1], [1, 0, 0, 1]]),
        turn_starts_bt=torch.tensor([[1, 0, 1, 0], [1, 0, 0, 1]]).bool(),
        group_b=torch.tensor([5, 5]),
        std=False,
    )
    assert advantages_bt.tolist() == [[0, 0, -0.5, -0.5], [0, 0, 0, 0.5]]
    assert returns_bt.tolist() == [[1, 0, 0, 0], [1, 0, 0, 1]]


def test_gae_by_hand_carries_over_an_observation():
    advantages_bt, returns_bt = advantage(
        "gae",
        token_rewards_bt=torch.tensor([[0.0, 9.0, 1.0]], dtype=torch.float64),
        values_bt=torch.tensor([[0.4, 9.0, 0.8]], dtype=torch.float64),
        mask_bt=torch.tensor([[1, 0, 1]]),
        group_b=torch.tensor([0]),
        gamma=0.5,
        lam=0.5,
        whiten=False,
    )
    # δ₂ = 1 − 0.8 = 0.2 and δ₀ = 0.5·0.8 − 0.4 = 0; A₀ = 0 + 0.25·0.2.
    assert advantages_bt[0].tolist() == pytest.approx([0.05, 0, 0.2])
    assert returns_bt[0].tolist() == pytest.approx([0.45, 0, 1.0])


@pytest.mark.parametrize("name", ["grpo", "rloo", "maxrl", "gpg"])
def test_equal_rewards_give_exactly_nothing_also_in_fp32(name):
    advantages_bt, _ = advantage(
        name,
        token_rewards_bt=torch.full((7, 1), 0.3),
        mask_bt=torch.ones(7, 1),
        group_b=torch.zeros(7, dtype=torch.long),
    )
    assert not advantages_bt.any()


def test_long_answers_need_no_loop_over_tokens_to_be_right():
    rewards_bt = torch.zeros(1, 5000, dtype=torch.float64)
    rewards_bt[0, -1] = 1.0
    _, returns_bt = advantage(
        "reinforce_plus_plus",
        token_rewards_bt=rewards_bt,
        mask_bt=torch.ones(1, 5000),
        group_b=torch.tensor([0]),
        gamma=0.999,
    )
    assert returns_bt[0, 0].item() == pytest.approx(0.999**4999)
    assert returns_bt[0, 4000].item() == pytest.approx(0.999**999)


@pytest.mark.parametrize(("name", "needed"), [("gae", "values_bt.*critic"), ("remax", "greedy_rewards_b")])
def test_a_missing_tensor_is_refused(name, needed):
    with pytest.raises(InvalidJob, match=f"needs {needed}"):
        by_hand(name, [1, 0], [1, 1])


def test_estimators_that_need_a_critic_are_known():
    assert [name for name in names(AlgorithmKind.ADVANTAGE) if find(AlgorithmKind.ADVANTAGE, name).needs_critic] == [
        "gae"
    ]


def test_gdpo_refuses_weights_for_other_rewards():
    with pytest.raises(InvalidJob, match="2 weights for 3 rewards"):
        computed(Case("gdpo", {"weights": [1.0, 1.0]}), make_batch())


ORDERS = list(itertools.permutations((2.6, 2.8, 0.4, 2.3)))
"""Their sums differ in float32."""
COMPARING = ["gpg", "grpo", "grpo_passk", "maxrl", "opo", "reinforce_plus_plus_baseline", "rloo"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", COMPARING)
def test_equal_earnings_in_another_order_give_no_advantage(name: str, dtype: torch.dtype) -> None:
    token_rewards_bt = torch.tensor(ORDERS, dtype=dtype)
    inputs = {"token_rewards_bt": token_rewards_bt, "mask_bt": torch.ones(24, 4).bool(), "group_b": torch.zeros(24)}
    advantages_bt, _ = advantage(name, **inputs)
    assert advantages_bt.dtype == dtype and advantages_bt.abs().max() < 1e-9


def test_equal_earnings_from_a_turn_on_give_no_advantage_there() -> None:
    """All episodes earn the same, and the first turn of each is given."""
    token_rewards_bt = torch.tensor([[0.1, *parts] for parts in ORDERS])
    starts_bt = torch.tensor([[True, True, False, False, False]]).expand(24, 5)
    advantages_bt, _ = advantage(
        "grpo_turns",
        token_rewards_bt=token_rewards_bt,
        mask_bt=torch.ones(24, 5).bool(),
        group_b=torch.zeros(24),
        turn_starts_bt=starts_bt,
    )
    assert advantages_bt.abs().max() == 0


def test_of_two_equal_best_answers_none_is_alone() -> None:
    token_rewards_bt = torch.tensor([[2.6, 2.8, 0.4, 2.3], [0.4, 2.8, 2.3, 2.6], [2.3, 2.6, 2.8, 0.4], [0.0] * 4])
    inputs = {"token_rewards_bt": token_rewards_bt, "mask_bt": torch.ones(4, 4).bool(), "group_b": torch.zeros(4)}
    assert advantage("grpo_passk", **inputs)[0].abs().max() == 0
