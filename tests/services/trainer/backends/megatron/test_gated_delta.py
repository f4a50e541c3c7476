"""Models with GatedDeltaNet layers on Megatron are what transformers computes alone: log-probabilities and gradients of
packed sequences of lengths from two tokens to past two chunks of the recurrence, in float32."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from millrace.memory.ledger import Part, Phase
from millrace.memory.prediction import predict
from millrace.memory.shape import decoder_shape
from tests.hybrid_models import KINDS, SIZES, save_hybrid_model
from tests.services.trainer.backends.fsdp2.test_backend import samples
from tests.services.trainer.backends.fsdp2.test_recurrent import CLOSE, LENGTHS, alone
from tests.services.trainer.backends.megatron.launch import launch, once
from tests.services.trainer.backends.megatron.on_ranks import job_spec

pytestmark = pytest.mark.timeout(400)
PADDING = SIZES["pad_token_id"]
ON_TWO: dict[str, tuple[str, dict[str, Any]]] = {
    "PP2": ("qwen3_5_text", {"pipeline_parallel": 2}),
    "TP2": ("qwen3_5_text", {"tensor_parallel": 2}),
    "TP2 without sequence parallelism": ("qwen3_5_text", {"tensor_parallel": 2, "sequence_parallel": False}),
    "experts TP2": ("qwen3_next", {"tensor_parallel": 2}),
    "experts EP2": ("qwen3_5_moe", {"expert_parallel": 2, "distributed_optimizer": False}),
}
"""Cases of two ranks: model and options. A distributed optimizer would keep each gradient on one rank."""


@pytest.fixture(scope="module")
def hybrids(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    made = tmp_path_factory.mktemp("hybrids")
    return {kind: save_hybrid_model(made / kind, kind) for kind in KINDS}


@pytest.fixture(scope="module")
def expected(hybrids: dict[str, Path]) -> Callable[[str], tuple[torch.Tensor, dict[str, torch.Tensor]]]:
    """Kind → log-probabilities by sequence in transformers, and gradients by names of the published tensors."""

    @once
    def of(kind: str) -> Any:
        logprobs, gradients = alone(hybrids[kind], samples(LENGTHS))
        return logprobs, dict(pair for name, gradient in gradients.items() for pair in published(name, gradient))

    return of


def published(name: str, gradient: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors of the folder of which a parameter in transformers is made: all experts are one there."""
    layer, _, last = name.rpartition("experts.")
    if not layer:
        yield name, gradient
        return
    for expert, of_expert in enumerate(gradient):
        parts = zip(("gate_proj", "up_proj"), of_expert.chunk(2), strict=True)
        for part, values in parts if last == "gate_up_proj" else (("down_proj", of_expert),):
            yield f"{layer}experts.{expert}.{part}.weight", values


@pytest.fixture(scope="module")
def ranks(hybrids: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], tuple[Any, Path]]:
    @once
    def launched(count: int) -> tuple[Any, Path]:
        asked = ON_TWO if count == 2 else {kind: (kind, {}) for kind in KINDS}
        cases = {name: {"model": str(hybrids[kind]), "options": options} for name, (kind, options) in asked.items()}
        folder = tmp_path_factory.mktemp(f"gated-delta-{count}")
        return launch(count, folder, passes={"cases": cases})["passes"], folder

    return launched


def check(
    answer: dict[str, Any], file: Path, expected: tuple[torch.Tensor, dict[str, torch.Tensor]], ranks: int = 1
) -> None:
    """`ranks`: how many divide the sequences."""
    logprobs, gradients = expected
    own = torch.cat(logprobs.split([answer for _, answer in LENGTHS])[::ranks])
    torch.testing.assert_close(torch.tensor(answer["logprobs"]), own, atol=CLOSE, rtol=0)
    passed = load_file(file)
    assert passed.keys() == gradients.keys()
    for name, gradient in gradients.items():
        if "embed_tokens" in name:
            passed[name][PADDING] = 0  # transformers does not train the embedding of its padding
        close = {"atol": CLOSE * float(gradient.abs().max()), "rtol": CLOSE}
        torch.testing.assert_close(passed[name], gradient, **close, msg=lambda told, name=name: f"{name}: {told}")


@pytest.mark.parametrize("kind", KINDS)
def test_packed_is_what_each_is_alone(kind: str, ranks: Any, expected: Any) -> None:
    answers, folder = ranks(1)
    check(answers[kind], folder / f"{kind}.safetensors", expected(kind))


@pytest.mark.parametrize("kind", KINDS)
def test_a_rank_holds_what_is_predicted(kind: str, ranks: Any, hybrids: dict[str, Path]) -> None:
    held = ranks(1)[0][kind]["weights"]
    predicted = predict(job_spec({"model": str(hybrids[kind])}), decoder_shape(hybrids[kind]), 1)
    assert held == pytest.approx(predicted[Phase.LOAD].device[Part.WEIGHTS], rel=0.02)


@pytest.mark.parametrize("name", ON_TWO)
def test_two_ranks_compute_the_same(name: str, ranks: Any, expected: Any) -> None:
    answers, folder = ranks(2)
    kind, options = ON_TWO[name]
    check(answers[name], folder / f"{name}.safetensors", expected(kind), 2 if "expert_parallel" in options else 1)
