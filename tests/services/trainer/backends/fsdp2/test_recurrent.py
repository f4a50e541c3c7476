"""Models with GatedDeltaNet layers: packed, sharded and with adapters they are what transformers computes alone."""

import importlib.metadata
import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from millrace.errors import InvalidJob
from millrace.megatron.architectures.shape import sequence_cost as predicted_cost
from millrace.memory.adapters import adapter_parameters
from millrace.memory.layers import parameters
from millrace.memory.ledger import Part, Phase
from millrace.memory.prediction import predict
from millrace.memory.shape import decoder_shape
from millrace.spec.lora import Lora
from services.trainer.backends import build, recurrence
from services.trainer.backends.fsdp2 import model_check, recurrent
from services.trainer.backends.fsdp2.adapted import choose_layers
from services.trainer.backends.fsdp2.flops import active_parameters, sequence_cost
from services.trainer.memory.meter import measured
from services.trainer.protocol.backend import TokenScores
from services.trainer.protocol.microbatch import MicroBatch, Sample
from tests.forked import CONTEXT
from tests.hybrid_models import KINDS, save_hybrid_model
from tests.services.trainer.backends.fsdp2.test_backend import samples, saved_tensors
from tests.services.trainer.groups import job_spec

LENGTHS = [(1, 1), (70, 75), (3, 2), (40, 24), (60, 5), (1, 130)]
"""Of prompt and answer: from two tokens to past two chunks of the recurrence, which have 64; short beside long."""
CLOSE = 1e-4
MATRIX = {"qwen3_5_text", "qwen3_5_moe_text", "qwen3_5_moe"}


@pytest.fixture(scope="module")
def hybrids(tmp_path_factory: pytest.TempPathFactory) -> Any:
    made = tmp_path_factory.mktemp("hybrids")

    def folder(kind: str) -> Path:
        return made / kind if (made / kind).is_dir() else save_hybrid_model(made / kind, kind)

    return folder


def kinds() -> list[Any]:
    """Qwen3-Next and the wrapper of Qwen3.5 cover both ways to store the projections, experts, and the prefix."""
    return [pytest.param(kind, marks=pytest.mark.matrix) if kind in MATRIX else kind for kind in KINDS]


def loss(batch: MicroBatch, scores: TokenScores) -> tuple[torch.Tensor, torch.Tensor]:
    value = -scores.logprobs_r.sum() / 50
    return value, scores.logprobs_r.detach()


def alone(folder: Path, drawn: list[Sample]) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Log-probabilities of the answers, one sequence at a time in transformers, and the gradients of the loss."""
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    found = []
    for sample in drawn:
        tokens = torch.from_numpy(np.concatenate([sample.prompt, sample.response])).long()
        scores = model(input_ids=tokens[None], use_cache=False).logits[0].log_softmax(-1)
        found.append(scores[:-1].gather(1, tokens[1:, None])[len(sample.prompt) - 1 :, 0])
    logprobs = torch.cat(found)
    (-logprobs.sum() / 50).backward()
    return logprobs.detach(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def check_gradients(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    """Each within 1e-4 of its largest element. One that is next to nothing beside the others, as that of a decay rate,
    is what is left of sums that cancel: it is rounding."""
    assert found.keys() == expected.keys()
    largest = max(float(gradient.abs().max()) for gradient in expected.values())
    for name, gradient in expected.items():
        size = max(float(gradient.abs().max()), 0.01 * largest)
        close = {"atol": CLOSE * size, "rtol": CLOSE}
        torch.testing.assert_close(found[name], gradient, **close, msg=lambda told, at=name: f"{at}: {told}")


def one_pass(backend: Any, batch: MicroBatch) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    (logprobs,) = backend.forward_backward([batch], loss, temperature=1.0)
    return logprobs, {name: each.grad.full_tensor() for name, each in backend._trained.items()}


@pytest.mark.parametrize("kind", kinds())
def test_packed_is_what_each_is_alone(one_rank: torch.device, hybrids: Callable[[str], Path], kind: str) -> None:
    folder, drawn = hybrids(kind), samples(LENGTHS)
    backend = build(job_spec(folder, trainer={"activation_recompute": True}), one_rank)
    logprobs, gradients = one_pass(backend, MicroBatch.pack(drawn, range(len(drawn))))
    expected, expected_gradients = alone(folder, drawn)
    torch.testing.assert_close(logprobs, expected, atol=CLOSE, rtol=0)
    check_gradients(gradients, expected_gradients)
    exported = {info.name: tensor for info, tensor in backend.export("float32")}
    stored = {name.replace("model.language_model.", "model."): each for name, each in saved_tensors(folder).items()}
    for name, tensor in exported.items():
        assert torch.equal(tensor, stored[name]), name


def on_rank(rank: int, folder: Path, model: Path) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(str(folder / "store"), 2)
    dist.init_process_group("cpu:gloo", store=store, rank=rank, world_size=2)
    backend = build(job_spec(model), torch.device("cpu"))
    logprobs, gradients = one_pass(backend, MicroBatch.pack(samples(LENGTHS), range(rank, len(LENGTHS), 2)))
    save_file({**gradients, "logprobs": logprobs}, folder / f"{rank}.safetensors")
    dist.destroy_process_group()


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["qwen3_5_moe", pytest.param("qwen3_next", marks=pytest.mark.matrix)])
def test_two_ranks_compute_the_same(hybrids: Callable[[str], Path], kind: str, tmp_path: Path) -> None:
    folder, drawn = hybrids(kind), samples(LENGTHS)
    ranks = [CONTEXT.Process(target=on_rank, args=(rank, tmp_path, folder)) for rank in range(2)]
    for process in ranks:
        process.start()
    expected, gradients = alone(folder, drawn)
    for process in ranks:
        process.join(300)
    assert [process.exitcode for process in ranks] == [0, 0]
    by_sample = expected.split([answer for _, answer in LENGTHS])
    for rank in range(2):
        found = load_file(tmp_path / f"{rank}.safetensors")
        torch.testing.assert_close(found.pop("logprobs"), torch.cat(by_sample[rank::2]), atol=CLOSE, rtol=0)
        check_gradients(found, gradients)


def test_a_layer_that_is_not_told_the_borders_fails(one_rank: torch.device, hybrids: Callable[[str], Path]) -> None:
    """It would run from one sequence into the next without an error."""
    backend: Any = build(job_spec(hybrids("qwen3_5_text")), one_rank)
    backend._recurrent, backend._attention = False, "sdpa"
    with pytest.raises(TypeError, match="segments"):
        one_pass(backend, MicroBatch.pack(samples([(2, 2), (3, 3)]), range(2)))


@pytest.mark.matrix  # these layers are not compiled yet: benchmarks/results/fsdp2.md
def test_dynamo_compiles_a_layer_as_one_graph(hybrids: Callable[[str], Path]) -> None:
    """With what chooses between the kernels and padded buckets."""
    model = AutoModelForCausalLM.from_pretrained(hybrids("qwen3_5_text"))
    assert recurrent.install(model)
    layer: Any = recurrent.layers(model)[0]
    lengths = [sum(each) for each in LENGTHS]
    row = torch.randn(1, sum(lengths), model.config.hidden_size)
    segments = recurrence.Segments.of(lengths, row.device)
    compiled = torch.compile(layer.forward, backend="eager", fullgraph=True, dynamic=True)
    torch.testing.assert_close(compiled(row, segments=segments), layer(row, segments=segments))


def test_ranks_cannot_share_a_sequence(hybrids: Callable[[str], Path]) -> None:
    spec = job_spec(hybrids("qwen3_5"), trainer={"backend_options": {"sequence_parallel_size": 2}})
    with pytest.raises(InvalidJob, match="sequence_parallel_size: 2: the recurrence of the model's linear attention"):
        model_check.check(spec)


def test_a_gpu_without_the_kernels_is_refused(hybrids: Callable[[str], Path], monkeypatch: Any) -> None:
    model = AutoModelForCausalLM.from_pretrained(hybrids("qwen3_5_text"))
    monkeypatch.setattr(recurrence, "KERNELS", "no_such_kernels")
    recurrent.check_kernels(model, "cpu", "/m", "model.path")
    with pytest.raises(InvalidJob, match=r'model\.path: "/m": its GatedDeltaNet layers need flash-linear-attention'):
        recurrent.check_kernels(model, "cuda", "/m", "model.path")


WITH_TRITON = {(9, "3.3.1"): False, (9, "3.4.0"): True, (9, "3.6.0"): True, (9, "3.7.0"): True}
WITH_TRITON |= {(9, "3.7.1"): False, (9, "3.10.0"): False, (8, "3.6.0"): False, (10, "3.6.0"): False}


@pytest.mark.parametrize(("gpu", "is_refused"), WITH_TRITON.items())
def test_kernels_with_wrong_gradients_are_refused(gpu: tuple[int, str], is_refused: bool, monkeypatch: Any) -> None:
    """Hopper with Triton 3.4 to 3.7.0, unless tilelang computes the backward pass."""
    installed = {recurrence.KERNELS}
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name if name in installed else None)
    monkeypatch.setattr(importlib.metadata, "version", lambda name: gpu[1])
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (gpu[0], 0))
    if is_refused:
        with pytest.raises(
            InvalidJob, match=rf'model\.path: "/m": Triton {gpu[1]} .* install tilelang, or Triton 3\.7\.1'
        ):
            recurrence.check_kernels("cuda", "/m", "model.path")
    else:
        recurrence.check_kernels("cuda", "/m", "model.path")
    installed.add("tilelang")
    recurrence.check_kernels("cuda", "/m", "model.path")


def test_adapters_are_for_attention_and_mlp(hybrids: Callable[[str], Path]) -> None:
    model: Any = AutoModelForCausalLM.from_pretrained(hybrids("qwen3_5_text"))
    chosen = choose_layers(model, Lora())
    attention = {"q_proj", "k_proj", "v_proj", "o_proj"}
    assert {name.rpartition(".")[2] for name in chosen} == attention | {"gate_proj", "up_proj", "down_proj"}
    with pytest.raises(InvalidJob, match=r"model\.lora\.target_modules: .*in_proj_qkv.*GatedDeltaNet"):
        choose_layers(model, Lora(target_modules=["q_proj", "in_proj_qkv"]))


@pytest.mark.parametrize("kind", KINDS)
def test_the_prediction_counts_what_the_model_has(hybrids: Callable[[str], Path], kind: str) -> None:
    """The model without biases, some norms, and the gate of shared experts."""
    folder = hybrids(kind)
    model: Any = AutoModelForCausalLM.from_pretrained(folder)
    shape, cost = decoder_shape(folder), sequence_cost(model.config, model)
    assert parameters(shape) == pytest.approx(sum(p.numel() for p in model.parameters()), rel=0.01)
    assert predicted_cost(shape).per_token_pair == cost.per_token_pair
    assert predicted_cost(shape).per_token == pytest.approx(cost.per_token, rel=0.01)
    adapted = choose_layers(model, Lora())
    sizes = [model.get_submodule(name) for name in adapted]
    trained = sum(8 * (each.in_features + each.out_features) for each in sizes)
    assert adapter_parameters(shape, Lora(rank=8)) == trained


def test_a_rank_holds_what_is_predicted(one_rank: torch.device, hybrids: Callable[[str], Path]) -> None:
    spec = job_spec(hybrids("qwen3_5_moe"))
    held = measured(build(spec, one_rank)).device[Part.WEIGHTS]
    predicted = predict(spec, decoder_shape(hybrids("qwen3_5_moe")), 1)[Phase.LOAD].device[Part.WEIGHTS]
    assert held == pytest.approx(predicted, rel=0.02)


def test_flops_of_the_recurrence_grow_with_tokens(hybrids: Callable[[str], Path]) -> None:
    """Two of four layers attend: 4 heads of 32 for queries and values. In the others each token changes and reads the
    state of 4 heads, 32 by 32, which are three products."""
    model: Any = AutoModelForCausalLM.from_pretrained(hybrids("qwen3_5_text"))
    cost = sequence_cost(model.config, model)
    assert cost.per_token_pair == 3 * 2 * (4 * 32 + 4 * 32)
    assert cost.per_token == 6 * (active_parameters(model.config, model) + 2 * 3 * 4 * 32 * 32)
