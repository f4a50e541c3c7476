"""A rank that has no memory left: what it says, and the same step again with half the token budget."""

import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from millrace.errors import InvalidState, OutOfMemory, PartialOutOfMemory
from services.trainer.backends.fsdp2 import activation_offload as activations
from services.trainer.backends.fsdp2.backend import Fsdp2Backend
from services.trainer.protocol.microbatch import MicroBatch
from services.trainer.step import step
from tests.services.trainer.memory.rank import BUDGET, Rank


def _before(model: Any, fail: Callable[[], None]) -> None:
    fail()


def _in_forward(model: Any, fail: Callable[[], None]) -> None:
    """In the second of two layers: the first has been gathered and freed."""
    layer = model.model.layers[1]
    layer.register_forward_pre_hook(lambda *_: fail())


def _in_backward(model: Any, fail: Callable[[], None]) -> None:
    """Between the two layers: gradients of the second have been added."""

    def on_gradient(_: torch.Tensor) -> None:
        fail()

    def on_output(module: Any, inputs: Any, output: torch.Tensor) -> None:
        if output.requires_grad:
            output.register_hook(on_gradient)

    model.model.layers[0].register_forward_hook(on_output)


PLACES = {"before": _before, "forward": _in_forward, "backward": _in_backward}


def limit_tokens(monkeypatch: pytest.MonkeyPatch, rank: Rank, tokens: int, place: str, skipped: int = 0) -> None:
    """The device has no memory for a micro-batch of more than so many tokens, after the first `skipped` of them."""
    own, now, seen = Fsdp2Backend._scores, {"tokens": 0}, []
    backend: Any = rank.worker._loaded().backend

    def fail() -> None:
        if now["tokens"] > tokens and torch.is_grad_enabled() | (place == "backward"):
            seen.append(now["tokens"])
            if len(seen) > skipped:
                raise torch.OutOfMemoryError("CUDA out of memory.")

    def scores(self: Any, *arguments: Any) -> Any:
        now["tokens"] = next(sum(each.lengths) for each in arguments if isinstance(each, MicroBatch))
        if place == "before":
            fail()
        return own(self, *arguments)

    monkeypatch.setattr(Fsdp2Backend, "_scores", scores)
    if place != "before":
        PLACES[place](backend._model, fail)


# "backward" has been through both layers' forward pass
@pytest.mark.parametrize("place", ["before", pytest.param("forward", marks=pytest.mark.matrix), "backward"])
@pytest.mark.parametrize(
    "parts",
    [{}, pytest.param({"trainer": {"activation_recompute": True}}, marks=pytest.mark.matrix)],
    ids=["plain", "recompute"],
)
def test_the_step_again_with_half_the_budget_is_as_if_it_had_been_half_from_the_start(
    parts: dict[str, Any],
    place: str,
    new_rank: Callable[..., Rank],
    tied_model: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Bit for bit: nothing of the failed attempt is counted, and nothing of it is left."""
    plain = new_rank(tied_model, **parts)
    metrics = [plain.step(number, BUDGET // 2) for number in (1, 2)]
    expected = plain.weights()
    rank = new_rank(tied_model, **parts)
    limit_tokens(monkeypatch, rank, BUDGET // 2, place)
    with pytest.raises(OutOfMemory) as raised:
        rank.step(1)
    assert type(raised.value) is OutOfMemory
    again = [rank.step(number, BUDGET // 2) for number in (1, 2)]
    assert all(torch.equal(tensor, expected[name]) for name, tensor in rank.weights().items())
    for before, after in zip(metrics, again, strict=True):
        for name in ("actor/pg_loss", "actor/grad_norm", "actor/entropy", "batch/microbatches"):
            assert before[name] == after[name], name
        assert after["batch/token_budget"] == BUDGET // 2


def test_the_error_says_what_held_the_memory_and_what_would_help(
    new_rank: Callable[..., Rank],
    tied_model: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rank = new_rank(tied_model)
    rank.step(1)
    limit_tokens(monkeypatch, rank, BUDGET // 2, "before")
    with pytest.raises(OutOfMemory) as raised:
        rank.step(2)
    told, fix = raised.value.what, raised.value.fix
    assert told.startswith("rank 0 ran out of memory in the policy's update, step 2, with micro-batches of up to 1")
    parts = ["optimizer", "weights", "gradients"]  # two moments, and the sums that the first backward pass adds to
    assert [told.index(part) for part in parts] == sorted(told.index(part) for part in parts)
    assert fix.count("saves about") == 2 and "trainer.backend_options.offload_parameters: true" in fix
    assert "trainer.on_out_of_memory: halve_budget" in fix
    assert raised.value.__context__ is None and "Traceback" not in str(raised.value)


@pytest.mark.parametrize(
    ("place", "work", "kind"),
    [
        ("RankBatch", "putting a batch on the device", OutOfMemory),
        ("make_loss_inputs", "computing advantages", OutOfMemory),
        ("batch_metrics", "gathering what the step reports", PartialOutOfMemory),
    ],
)
def test_every_part_of_a_step_is_told(
    place: str,
    work: str,
    kind: type[OutOfMemory],
    new_rank: Callable[..., Rank],
    tied_model: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(*arguments: Any, **named: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory.")

    rank = new_rank(tied_model)
    with monkeypatch.context() as patch:
        patch.setattr(step, place, fail)
        with pytest.raises(OutOfMemory, match=f"rank 0 ran out of memory in {work}, step 1") as raised:
            rank.step(1)
    assert type(raised.value) is kind and "weights" in raised.value.what
    if kind is OutOfMemory:
        assert rank.step(1)["batch/token_budget"] == BUDGET


@pytest.mark.parametrize(
    ("part", "sizes"), [("ref", "with a token budget of 256"), ("values", "with a token budget of 512")]
)
def test_what_a_role_computed_is_told_with_its_own_budget(
    part: str,
    sizes: str,
    new_rank: Callable[..., Rank],
    tied_model: Path,
) -> None:
    trainer = {"reference": {"token_budget": 2 * BUDGET}, "critic": {"token_budget": 4 * BUDGET}}
    algorithm = {"kl": "k3", "advantage": "gae", "critic": {}}
    meter = new_rank(tied_model, algorithm=algorithm, trainer=trainer).worker._loaded().meter
    with pytest.raises(OutOfMemory, match=sizes), meter.during(part):
        raise torch.OutOfMemoryError("CUDA out of memory.")
    meter.token_budget = BUDGET // 2
    with pytest.raises(OutOfMemory, match=r"with a token budget of (128|256)\."), meter.during(part):
        raise torch.OutOfMemoryError("CUDA out of memory.")


@pytest.mark.parametrize("place", [pytest.param("forward", marks=pytest.mark.matrix), "backward"])
def test_offloaded_activations_of_a_failed_pass_are_freed(
    place: str,
    new_rank: Callable[..., Rank],
    tied_model: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(activations, "SMALLEST_BYTES", 0)
    rank = new_rank(tied_model, trainer={"backend_options": {"offload_activations": True}})
    limit_tokens(monkeypatch, rank, BUDGET // 2, place)
    with pytest.raises(OutOfMemory):
        rank.step(1)
    gc.collect()
    assert not [each for each in gc.get_objects() if type(each) is activations._SavedStorage]


def test_after_an_update_of_the_step_the_weights_are_given_up(
    new_rank: Callable[..., Rank],
    tied_model: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The first of two updates was written: the step cannot be repeated."""
    rank = new_rank(tied_model, trainer={"updates_per_step": 2})
    backend: Any = rank.worker._loaded().backend
    update = backend.forward_backward
    calls: list[int] = []

    def forward_backward(*arguments: Any, **named: Any) -> Any:
        calls.append(1)
        if len(calls) == 2:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return update(*arguments, **named)

    monkeypatch.setattr(backend, "forward_backward", forward_backward)
    with pytest.raises(PartialOutOfMemory):
        rank.step(1)
    with pytest.raises(InvalidState, match="no job is loaded"):
        rank.step(1)


def test_the_budget_of_the_reference_is_lowered_with_the_policys(
    new_rank: Callable[..., Rank],
    tied_model: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    trainer = {"reference": {"token_budget": 2 * BUDGET}}
    rank = new_rank(tied_model, algorithm={"kl": "k3"}, trainer=trainer)
    backend: Any = rank.worker._loaded().backend
    own, tokens = backend.logprobs, list[int]()

    def logprobs(batches: Any, **named: Any) -> Any:
        tokens.extend(sum(each.lengths) for each in batches if named["reference"])
        return own(batches, **named)

    monkeypatch.setattr(backend, "logprobs", logprobs)
    rank.step(1)
    assert BUDGET < max(tokens) <= 2 * BUDGET
    tokens.clear()
    metrics = rank.step(2, BUDGET // 2)
    assert BUDGET // 2 < max(tokens) <= BUDGET
    assert metrics["batch/token_budget"] == BUDGET // 2
