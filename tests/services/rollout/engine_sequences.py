"""What an engine has seen, to compare with what is trained."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from services.rollout.engine import Sample, Sampling
from services.rollout.engines import probe
from services.rollout.engines.versioned import VersionedEngine

DTYPE = "bfloat16" if torch.cuda.is_available() else "float32"
"""What engines compute in: those for GPUs have no float32."""


def engine_sequences(monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """The whole sequence of each sample that any engine ends from now on: its prompt, then what was sampled."""
    seen: list[list[int]] = []
    generate = VersionedEngine.generate

    async def recorded(engine: Any, prompt_tokens: Sequence[int], sampling: Sampling) -> Sample:
        sample = await generate(engine, prompt_tokens, sampling)
        seen.append([*prompt_tokens, *sample.tokens.tolist()])
        return sample

    monkeypatch.setattr(VersionedEngine, "generate", recorded)
    return seen


def skip_without(engine: str) -> None:
    """Skips the test where SGLang cannot run."""
    if engine == "sglang" and not (torch.cuda.is_available() and probe(engine).ok):
        pytest.skip("SGLang needs a CUDA device")


def check_logprobs(recorded: NDArray[np.float32], expected: NDArray[np.float32]) -> None:
    """What the engine recorded is what a forward pass over the whole trajectory gives, as far as DTYPE is exact."""
    apart = np.abs(recorded - expected)
    assert apart.max() < 1e-3 if DTYPE == "float32" else apart.mean() < 0.02, apart
