"""Log-probabilities and entropy from logits against torch's own, forward and backward."""

import pytest
import torch

from services.trainer.backends.fsdp2.head import token_scores


def plain(logits_rv: torch.Tensor, targets_r: torch.Tensor, temperature: float) -> tuple[torch.Tensor, torch.Tensor]:
    distribution = torch.distributions.Categorical(logits=logits_rv.double() / temperature)
    return distribution.log_prob(targets_r), distribution.entropy()


@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("chunk_bytes", [1 << 20, 4 * 50 * 3])
def test_values_and_gradients(temperature: float, chunk_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("services.trainer.backends.fsdp2.head.CHUNK_BYTES", chunk_bytes)
    torch.manual_seed(0)
    logits_rv = (3 * torch.randn(11, 50)).requires_grad_()
    twin_rv = logits_rv.detach().double().requires_grad_()
    targets_r, weights_r, bonus_r = torch.randint(0, 50, (11,)), torch.randn(11), torch.randn(11)
    logprobs_r, entropy_r = token_scores(logits_rv, targets_r, temperature)
    expected_r, expected_entropy_r = plain(twin_rv, targets_r, temperature)
    torch.testing.assert_close(logprobs_r.double(), expected_r, atol=1e-5, rtol=1e-6)
    torch.testing.assert_close(entropy_r.double(), expected_entropy_r, atol=1e-5, rtol=1e-6)
    ((logprobs_r * weights_r).sum() + (entropy_r * bonus_r).sum()).backward()
    ((expected_r * weights_r).sum() + (expected_entropy_r * bonus_r).sum()).backward()
    assert logits_rv.grad is not None and twin_rv.grad is not None
    torch.testing.assert_close(logits_rv.grad.double(), twin_rv.grad, atol=1e-5, rtol=1e-5)


def test_gradient_of_either_alone() -> None:
    torch.manual_seed(1)
    for which in (0, 1):
        logits_rv = torch.randn(4, 9, requires_grad=True)
        twin_rv = logits_rv.detach().double().requires_grad_()
        targets_r = torch.randint(0, 9, (4,))
        given = token_scores(logits_rv, targets_r, 1.0)[which]
        given.sum().backward()
        plain(twin_rv, targets_r, 1.0)[which].sum().backward()
        assert logits_rv.grad is not None and twin_rv.grad is not None
        torch.testing.assert_close(logits_rv.grad.double(), twin_rv.grad, atol=1e-6, rtol=1e-5)


def test_bfloat16_logits_are_summed_in_float32() -> None:
    torch.manual_seed(2)
    logits_rv = torch.randn(3, 5000).bfloat16()
    targets_r = torch.randint(0, 5000, (3,))
    logprobs_r, entropy_r = token_scores(logits_rv, targets_r, 1.0)
    assert logprobs_r.dtype is entropy_r.dtype is torch.float32
    torch.testing.assert_close(logprobs_r.double(), plain(logits_rv, targets_r, 1.0)[0], atol=1e-5, rtol=1e-6)


def test_no_tokens() -> None:
    logits_rv = torch.randn(0, 7, requires_grad=True)
    logprobs_r, _ = token_scores(logits_rv, torch.zeros(0).long(), 1.0)
    logprobs_r.sum().backward()
    assert logits_rv.grad is not None and logits_rv.grad.shape == (0, 7)
