"""Every policy loss against its paper's formula and finite differences, by hand, and exact over any split."""

import math
from dataclasses import dataclass, field

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from millrace.errors import InvalidJob
from millrace.rl.registry.catalogue import AGGREGATIONS, AlgorithmKind, find, names
from services.trainer.algorithms.aggregation import BatchTotals, combined, summarised
from services.trainer.algorithms.losses import entropy_bonus, policy_loss, selected_tokens
from services.trainer.algorithms.tokens import pack, unpack
from tests.rl import reference_losses as reference
from tests.rl.batches import Batch, make_batch, ragged
from tests.services.trainer.algorithms.test_aggregation import slow as slow_aggregate


@dataclass(frozen=True)
class Case:
    """A loss with options under which every branch of it is taken in the test batches."""

    name: str
    options: dict = field(default_factory=dict)

    def __str__(self) -> str:
        return f"{self.name}{self.options or ''}"


CASES = [
    Case("ppo"),
    Case("ppo", {"clip_low": 0.1, "clip_high": 0.28, "dual_clip": 1.3}),
    Case("ppo", {"dual_clip": None}),
    Case("decoupled_ppo"),
    Case("decoupled_ppo", {"cap": 1.1}),
    Case("gspo", {"clip_low": 0.05, "clip_high": 0.1}),
    Case("gspo", {"clip_low": 0.05, "clip_high": 0.1, "per_token": True}),
    Case("cispo"),
    Case("cispo", {"clip_low": 0.2, "clip_high": 0.2}),
    Case("sapo"),
    Case("sapo", {"tau_positive": 2.0, "tau_negative": 3.0}),
    Case("gmpo"),
    Case("gmpo", {"clip_low": 0.1, "clip_high": 0.2}),
    Case("gpg"),
    Case("dro"),
    Case("dro", {"beta": 2.0}),
    Case("clip_cov", {"fraction": 0.9, "bounds": (0.05, 1.0)}),
    Case("kl_cov", {"fraction": 0.1, "coefficient": 0.5}),
    Case("dppo_tv", {"low": 0.05, "high": 0.1, "cap": 1.2}),
    Case("dppo_kl", {"low": 0.01, "high": 0.02, "cap": 1.2}),
]
every_case = pytest.mark.parametrize("case", CASES, ids=str)
HORIZON = 10
SPLITS = 4 if settings().derandomize else 12
"""Of each loss and aggregation: `make test` tries fewer, and always the same."""


def computed(case: Case, batch: Batch, logprobs_bt: Tensor | None = None, **arguments):
    if "behaviour_logprobs_bt" in find(AlgorithmKind.POLICY_LOSS, case.name).inputs:
        arguments["behaviour_logprobs_bt"] = batch.rollout_logprobs_bt
    return policy_loss(
        case.name,
        logprobs_bt=batch.logprobs_bt if logprobs_bt is None else logprobs_bt,
        old_logprobs_bt=batch.old_logprobs_bt,
        advantages_bt=batch.advantages_bt,
        mask_bt=batch.mask_bt,
        horizon=HORIZON,
        **arguments,
        **case.options,
    )


def slowly(case: Case, batch: Batch, mode: str, moved_bt: Tensor | None = None) -> float:
    columns = (batch.logprobs_bt if moved_bt is None else moved_bt, batch.logprobs_bt, batch.old_logprobs_bt)
    rows = [ragged(values, batch.mask_bt) for values in (*columns, batch.rollout_logprobs_bt, batch.advantages_bt)]
    sequences = [reference.Tokens(*row) for row in zip(*rows, strict=True)]
    return slow_aggregate(mode, getattr(reference, case.name)(sequences, **case.options))


@every_case
@pytest.mark.parametrize("mode", ["token-mean", "seq-mean-token-mean", "seq-mean-token-sum-norm"])
@pytest.mark.parametrize("seed", range(2))
def test_equals_the_papers_formula(case, mode, seed):
    batch = make_batch(seed)
    loss, _ = computed(case, batch, aggregation=mode)
    assert loss.dtype == torch.float64
    assert loss.item() == pytest.approx(slowly(case, batch, mode), rel=1e-10)


@every_case
def test_gradients_against_finite_differences(case):
    batch = make_batch(7)
    logprobs_bt = batch.logprobs_bt.clone().requires_grad_()
    loss, metrics = computed(case, batch, logprobs_bt, aggregation="seq-mean-token-mean")
    loss.backward()
    assert not any(value.requires_grad for value in metrics.values())
    assert not logprobs_bt.grad[~batch.mask_bt].any(), "a place that does not count, NaN there, has no gradient"
    step = 1e-6
    for row, column in batch.mask_bt.nonzero().tolist():
        there = []
        for sign in (1, -1):
            moved_bt = batch.logprobs_bt.clone()
            moved_bt[row, column] += sign * step
            there.append(slowly(case, batch, "seq-mean-token-mean", moved_bt))
        expected = (there[0] - there[1]) / (2 * step)
        assert logprobs_bt.grad[row, column].item() == pytest.approx(expected, rel=1e-5, abs=1e-8)


@every_case
@pytest.mark.parametrize("mode", AGGREGATIONS)
def test_any_split_over_micro_batches_and_ranks_is_exact(case, mode):
    """Also where micro-batches are packed and padded to other widths; metrics too."""
    batch = make_batch(5)
    selected_bt = selected(case, batch)
    whole_bt = batch.logprobs_bt.clone().requires_grad_()
    extra = {} if selected_bt is None else {"selected_bt": selected_bt}
    loss, metrics = computed(case, batch, whole_bt, aggregation=mode, **extra)
    loss.backward()
    totals = BatchTotals.of(batch.mask_bt)

    @settings(max_examples=SPLITS)
    @given(homes=st.lists(st.integers(0, 3), min_size=10, max_size=10), columns=st.integers(0, 2))
    def check(homes: list[int], columns: int) -> None:
        split_bt = batch.logprobs_bt.clone().requires_grad_()
        losses, shares = [], []
        for home in set(homes):
            rows = [row for row in range(10) if homes[row] == home]
            part = batch.rows(rows).padded(columns)
            packed_p = pack(torch.nn.functional.pad(split_bt[rows], (0, columns)), [8 + columns] * len(rows))
            logprobs_bt = unpack(packed_p, [8 + columns] * len(rows))
            if selected_bt is not None:
                extra["selected_bt"] = torch.nn.functional.pad(selected_bt[rows], (0, columns), value=False)
            share, share_metrics = computed(case, part, logprobs_bt, aggregation=mode, totals=totals, **extra)
            share.backward()
            losses.append(share.item())
            shares.append(share_metrics)
        assert math.fsum(losses) == pytest.approx(loss.item(), rel=1e-10)
        torch.testing.assert_close(split_bt.grad, whole_bt.grad, rtol=1e-9, atol=1e-12)
        assert summarised(combined(shares)) == pytest.approx(summarised(metrics), rel=1e-9, abs=1e-12)

    check()


def selected(case: Case, batch: Batch) -> Tensor | None:
    return selected_tokens(
        case.name,
        logprobs_bt=batch.old_logprobs_bt,
        advantages_bt=batch.advantages_bt,
        mask_bt=batch.mask_bt,
        **case.options,
    )


@every_case
def test_order_and_padding_do_not_matter(case):
    batch = make_batch(6)
    order = [3, 9, 0, 1, 8, 7, 2, 5, 6, 4]
    assert computed(case, batch.rows(order).padded(4))[0].item() == pytest.approx(computed(case, batch)[0].item())


@every_case
def test_fp32_stays_fp32_and_close(case):
    batch = make_batch(6)
    loss, metrics = computed(case, batch.to(torch.float32))
    assert loss.dtype == torch.float32
    assert loss.item() == pytest.approx(computed(case, batch)[0].item(), rel=1e-4)
    assert all(value.isfinite().all() for value in metrics.values())


@every_case
def test_weights_multiply_each_token_and_carry_no_gradient(case):
    batch = make_batch(8)
    weights_bt = batch.values_bt.exp().requires_grad_()
    weighted, _ = computed(case, batch, weights_bt=weights_bt, aggregation="token-sum")
    assert not weighted.requires_grad
    by_token = [
        weights_bt[row, column].item()
        * computed(case, batch, weights_bt=one_at(batch, row, column), aggregation="token-sum")[0].item()
        for row, column in batch.mask_bt.nonzero().tolist()
    ]
    assert weighted.item() == pytest.approx(math.fsum(by_token))


def one_at(batch: Batch, row: int, column: int) -> Tensor:
    weights_bt = torch.zeros_like(batch.values_bt)
    weights_bt[row, column] = 1.0
    return weights_bt


@every_case
def test_policies_far_apart_and_certain_tokens_stay_finite(case):
    batch = make_batch(9).to(torch.float32)
    logprobs_bt = torch.where(batch.mask_bt, 0.0, math.nan)
    batch.old_logprobs_bt[0] = -90.0
    logprobs_bt[1] = -90.0
    logprobs_bt.requires_grad_()
    loss, _ = computed(case, batch, logprobs_bt)
    loss.backward()
    assert loss.isfinite() and logprobs_bt.grad[batch.mask_bt].isfinite().all()


def test_every_loss_is_tested():
    assert {case.name for case in CASES} == set(names(AlgorithmKind.POLICY_LOSS))


def one_token(
    name: str, *, log_ratio: float, advantage: float, old: float = -1.0, **options
) -> tuple[float, float, dict]:
    """Loss and gradient of a batch of one token."""
    logprobs_bt = torch.tensor([[old + log_ratio]], dtype=torch.float64, requires_grad=True)
    loss, metrics = policy_loss(
        name,
        logprobs_bt=logprobs_bt,
        old_logprobs_bt=torch.tensor([[old]], dtype=torch.float64),
        advantages_bt=torch.tensor([[advantage]], dtype=torch.float64),
        mask_bt=torch.ones(1, 1),
        **options,
    )
    loss.backward()
    return loss.item(), logprobs_bt.grad.item(), summarised(metrics)


HALF, DOUBLE, TENFOLD = math.log(0.5), math.log(2.0), math.log(10.0)


@pytest.mark.parametrize(
    ("name", "log_ratio", "advantage", "options", "loss", "gradient"),
    [
        ("ppo", 0.0, 2.0, {}, -2.0, -2.0),
        ("ppo", DOUBLE, 1.0, {}, -1.2, 0.0),  # clipped above
        ("ppo", HALF, 1.0, {}, -0.5, -0.5),
        ("ppo", HALF, -1.0, {}, 0.8, 0.0),  # clipped below
        ("ppo", DOUBLE, -1.0, {}, 2.0, 2.0),
        ("ppo", TENFOLD, -1.0, {}, 3.0, 0.0),  # dual clip
        ("ppo", TENFOLD, -1.0, {"dual_clip": None}, 10.0, 10.0),
        ("gspo", 0.0, 1.0, {}, -1.0, -1.0),
        ("gspo", DOUBLE, 1.0, {}, -1.0004, 0.0),
        ("cispo", TENFOLD, 1.0, {}, -5 * (TENFOLD - 1), -5.0),
        ("cispo", HALF, 1.0, {}, -0.5 * (HALF - 1), -0.5),
        ("sapo", 0.0, 1.0, {}, -2.0, -1.0),
        ("sapo", 0.0, -1.0, {}, 2 / 1.05, 1.0),
        ("gmpo", 1.0, 1.0, {}, -math.exp(0.4), 0.0),
        ("gmpo", -1.0, 1.0, {}, -math.exp(-1), -math.exp(-1)),
        ("gpg", DOUBLE, 3.0, {}, -3 * (DOUBLE - 1), -3.0),
        ("dro", 0.0, 2.0, {}, 2.0, -2.0),
        ("dro", DOUBLE, 3.0, {"beta": 0.5}, -3 * (DOUBLE - 1) + DOUBLE**2 / 4, -3 + DOUBLE / 2),
        ("dro", -50.0, -1.0, {}, -51.0 + 125.0, 1 - 5.0),  # the penalty pulls back, however far off
        ("kl_cov", DOUBLE, 1.0, {}, -2 + DOUBLE, -2 + 1),
        ("dppo_tv", 0.0, 1.0, {}, 1.0, -1.0),
        ("dppo_tv", DOUBLE, 1.0, {}, 0.0, 0.0),  # e^-1·(2 − 1) = 0.37 above 0.15
        ("dppo_tv", DOUBLE, -1.0, {}, 2 * (DOUBLE - 1), 2.0),
        ("dppo_kl", DOUBLE, 1.0, {}, 0.0, 0.0),
        ("dppo_kl", DOUBLE, -1.0, {}, 2 * (DOUBLE - 1), 2.0),
    ],
)
def test_values_by_hand(name, log_ratio, advantage, options, loss, gradient):
    got = one_token(name, log_ratio=log_ratio, advantage=advantage, **options)
    assert got[:2] == pytest.approx((loss, gradient))


@pytest.mark.parametrize(
    ("name", "log_ratio", "advantage", "options", "shares"),
    [
        ("gspo", DOUBLE, 1.0, {}, {"clip_fraction": 1, "clip_fraction_high": 1, "clip_fraction_low": 0}),
        ("gspo", HALF, -1.0, {}, {"clip_fraction": 1, "clip_fraction_high": 0, "clip_fraction_low": 1}),
        ("cispo", TENFOLD, 1.0, {}, {"clip_fraction": 1, "clip_fraction_high": 1, "clip_fraction_low": 0}),
        ("cispo", HALF, 1.0, {"clip_low": 0.2}, {"clip_fraction": 1, "clip_fraction_high": 0, "clip_fraction_low": 1}),
        ("gmpo", 1.0, 1.0, {}, {"clip_fraction": 1, "clip_fraction_high": 1, "clip_fraction_low": 0}),
        ("gmpo", -1.0, -1.0, {}, {"clip_fraction": 1, "clip_fraction_high": 0, "clip_fraction_low": 1}),
        ("gmpo", -1.0, 1.0, {}, {"clip_fraction": 0, "clip_fraction_high": 0, "clip_fraction_low": 0}),
        ("sapo", 0.0, 1.0, {}, {"gate_slope": 1}),
        ("sapo", DOUBLE, 1.0, {}, {"gate_slope": 1 / math.cosh(0.5) ** 2}),
        ("clip_cov", 0.0, 1.0, {"bounds": (-1.0, 1.0)}, {"cov_fraction": 1, "clip_fraction": 0}),
        ("clip_cov", DOUBLE, 1.0, {"bounds": (-1.0, 1.0)}, {"cov_fraction": 0, "clip_fraction": 1}),
        ("dro", DOUBLE, 1.0, {"beta": 0.5}, {"quadratic_penalty": DOUBLE**2 / 4}),
        ("kl_cov", 0.0, 1.0, {}, {"cov_fraction": 1}),
        ("dppo_tv", DOUBLE, 1.0, {"cap": 1.5}, {"clip_fraction": 1, "cap_fraction": 1}),
        ("dppo_tv", DOUBLE, -1.0, {}, {"clip_fraction": 0, "cap_fraction": 0}),
        ("dppo_kl", DOUBLE, 1.0, {"cap": 1.5}, {"clip_fraction": 1, "cap_fraction": 1}),
        ("dppo_kl", HALF, -1.0, {}, {"clip_fraction": 1, "cap_fraction": 0}),
        ("decoupled_ppo", 0.0, 1.0, {"cap": 1.5}, {"behaviour_cap_fraction": 1, "behaviour_weight": 0}),
        ("decoupled_ppo", 0.0, 1.0, {}, {"behaviour_weight": 2, "clip_fraction": 0}),
    ],
)
def test_what_each_loss_reports_by_hand(name, log_ratio, advantage, options, shares):
    if name == "decoupled_ppo":  # the policy that generated gave the token half the probability
        options = {**options, "behaviour_logprobs_bt": torch.tensor([[-1.0 + HALF]], dtype=torch.float64)}
    numbers = one_token(name, log_ratio=log_ratio, advantage=advantage, **options)[2]
    assert {key: numbers[key] for key in shares} == pytest.approx(shares)


def test_metrics_by_hand():
    batch = dict(
        logprobs_bt=torch.tensor([[DOUBLE, HALF, TENFOLD, 9.0]]) - 3,
        old_logprobs_bt=torch.tensor([[0.0, 0.0, 0.0, 0.0]]) - 3,
        advantages_bt=torch.tensor([[1.0, -1.0, -1.0, 1.0]]),
        mask_bt=torch.tensor([[1, 1, 1, 0]]),
        entropy_bt=torch.tensor([[1.0, 2.0, 3.0, 99.0]]),
    )
    loss, metrics = policy_loss("ppo", **batch)
    numbers = summarised(metrics)
    assert numbers["policy_loss"] == loss.item() == pytest.approx((-1.2 + 0.8 + 3.0) / 3)
    assert numbers["clip_fraction"] == pytest.approx(2 / 3)
    assert numbers["clip_fraction_high"] == numbers["clip_fraction_low"] == pytest.approx(1 / 3)
    assert numbers["dual_clip_fraction"] == pytest.approx(1 / 3)
    assert numbers["approx_kl"] == pytest.approx(-(DOUBLE + HALF + TENFOLD) / 3)
    assert (numbers["ratio_min"], numbers["ratio_max"]) == pytest.approx((0.5, 10.0))
    assert numbers["ratio_p50"] == pytest.approx(2.0, rel=0.01)
    assert numbers["entropy"] == pytest.approx(2.0)


@pytest.mark.parametrize(("old", "log_ratio", "advantage"), [(0.0, -1.0, -1.0), (-1.0, 1.0, 1.0)])
def test_dppo_kl_knows_the_divergence_from_and_to_certainty(old, log_ratio, advantage):
    loss, gradient, numbers = one_token("dppo_kl", old=old, log_ratio=log_ratio, advantage=advantage)
    assert (loss, gradient, numbers["clip_fraction"]) == (0, 0, 1)


def test_gspo_forms_agree_where_the_advantage_is_constant_and_only_there():
    for sequence_advantages, agree in ((True, True), (False, False)):
        batch = make_batch(1, sequence_advantages=sequence_advantages)
        gradients = []
        for per_token in (False, True):
            logprobs_bt = batch.logprobs_bt.clone().requires_grad_()
            case = Case("gspo", {"per_token": per_token, "clip_low": 0.3, "clip_high": 0.3})
            computed(case, batch, logprobs_bt, aggregation="seq-mean-token-mean")[0].backward()
            gradients.append(logprobs_bt.grad)
        assert torch.allclose(*gradients) is agree


def test_a_fraction_of_the_tokens_is_picked_the_same_for_any_order():
    torch.manual_seed(0)
    logprobs_bt, advantages_bt = -torch.rand(40, 50), torch.randn(40, 50)
    mask_bt = torch.rand(40, 50) < 0.8
    tokens = int(mask_bt.sum())
    for name, options in (("kl_cov", {"fraction": 0.01}), ("clip_cov", {"fraction": 0.01, "bounds": (0.1, 5.0)})):
        arguments = {"logprobs_bt": logprobs_bt, "advantages_bt": advantages_bt, "mask_bt": mask_bt}
        selected_bt = selected_tokens(name, **arguments, **options)
        assert selected_bt.sum() == int(0.01 * tokens)
        assert not (selected_bt & ~mask_bt).any()
        flipped = {key: value.flip(0) for key, value in arguments.items()}
        assert selected_tokens(name, **flipped, **options).flip(0).equal(selected_bt)
    assert selected_tokens("ppo", logprobs_bt=logprobs_bt, advantages_bt=advantages_bt, mask_bt=mask_bt) is None


def test_entropy_bonus_by_hand():
    entropy_bt = torch.tensor([[1.0, 3.0, math.nan]], requires_grad=True)
    bonus = entropy_bonus(entropy_bt, torch.tensor([[1, 1, 0]]), coefficient=0.5)
    bonus.backward()
    assert bonus.item() == pytest.approx(-1.0)
    assert entropy_bt.grad[0].tolist() == pytest.approx([-0.25, -0.25, 0.0])


@pytest.mark.parametrize(
    ("name", "options"), [("gspo", {}), ("gspo", {"per_token": True}), ("gmpo", {"clip_low": 60.0})]
)
def test_a_token_far_off_counts_whole_in_the_mean_of_its_sequence(name, options):
    """One token of 8 is 50 nats off, beyond the ±20 of the clamp. With A < 0 nothing is clipped from above."""
    log_ratio_bt = torch.tensor([[-50.0] + [8.0] * 7])
    logprobs_bt = torch.full((1, 8), -60.0, requires_grad=True)
    loss, _ = policy_loss(
        name,
        logprobs_bt=logprobs_bt,
        old_logprobs_bt=(logprobs_bt - log_ratio_bt).detach(),
        advantages_bt=-torch.ones(1, 8),
        mask_bt=torch.ones(1, 8),
        aggregation="seq-mean-token-mean",
        **options,
    )
    assert loss.item() == pytest.approx(math.exp((7 * 8 - 50) / 8), rel=1e-5)


def test_refusals():
    batch = make_batch()
    with pytest.raises(InvalidJob, match="no such policy loss"):
        computed(Case("pop"), batch)
    with pytest.raises(InvalidJob, match=r"clip_low: 2\.0: "):
        computed(Case("ppo", {"clip_low": 2.0}), batch)
    with pytest.raises(InvalidJob, match="needs behaviour_logprobs_bt"):
        one_token("decoupled_ppo", log_ratio=0.0, advantage=1.0)
    with pytest.raises(ValueError, match=r"logprobs_bt is \(10, 7\) but mask_bt is \(10, 8\)"):
        computed(Case("ppo"), batch, batch.logprobs_bt[:, 1:])
