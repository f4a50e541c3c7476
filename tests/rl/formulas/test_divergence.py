"""KL estimators: values, gradients, and what each gradient is the gradient of."""

import math

import pytest
import torch

from millrace.rl.formulas.divergence import adapted, kl, penalised
from millrace.rl.registry.catalogue import KL_ESTIMATORS

VALUE = {
    "k1": lambda d: -d,
    "k2": lambda d: d * d / 2,
    "k3": lambda d: math.exp(d) - d - 1,
    "abs": abs,
}


@pytest.mark.parametrize("name", KL_ESTIMATORS)
def test_value_is_the_formula(name):
    logprobs_bt = torch.tensor([[-1.0, -0.2, -3.0]], dtype=torch.float64)
    ref_bt = torch.tensor([[-1.5, -0.2, -0.5]], dtype=torch.float64)
    estimate_bt = kl(name, logprobs_bt, ref_bt)
    assert estimate_bt.dtype == torch.float64
    expected = [VALUE[name.rstrip("+")](d) for d in (-0.5, 0.0, 2.5)]
    assert estimate_bt[0].tolist() == pytest.approx(expected, abs=1e-12)


def policies() -> tuple[torch.Tensor, torch.Tensor]:
    logits = torch.tensor([0.3, -1.0, 0.8, 0.1], dtype=torch.float64, requires_grad=True)
    ref_logits = torch.tensor([-0.2, 0.5, 0.4, 0.0], dtype=torch.float64)
    return logits, torch.log_softmax(ref_logits, 0)


def expected_gradient(name: str) -> torch.Tensor:
    """Of the estimator as a loss, over all tokens that the policy may sample."""
    logits, ref = policies()
    logprobs = torch.log_softmax(logits, 0)
    loss = (logprobs.exp().detach() * kl(name, logprobs, ref)).sum()
    return torch.autograd.grad(loss, logits)[0]


def exact_gradient(forward: bool) -> torch.Tensor:
    logits, ref = policies()
    logprobs = torch.log_softmax(logits, 0)
    divergence = (ref.exp() * (ref - logprobs)) if forward else (logprobs.exp() * (logprobs - ref))
    return torch.autograd.grad(divergence.sum(), logits)[0]


def test_as_a_loss_each_estimator_has_the_gradient_that_is_said():
    torch.testing.assert_close(expected_gradient("k1"), torch.zeros(4, dtype=torch.float64))
    for name in ("k2", "k1+", "k3+", "abs+"):
        torch.testing.assert_close(expected_gradient(name), exact_gradient(forward=False))
    torch.testing.assert_close(expected_gradient("k3"), exact_gradient(forward=True))


@pytest.mark.parametrize("name", ["k1", "k2", "k3", "abs"])
def test_gradients_against_finite_differences(name):
    ref_bt = torch.tensor([[-1.5, -0.3, -0.5]], dtype=torch.float64)
    logprobs_bt = torch.tensor([[-1.0, -0.2, -3.0]], dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: kl(name, x, ref_bt), logprobs_bt)


def test_k3_stays_finite_where_the_policies_are_far_apart():
    assert kl("k3", torch.tensor([[-200.0]]), torch.tensor([[0.0]])).isfinite().all()


def test_an_unknown_name_is_refused():
    with pytest.raises(ValueError, match="choose one of k1"):
        kl("k4", torch.zeros(1, 1), torch.zeros(1, 1))


def test_penalised_rewards_read_nothing_outside_the_mask():
    rewards_bt = torch.tensor([[0.0, 1.0, math.nan]])
    penalised_bt = penalised(rewards_bt, torch.tensor([[2.0, -1.0, math.inf]]), torch.tensor([[1, 1, 0]]), 0.1)
    assert penalised_bt[0].tolist() == pytest.approx([-0.2, 1.1, 0.0])


@pytest.mark.parametrize(("observed", "expected"), [(6.0, 0.2), (12.0, 0.2 * 1.02), (0.0, 0.2 * 0.98), (6.6, 0.202)])
def test_the_adaptive_coefficient_by_hand(observed, expected):
    assert adapted(0.2, observed=observed, target=6.0, horizon=1000, samples=100) == pytest.approx(expected)
