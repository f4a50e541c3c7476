"""The proof: sequences of a tiny model packed by this backend against each alone in transformers' eager attention."""

import copy
import functools
import json
from dataclasses import dataclass, field
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

from services.trainer.backends.fsdp2 import attention, recurrent
from services.trainer.backends.fsdp2.proof.implementations import INPUTS, PROVED, BordersLost, left_out
from services.trainer.backends.fsdp2.proof.tiny import JITTER, VOCABULARY, set_noise, tiny
from services.trainer.backends.fsdp2.sequence_parallel import SequenceGroup
from services.trainer.backends.tower import without_tower
from services.trainer.protocol.microbatch import MicroBatch

LENGTHS = (9, 37, 5, 13)
"""Short and long sequences beside each other."""
TOLERANCE = 1e-4
"""Largest difference of a log-probability, in nats. Rounding gives about 1e-6."""
MOST_ROUNDING = 1e-3
"""Largest difference in a model that makes more of rounding than others."""
ROUNDINGS = 4.0
"""Differences of the size of what one rounding of each weight makes, that rounding may make in all."""
GRADIENT_TOLERANCE = 1e-3
"""Largest difference of a gradient, of its largest element."""
NOTICEABLE = 100 * TOLERANCE
"""Least difference that the first token of a sequence has to make to those after it."""
MOST_PARAMETERS = 50_000_000
"""Most parameters of a tiny model. Most have 1 to 10 million."""
FIRST_TOKEN = 10
"""Tokens before it are often special ones, with which models do special things."""
CANNOT_RUN = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    ImportError,
    LookupError,
    OSError,
    RuntimeError,
    StrictDataclassError,
    TypeError,
    ValueError,
)
"""What a model's own code raises for inputs or sizes that it was not written for."""


@dataclass(frozen=True)
class Proof:
    """How far packed sequences are from each alone."""

    nats: float
    """Largest difference of a log-probability."""
    gradient: float
    """Largest difference of a gradient, of the largest element of that parameter's gradient."""
    left_out: tuple[str, ...] = ()
    """Keywords that layers gave their attention and that it leaves out."""
    tolerance: float = TOLERANCE
    """Difference of a log-probability that rounding may make in this model."""
    failure: str = ""
    """Why the tiny model cannot be made or run; empty if it was."""

    @property
    def holds(self) -> bool:
        """Whether both are equal within rounding."""
        of_gradients = GRADIENT_TOLERANCE * self.tolerance / TOLERANCE
        return not self.failure and self.nats <= self.tolerance and self.gradient <= of_gradients


@dataclass(frozen=True)
class _Subject:
    """A class of models with a config, equal to others with the same entries."""

    kind: type[PreTrainedModel]
    entries: str
    config: PreTrainedConfig = field(compare=False)


def prove(kind: type[PreTrainedModel], config: PreTrainedConfig, implementation: str) -> Proof:
    """The proof for models of a class with this config. It takes about a second, the first time."""
    entries = json.dumps(config.to_dict(), sort_keys=True, default=str)
    return _prove(_Subject(kind, entries, config), implementation)


@functools.lru_cache(maxsize=32)
def _prove(subject: _Subject, implementation: str) -> Proof:
    try:
        return _compare(subject.kind, tiny(subject.config), PROVED.get(implementation, implementation))
    except BordersLost as error:
        return Proof(float("nan"), float("nan"), failure=str(error))
    except CANNOT_RUN as error:
        failure = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
        return Proof(float("nan"), float("nan"), failure=failure)


def _compare(kind: type[PreTrainedModel], config: PreTrainedConfig, implementation: str) -> Proof:
    """Runs both. Raises what the model raises."""
    with torch.device("meta"):
        probe = build(kind, config, "eager")
    size = sum(parameter.numel() for parameter in probe.parameters())
    if size > MOST_PARAMETERS:
        raise ValueError(f"the model has {size:,} parameters with its config made small")
    with torch.random.fork_rng([]), torch.device("cpu"), torch.enable_grad(), recurrent.in_torch(probe):
        torch.manual_seed(0)
        noisy = copy.deepcopy(config)
        set_noise(noisy, 0.1, JITTER)  # the engine has the folder's: it shows if that changes generation
        alone = random_model(kind, noisy, "eager")
        packed = build(kind, config, implementation)
        packed.load_state_dict(alone.state_dict())
        apart = recurrent.install(packed)
        tokens = torch.randint(FIRST_TOKEN, VOCABULARY, (sum(LENGTHS),))
        parts = [{"input_ids": part[None], "use_cache": False} for part in tokens.split(LENGTHS)]
        expected = _run(alone.eval(), parts)
        _check_sensitive(alone, tokens[: max(LENGTHS)])
        batch = MicroBatch((0,), LENGTHS, tuple(length - 1 for length in LENGTHS), tokens)
        cpu = torch.device("cpu")
        inputs = attention.model_inputs(
            INPUTS.get(implementation, implementation), SequenceGroup().tokens(batch, cpu), cpu, recurrent=apart
        )
        left_out.clear()
        found = _run(packed.train(), [inputs])
        nats, gradient = _far(found - expected), _gradients_apart(packed, alone)
        unequal = nats > TOLERANCE or gradient > GRADIENT_TOLERANCE
        tolerance = _tolerance(alone, parts, expected) if unequal else TOLERANCE
    return Proof(nats, gradient, tuple(sorted(left_out)), tolerance)


@torch.no_grad()
def _tolerance(model: PreTrainedModel, passes: list[dict[str, Any]], expected: Tensor) -> float:
    """The difference that rounding may make: weights changed in their last bit give one of that size."""
    for parameter in model.parameters():
        parameter.mul_(1 + torch.finfo(torch.float32).eps * torch.randn_like(parameter).sign())
    changed = torch.cat([_scores(model(**inputs)) for inputs in passes])
    return min(MOST_ROUNDING, max(TOLERANCE, ROUNDINGS * _far(changed - expected)))


def build(kind: type[PreTrainedModel], config: PreTrainedConfig, implementation: str) -> PreTrainedModel:
    """The model in float32 with this attention implementation."""
    own = copy.deepcopy(config)  # the model writes the implementation there
    model: PreTrainedModel = kind._from_config(own, attn_implementation=implementation, dtype=torch.float32)
    return without_tower(model)


@torch.no_grad()
def random_model(kind: type[PreTrainedModel], config: PreTrainedConfig, implementation: str) -> PreTrainedModel:
    """One with random values: first ones of many models are zeros, with which sinks, biases and gates would not
    show."""
    model = build(kind, config, implementation)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.normal_(0.0, parameter.shape[-1] ** -0.5)
        else:
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
    return model


@torch.no_grad()
def _check_sensitive(model: PreTrainedModel, tokens: Tensor) -> None:
    """Raises ValueError if results do not show what a token attends to."""
    other = tokens.clone()
    other[0] = tokens[0] + 1 if tokens[0] < VOCABULARY - 1 else FIRST_TOKEN
    scores = [_scores(model(input_ids=each[None], use_cache=False))[1:] for each in (tokens, other)]
    if _far(scores[0] - scores[1]) < NOTICEABLE:
        raise ValueError("tokens hardly depend on those before them, so the comparison would show nothing")


def _run(model: PreTrainedModel, passes: list[dict[str, Any]]) -> Tensor:
    """Log-probabilities of all tokens at each position, or hidden states of a model without them. Leaves gradients."""
    results = []
    for inputs in passes:
        scores_tv = _scores(model(**inputs))
        (scores_tv * torch.linspace(-1, 1, scores_tv.shape[-1])).sum().backward()
        results.append(scores_tv.detach())
    return torch.cat(results)


def _scores(output: Any) -> Tensor:
    """Float32 [T, V]."""
    logits = getattr(output, "logits", None)
    scores: Tensor = output.last_hidden_state if logits is None else logits.float().log_softmax(-1)
    return scores[0].float()


def _gradients_apart(packed: PreTrainedModel, alone: PreTrainedModel) -> float:
    """The largest difference, of the largest element of that parameter's gradient. Where that is next to nothing, as
    for the bias of keys, which softmax takes out, it is rounding."""
    pairs = list(zip(packed.parameters(), alone.parameters(), strict=True))
    largest = max((float(each.grad.abs().max()) for _, each in pairs if each.grad is not None), default=0.0)
    apart = 0.0
    for pair in pairs:
        mine, theirs = (torch.zeros_like(each) if each.grad is None else each.grad for each in pair)
        apart = max(apart, _far(mine - theirs) / max(float(theirs.abs().max()), 0.01 * largest, 1e-9))
    return apart


def _far(difference: Tensor) -> float:
    """The largest absolute value; infinite if one is not a number."""
    return float(difference.abs().nan_to_num(nan=float("inf")).max())
