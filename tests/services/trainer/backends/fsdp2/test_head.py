"""Token scores from hidden states against those from the model's own logits."""

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM, Gemma2Config, LlamaConfig, PreTrainedModel, Qwen3Config

from services.trainer.backends.fsdp2 import head
from services.trainer.backends.fsdp2.logits import token_scores
from services.trainer.backends.head import VocabularyPart, WantedTokens, scores

SIZES = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
}


def model(kind: type, **changes: object) -> PreTrainedModel:
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(kind(**{**SIZES, **changes}), dtype=torch.float32)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("kind", [Qwen3Config, LlamaConfig])
@pytest.mark.parametrize("chunk_tokens", [2, 1024])
def test_scores_and_gradients_are_those_of_the_logits(kind: type, tied: bool, chunk_tokens: int) -> None:
    plain, chunked = (model(kind, tie_word_embeddings=tied) for _ in range(2))
    assert head.install(chunked, chunk_tokens)
    tokens, positions_r = torch.arange(9)[None], torch.tensor([1, 2, 5, 7])
    targets_r = tokens[0, positions_r + 1]
    logits_rv = plain(input_ids=tokens, logits_to_keep=positions_r).logits[0]
    logprobs_r, entropy_r = token_scores(logits_rv, targets_r, 0.7)
    scores_2r = chunked(input_ids=tokens, wanted=WantedTokens(positions_r, targets_r, 0.7))
    assert entropy_r is not None
    torch.testing.assert_close(scores_2r, torch.stack([logprobs_r, entropy_r]), atol=1e-5, rtol=1e-5)
    weights_2r = torch.randn(2, 4)
    (torch.stack([logprobs_r, entropy_r]) * weights_2r).sum().backward()
    (scores_2r * weights_2r).sum().backward()
    for (name, expected), given in zip(plain.named_parameters(), chunked.parameters(), strict=True):
        torch.testing.assert_close(given.grad, expected.grad, atol=1e-6, rtol=1e-4, msg=name)


@pytest.mark.parametrize("chunk_tokens", [2, 1024])
def test_further_tokens_are_scored_as_from_the_logits(chunk_tokens: int) -> None:
    """The target may be among them, and one of them twice."""
    plain, chunked = (model(Qwen3Config) for _ in range(2))
    assert head.install(chunked, chunk_tokens)
    tokens, positions_r = torch.arange(9)[None], torch.tensor([1, 2, 5, 7])
    targets_r, others_rk = tokens[0, positions_r + 1], torch.tensor([[2, 0, 60], [9, 9, 1], [4, 6, 8], [8, 3, 2]])
    logits_rv = plain(input_ids=tokens, logits_to_keep=positions_r).logits[0]
    columns = torch.cat([targets_r[:, None], others_rk], dim=1)
    log_p = (logits_rv / 0.7).log_softmax(-1)
    exact_kr = torch.cat([log_p.gather(1, columns), -(log_p.exp() * log_p).sum(-1)[:, None]], dim=1).t()[
        [0, 4, 1, 2, 3]
    ]
    from_logits_kr = token_scores(logits_rv, targets_r, 0.7, others_rk)
    scores_kr = chunked(input_ids=tokens, wanted=WantedTokens(positions_r, targets_r, 0.7, others_rk))
    torch.testing.assert_close(scores_kr, exact_kr, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(from_logits_kr, exact_kr, atol=1e-5, rtol=1e-5)
    weights_kr = torch.randn(5, 4)
    parameters = list(plain.parameters())
    exact = torch.autograd.grad((exact_kr * weights_kr).sum(), parameters, retain_graph=True)
    from_logits = torch.autograd.grad((from_logits_kr * weights_kr).sum(), parameters)
    (scores_kr * weights_kr).sum().backward()
    for expected, one, other in zip(exact, from_logits, chunked.parameters(), strict=True):
        torch.testing.assert_close(one, expected, atol=1e-6, rtol=1e-4)
        torch.testing.assert_close(other.grad, expected, atol=1e-6, rtol=1e-4)


class LargestNewTensor(TorchDispatchMode):
    """Remembers how many elements the largest tensor has that any operation returns in memory other than `known`'s."""

    def __init__(self, known: torch.Tensor) -> None:
        super().__init__()
        self.known, self.numel = known.data_ptr(), 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor) and result.data_ptr() != self.known:
            self.numel = max(self.numel, result.numel())
        return result


@pytest.mark.parametrize(("hidden_trained", "weight_trained"), [(True, True), (True, False), (False, True)])
def test_only_the_gradients_that_are_needed_are_computed(hidden_trained: bool, weight_trained: bool) -> None:
    torch.manual_seed(0)
    tokens, vocabulary, hidden, chunk = 30, 500, 64, 8
    inputs = torch.randn(tokens, hidden), torch.randn(vocabulary, hidden)
    wanted = WantedTokens(torch.arange(tokens), torch.randint(0, vocabulary, (tokens,)), 0.7)

    def gradients(*trained: bool) -> tuple[list[torch.Tensor | None], int]:
        leaves = [tensor.clone().requires_grad_(needed) for tensor, needed in zip(inputs, trained, strict=True)]
        found = scores(leaves[0], leaves[1], wanted, VocabularyPart(0, vocabulary, None), chunk)
        with LargestNewTensor(leaves[1]) as watched:
            found.square().sum().backward()
        return [leaf.grad for leaf in leaves], watched.numel

    (of_hidden, of_weight), largest = gradients(hidden_trained, weight_trained)
    (whole_of_hidden, whole_of_weight), _ = gradients(True, True)
    assert (of_hidden is not None) is hidden_trained and (of_weight is not None) is weight_trained
    assert of_hidden is None or torch.equal(of_hidden, whole_of_hidden)
    assert of_weight is None or torch.equal(of_weight, whole_of_weight)
    assert largest == (vocabulary * hidden if weight_trained else chunk * vocabulary)


def test_a_model_that_changes_its_logits_keeps_its_own_path() -> None:
    capped = model(Gemma2Config, final_logit_softcapping=30.0)
    own = capped.forward
    assert not head.install(capped, 1024)
    assert capped.forward == own


def test_logits_that_a_config_does_not_tell_of_are_noticed() -> None:
    logprobs_r = torch.tensor([-1.0, -2.0])
    assert head.agrees(torch.stack([logprobs_r + 1e-3, logprobs_r]), logprobs_r)
    assert not head.agrees(torch.stack([logprobs_r + 0.3, logprobs_r]), logprobs_r)
