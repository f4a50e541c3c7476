"""Token scores from hidden states against those from the model's own logits."""

from typing import Any

import pytest
import torch
from peft import LoraConfig, inject_adapter_in_model
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import (
    AutoModelForCausalLM,
    BertConfig,
    Cohere2Config,
    CohereConfig,
    ElectraConfig,
    FalconH1Config,
    Gemma2Config,
    GraniteConfig,
    HyperCLOVAXConfig,
    LlamaConfig,
    MiniCPM3Config,
    MptConfig,
    NanoChatConfig,
    PhiConfig,
    PreTrainedModel,
    Qwen3Config,
)

from services.trainer.backends import head as kernels
from services.trainer.backends.fsdp2 import head
from services.trainer.backends.fsdp2.head import token_scores
from services.trainer.backends.head import LogitChange, VocabularyPart, WantedTokens, scores

SIZES = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
}


LOUD = {"initializer_range": 0.3}
"""Logits of several nats, so that a cap or a factor matters."""
LATENT = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8}
CHANGING: dict[str, tuple[type, dict[str, Any]]] = {
    "cohere": (CohereConfig, {"logit_scale": 0.3, **LOUD}),
    "cohere2": (Cohere2Config, {"logit_scale": 0.3, **LOUD}),
    "gemma2": (Gemma2Config, {"final_logit_softcapping": 2.0, **LOUD}),
    "granite": (GraniteConfig, {"logits_scaling": 3.0, **LOUD}),
    "hyperclovax": (HyperCLOVAXConfig, {"logits_scaling": 3.0, **LOUD}),
    "minicpm3": (MiniCPM3Config, {"dim_model_base": 8, "num_key_value_heads": 4, **LATENT, **LOUD}),
    "nanochat": (NanoChatConfig, {"final_logit_softcapping": 2.0, **LOUD}),
    "phi": (PhiConfig, LOUD),
    "falcon-h1": (FalconH1Config, {"lm_head_multiplier": 2.5, "mamba_d_ssm": 64, "mamba_n_heads": 4, **LOUD}),
}
"""Models whose logits are not the output of a linear layer without a bias."""
KINDS = {"qwen3": (Qwen3Config, {}), "llama": (LlamaConfig, {}), **CHANGING}


def model(kind: str, **changes: object) -> PreTrainedModel:
    torch.manual_seed(0)
    config, options = KINDS[kind]
    built: PreTrainedModel = AutoModelForCausalLM.from_config(
        config(**{**SIZES, **options, **changes}), dtype=torch.float32
    )
    if (bias := built.get_output_embeddings().bias) is not None:
        torch.nn.init.normal_(bias)
    return built


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("chunk_tokens", [2, 1024])
def test_scores_and_gradients_are_those_of_the_logits(kind: str, tied: bool, chunk_tokens: int) -> None:
    plain, chunked = (model(kind, tie_word_embeddings=tied) for _ in range(2))
    assert head.obstacle(chunked) is None
    head.install(chunked, chunk_tokens)
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
        assert given.grad is not None and expected.grad is not None
        largest = max(1.0, float(expected.grad.abs().max()))
        torch.testing.assert_close(given.grad, expected.grad, atol=1e-5 * largest, rtol=1e-4, msg=name)


@pytest.mark.parametrize("kind", ["qwen3", "cohere2", "gemma2", "phi"])
@pytest.mark.parametrize("chunk_tokens", [2, 1024])
def test_further_tokens_are_scored_as_from_the_logits(kind: str, chunk_tokens: int) -> None:
    """The target may be among them, and one of them twice."""
    plain, chunked = (model(kind) for _ in range(2))
    head.install(chunked, chunk_tokens)
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
        torch.testing.assert_close(one, expected, atol=1e-5, rtol=1e-4)
        torch.testing.assert_close(other.grad, expected, atol=1e-5, rtol=1e-4)


class LargestNewTensor(TorchDispatchMode):
    """Remembers how many elements the largest tensor has that any operation returns in memory other than `known`'s."""

    def __init__(self, known: torch.Tensor) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
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
    assert whole_of_hidden is not None and whole_of_weight is not None
    assert of_hidden is None or torch.equal(of_hidden, whole_of_hidden)
    assert of_weight is None or torch.equal(of_weight, whole_of_weight)
    assert largest == (vocabulary * hidden if weight_trained else chunk * vocabulary)


@pytest.mark.parametrize("bias_trained", [True, False])
@pytest.mark.parametrize("change", [LogitChange(), LogitChange(scale=0.3), LogitChange(2.0, cap=1.5)], ids=str)
def test_rows_of_padding_have_no_part_in_bias_and_change(change: LogitChange, bias_trained: bool) -> None:
    torch.manual_seed(0)
    tokens, vocabulary, temperature = 30, 50, 0.7
    inputs = torch.randn(tokens, 16), 0.3 * torch.randn(vocabulary + 6, 16), torch.randn(vocabulary + 6)
    targets_r, weights_2r = torch.randint(0, vocabulary, (tokens,)), torch.randn(2, tokens)
    hidden_rh, weight_vh, bias_v = (tensor.clone().requires_grad_() for tensor in inputs)
    bias_v.requires_grad_(bias_trained)
    wanted = WantedTokens(torch.arange(tokens), targets_r, temperature)
    found_2r = scores(
        hidden_rh, weight_vh, wanted, VocabularyPart(0, vocabulary, None), 8, bias_v=bias_v, change=change
    )
    (found_2r * weights_2r).sum().backward()
    exact = [tensor.double().requires_grad_() for tensor in inputs]
    logits_rv = change.scale * (exact[0] @ exact[1].t() + exact[2])[:, :vocabulary]
    if change.cap is not None:
        logits_rv = change.cap * torch.tanh(logits_rv / change.cap)
    log_p = (logits_rv / temperature).log_softmax(-1)
    exact_2r = torch.stack([log_p.gather(1, targets_r[:, None])[:, 0], -(log_p.exp() * log_p).sum(-1)])
    (exact_2r * weights_2r).sum().backward()
    torch.testing.assert_close(found_2r.double(), exact_2r, atol=1e-5, rtol=1e-5)
    for given, expected in zip((hidden_rh, weight_vh, bias_v), exact, strict=True):
        if given.requires_grad:
            assert given.grad is not None and expected.grad is not None
            torch.testing.assert_close(given.grad.double(), expected.grad, atol=1e-5, rtol=1e-4)
    assert (bias_v.grad is not None) is bias_trained


@pytest.mark.parametrize("change", [LogitChange(), LogitChange(2.0, cap=1.5)], ids=str)
def test_what_is_done_to_each_output_is_one_graph(change: LogitChange) -> None:
    """What is one graph becomes one kernel on GPUs."""
    outputs_rv, known_5r, column_r = torch.randn(4, 9), torch.randn(5, 4), torch.tensor([1, -1, 0, 8])
    for function, arguments in (
        (kernels._part_sums, (outputs_rv, change.scale, change.cap)),
        (kernels._outputs_gradient, (outputs_rv, known_5r, column_r, change.scale, change.cap)),
    ):
        traced = torch.compile(function, dynamic=True, fullgraph=True, backend="eager")
        torch.testing.assert_close(traced(*arguments), function(*arguments))


def test_a_head_that_is_more_than_a_linear_layer_is_an_obstacle() -> None:
    adapted = model("qwen3", tie_word_embeddings=False)
    inject_adapter_in_model(LoraConfig(target_modules=["lm_head"]), adapted)
    assert head.obstacle(adapted) == "its output layer has an adapter"
    mpt = MptConfig(vocab_size=61, d_model=32, n_heads=4, n_layers=1, logit_scale="inv_sqrt_d_model")
    found = head.obstacle(AutoModelForCausalLM.from_config(mpt))
    assert found == "logit_scale of its config is 'inv_sqrt_d_model', not a number"
    decoder: dict[str, Any] = {**SIZES, "is_decoder": True}
    for config in (BertConfig(**decoder), ElectraConfig(**decoder)):
        encoder = AutoModelForCausalLM.from_config(config)
        assert "does not follow its last hidden states directly" in (head.obstacle(encoder) or "")


@pytest.mark.parametrize("loudness", [0.02, 0.3])
def test_logits_that_a_config_does_not_tell_of_are_noticed(loudness: float) -> None:
    """The logits of BERT are computed from hidden states that passed one more layer."""
    torch.manual_seed(0)
    options: dict[str, Any] = {**SIZES, "is_decoder": True, "initializer_range": loudness}
    config = BertConfig(**options)
    bert = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    for kind, found in ((bert, False), (model("gemma2", initializer_range=loudness).eval(), True)):
        tokens, positions_r = torch.arange(9)[None], torch.arange(7)
        logits_rv = kind(input_ids=tokens, logits_to_keep=positions_r).logits[0]
        logprobs_r = token_scores(logits_rv, tokens[0, 1:8], 1.0)[0]
        head.install(kind, 1024)
        given_2r = kind(input_ids=tokens, wanted=WantedTokens(positions_r, tokens[0, 1:8], 1.0))
        assert head.agrees(given_2r, logprobs_r) is found
