"""What an engine has seen, to compare with what is trained."""

from collections.abc import Sequence
from typing import Any

import pytest

from services.rollout.engine import Sample, Sampling
from services.rollout.engines.versioned import VersionedEngine


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
