"""Every distillation loss against its formula on plain lists, its expected gradient, and any split of a batch."""

import math
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from millrace.errors import InvalidJob
from millrace.rl.registry.catalogue import AGGREGATIONS, AlgorithmKind, find, names
from services.trainer.algorithms.aggregation import BatchTotals, combined, summarised
from services.trainer.algorithms.losses import distillation_loss
from tests.rl.batches import make_batch
from tests.services.trainer.algorithms.test_aggregation import slow as slow_aggregate

VOCABULARY, TOP, HORIZON = 9, 4, 10


@dataclass(frozen=True)
class Case:
    """A loss with options under which every branch of it is taken in the test batches."""

    name: str
    options: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        return f"{self.name}{self.options or ''}"


CASES = [
    Case("k1"),
    Case("k1", {"cap": 0.5}),
    Case("k3"),
    Case("forward_kl_topk"),
    Case("forward_kl_topk", {"rest": False}),
]
every_case = pytest.mark.parametrize("case", CASES, ids=str)
Tensors = dict[str, Tensor]


def make_tensors(seed: int = 0) -> Tensors:
    """A ragged batch with gaps, float64: distributions of policy and teacher in each place, and sampled tokens."""
    mask_bt, generator = make_batch(seed).mask_bt, torch.Generator().manual_seed(seed)
    shape = (*mask_bt.shape, VOCABULARY)
    policy, old, teacher = (
        (1.5 * torch.randn(shape, generator=generator, dtype=torch.float64)).log_softmax(-1) for _ in range(3)
    )
    sampled_bt1 = torch.randint(0, VOCABULARY, (*mask_bt.shape, 1), generator=generator)
    top = teacher.topk(TOP, dim=-1)
    given = {
        "logprobs_bt": policy.gather(-1, sampled_bt1)[..., 0],
        "old_logprobs_bt": old.gather(-1, sampled_bt1)[..., 0],
        "teacher_logprobs_bt": teacher.gather(-1, sampled_bt1)[..., 0],
        "weights_bt": torch.rand(mask_bt.shape, generator=generator, dtype=torch.float64) + 0.5,
        "top_logprobs_btk": policy.gather(-1, top.indices),
        "teacher_top_logprobs_btk": top.values,
    }
    blanked = {
        key: value.masked_fill(~(mask_bt if value.dim() == 2 else mask_bt[..., None]), math.nan)
        for key, value in given.items()
    }
    return {**blanked, "mask_bt": mask_bt}


def slow(case: Case, tensors: Tensors, moved: Tensors | None = None) -> list[list[float]]:
    """The loss of each token that counts, in plain numbers. `moved` has what is differentiated."""
    rows = []
    for row, counted in enumerate(tensors["mask_bt"].tolist()):
        losses = []
        for place, counts in enumerate(counted):
            if counts:
                at = {key: value[row, place].tolist() for key, value in tensors.items()}
                now = {key: value[row, place].tolist() for key, value in (moved or tensors).items()}
                losses.append(slow_token(case, at, now))
        rows.append(losses)
    return rows


def slow_token(case: Case, at: dict[str, Any], now: dict[str, Any]) -> float:
    if case.name == "k1":
        cost, cap = at["logprobs_bt"] - at["teacher_logprobs_bt"], case.options.get("cap", math.inf)
        return math.exp(now["logprobs_bt"] - at["old_logprobs_bt"]) * min(max(cost, -cap), cap) * at["weights_bt"]
    if case.name == "k3":
        apart = at["teacher_logprobs_bt"] - now["logprobs_bt"]
        return math.exp(apart) - apart - 1
    teacher, policy = at["teacher_top_logprobs_btk"], now["top_logprobs_btk"]
    total = sum(math.exp(t) * (t - p) for t, p in zip(teacher, policy, strict=True))
    if case.options.get("rest", True):
        rest, rest_of_policy = (1 - sum(map(math.exp, logprobs)) for logprobs in (teacher, policy))
        total += rest * (math.log(rest) - math.log(rest_of_policy))
    return total


def computed(case: Case, tensors: Tensors, **arguments: Any) -> tuple[Tensor, Tensors]:
    return distillation_loss(case.name, **tensors, horizon=HORIZON, **arguments, **case.options)


def with_gradient(tensors: Tensors) -> Tensors:
    leaves = {key: tensors[key].clone().requires_grad_() for key in ("logprobs_bt", "top_logprobs_btk")}
    return {**tensors, **leaves}


@every_case
@pytest.mark.parametrize("mode", ["token-mean", "seq-mean-token-mean", "seq-mean-token-sum-norm"])
def test_equals_the_formula(case: Case, mode: str) -> None:
    for seed in range(2):
        tensors = make_tensors(seed)
        loss, metrics = computed(case, tensors, aggregation=mode)
        assert loss.item() == pytest.approx(slow_aggregate(mode, slow(case, tensors)), rel=1e-10)
        assert metrics["distillation/loss"] == loss


@every_case
def test_gradients_against_finite_differences(case: Case) -> None:
    tensors = with_gradient(make_tensors(3))
    loss, metrics = computed(case, tensors)
    loss.backward()
    assert not any(value.requires_grad for value in metrics.values())
    still = {key: value.detach() for key, value in tensors.items()}
    step = 1e-6
    for key in ("logprobs_bt", "top_logprobs_btk"):
        grad = tensors[key].grad if tensors[key].grad is not None else torch.zeros_like(still[key])
        assert not grad[~tensors["mask_bt"]].any(), "a place that does not count, NaN there, has no gradient"
        for place in [tuple(each) for each in still[key].isfinite().nonzero().tolist()][::7]:
            there = []
            for sign in (1, -1):
                moved = {**still, key: still[key].clone()}
                moved[key][place] += sign * step
                there.append(slow_aggregate("token-mean", slow(case, still, moved)))
            assert grad[place].item() == pytest.approx((there[0] - there[1]) / (2 * step), rel=1e-5, abs=1e-8)


@every_case
@pytest.mark.parametrize("mode", AGGREGATIONS)
def test_any_split_over_micro_batches_and_ranks_is_exact(case: Case, mode: str) -> None:
    whole = with_gradient(make_tensors(5))
    loss, metrics = computed(case, whole, aggregation=mode)
    loss.backward()
    totals = BatchTotals.of(whole["mask_bt"])

    @settings(max_examples=10)
    @given(homes=st.lists(st.integers(0, 3), min_size=10, max_size=10), columns=st.integers(0, 2))
    def check(homes: list[int], columns: int) -> None:
        split = with_gradient(make_tensors(5))
        losses, shares = [], []
        for home in set(homes):
            rows = [row for row in range(10) if homes[row] == home]
            part = {key: wider(value[rows], columns) for key, value in split.items()}
            share, told = computed(case, part, aggregation=mode, totals=totals)
            share.backward()
            losses.append(share.item())
            shares.append(told)
        assert math.fsum(losses) == pytest.approx(loss.item(), rel=1e-10)
        for key in ("logprobs_bt", "top_logprobs_btk"):
            if whole[key].grad is not None:
                torch.testing.assert_close(split[key].grad, whole[key].grad, rtol=1e-9, atol=1e-12)
        assert summarised(combined(shares)) == pytest.approx(summarised(metrics), rel=1e-9, abs=1e-12)

    check()


def wider(values: Tensor, columns: int) -> Tensor:
    filler = False if values.dtype == torch.bool else math.nan
    return torch.nn.functional.pad(values, (*(0, 0) * (values.dim() - 2), 0, columns), value=filler)


def kl(p: Tensor, q: Tensor) -> Tensor:
    return (p.exp() * (p - q)).sum()


@pytest.mark.parametrize(("name", "reverse"), [("k1", True), ("k3", False), ("forward_kl_topk", False)])
def test_the_expected_gradient_is_that_of_a_kl(name: str, reverse: bool) -> None:
    """Over all tokens that the policy may sample, each with its probability: KL(π‖p) for k1, KL(p‖π) for the others."""
    torch.manual_seed(0)
    teacher = torch.randn(VOCABULARY, dtype=torch.float64).log_softmax(-1)
    logits = torch.randn(VOCABULARY, dtype=torch.float64, requires_grad=True)
    policy = logits.log_softmax(-1)
    (exact,) = torch.autograd.grad(kl(policy, teacher) if reverse else kl(teacher, policy), logits, retain_graph=True)
    expected = torch.zeros_like(logits)
    for token in range(VOCABULARY):
        tensors = {
            "logprobs_bt": policy[token].view(1, 1),
            "old_logprobs_bt": policy[token].detach().view(1, 1),
            "teacher_logprobs_bt": teacher[token].view(1, 1),
            "mask_bt": torch.ones(1, 1),
            "top_logprobs_btk": policy.view(1, 1, -1),
            "teacher_top_logprobs_btk": teacher.view(1, 1, -1),
        }
        loss, _ = distillation_loss(name, **tensors)
        (grad,) = torch.autograd.grad(loss, logits, retain_graph=True)
        expected += policy[token].exp().item() * grad
    torch.testing.assert_close(expected, exact, rtol=1e-6, atol=1e-9)


def test_the_forward_kl_is_0_where_they_agree_and_never_negative() -> None:
    tensors = make_tensors(4)
    same = tensors | {"top_logprobs_btk": tensors["teacher_top_logprobs_btk"]}
    assert distillation_loss("forward_kl_topk", **same)[0].item() == pytest.approx(0, abs=1e-12)
    for seed in range(20):
        assert distillation_loss("forward_kl_topk", **make_tensors(seed))[0].item() > 0
    numbers = summarised(distillation_loss("forward_kl_topk", **same)[1])
    assert 0 < numbers["distillation/teacher_mass"] < 1
    assert numbers["distillation/student_mass"] == pytest.approx(numbers["distillation/teacher_mass"])


def test_certain_distributions_stay_finite() -> None:
    """The policy gives all of its mass to the teacher's tokens, or none."""
    teacher = torch.tensor([[[0.6, 0.3]]]).log()
    for student in ([0.7, 0.3], [1e-30, 1e-30]):
        top = torch.tensor([[student]]).log().requires_grad_()
        ones = torch.zeros(1, 1)
        loss, _ = distillation_loss(
            "forward_kl_topk",
            logprobs_bt=ones,
            old_logprobs_bt=ones,
            teacher_logprobs_bt=ones,
            mask_bt=torch.ones(1, 1),
            top_logprobs_btk=top,
            teacher_top_logprobs_btk=teacher,
        )
        loss.backward()
        assert loss.isfinite() and top.grad.isfinite().all()


def test_every_loss_is_tested() -> None:
    assert {case.name for case in CASES} == set(names(AlgorithmKind.DISTILLATION))


def test_refusals() -> None:
    tensors = make_tensors()
    with pytest.raises(InvalidJob, match="no such distillation loss"):
        distillation_loss("k9", **tensors)
    bare = {key: value for key, value in tensors.items() if "top" not in key}
    with pytest.raises(InvalidJob, match="needs teacher_top_logprobs_btk, top_logprobs_btk"):
        distillation_loss("forward_kl_topk", **bare)
    with pytest.raises(ValueError, match=r"teacher_logprobs_bt is \(10, 7\)"):
        distillation_loss("k3", **tensors | {"teacher_logprobs_bt": tensors["teacher_logprobs_bt"][:, 1:]})
    assert "old_logprobs_bt" not in find(AlgorithmKind.DISTILLATION, "k3").inputs
