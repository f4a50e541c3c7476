"""What an engine has seen, to compare with what is trained."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

from millrace.contracts.trajectories import sampled_spans
from millrace.contracts.v1 import common_pb2
from millrace.wire.arrays import unpack_logprobs, unpack_tokens
from services.rollout.engine import Completion, Sampling
from services.rollout.engines import probe
from services.rollout.engines.versioned import VersionedEngine
from tests.models import random_model
from tests.services.rollout.reference import logprobs

DTYPE = "bfloat16" if torch.cuda.is_available() else "float32"
"""What engines compute in: those for GPUs have no float32."""


class EngineSequences:
    """The whole sequence of each sample that any engine ends from now on: its prompt, then what was sampled."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.all: list[list[int]] = []
        generate = VersionedEngine.generate

        async def recorded(engine: Any, prompt_tokens: Sequence[int], sampling: Sampling) -> Completion:
            sample = await generate(engine, prompt_tokens, sampling)
            self.all.append([*prompt_tokens, *sample.tokens.tolist()])
            return sample

        monkeypatch.setattr(VersionedEngine, "generate", recorded)

    def check(self, group: common_pb2.Group, version: int) -> None:
        """What is trained are these, with the log-probabilities that the stack's weights of `version` give, as far as
        DTYPE is exact."""
        weights = random_model(tied=True, seed=version, dtype=getattr(torch, DTYPE)).float()
        trained = []
        for trajectory in group.trajectories:
            prompt = unpack_tokens(trajectory.prompt_tokens or group.prompt_tokens).tolist()
            tokens = unpack_tokens(trajectory.tokens).tolist()
            spans = list(sampled_spans(trajectory))
            trained += [[*prompt, *tokens[:end]] for _, end in spans]
            at = [place for start, end in spans for place in range(start, end)]
            apart = np.abs(unpack_logprobs(trajectory.logprobs) - logprobs(weights, prompt, tokens)[at])
            assert apart.max() < 1e-3 if DTYPE == "float32" else apart.mean() < 0.02, apart
        assert sorted(trained) == sorted(self.all)


def skip_without(engine: str) -> None:
    """Skips the test where SGLang cannot run."""
    if engine == "sglang" and not (torch.cuda.is_available() and probe(engine).ok):
        pytest.skip("SGLang needs a CUDA device")
