"""Versions of tokens as the replica marks them, beside those that vLLM reports."""

from typing import Any

import pytest

from millrace.ids import Version
from services.rollout.engine import VersionSpan
from services.rollout.engines.vllm.versions import VersionMarks

Spans = list[tuple[VersionSpan, ...]]


def marked_and_reported(engine: Any, monkeypatch: pytest.MonkeyPatch) -> tuple[Spans, Spans]:
    """Has a vLLM engine mark versions, as for releases that report none, beside those that it reports. Returns two
    lists, which get the spans of each answer from then on."""
    if engine._marks is not None:
        pytest.skip("this release of vLLM reports none")
    marks, marked, reported, client = VersionMarks(), Spans(), Spans(), engine._llm.engine_core

    def spans(request_id: str, output: Any, tokens: int) -> Any:
        reported.append(tuple(VersionSpan(Version(int(s.version)), s.start, s.end) for s in output.weight_versions))
        marked.append(marks.spans(request_id, tokens))
        return marked[-1]

    async def label(version: Version, cache_key: str) -> None:
        await marks.swapped(version)
        await engine._llm.update_weight_version(str(version))

    monkeypatch.setattr(client, "get_output_async", client.get_output_async)
    marks.attach(engine._llm)
    monkeypatch.setattr(engine, "_marks", marks)
    monkeypatch.setattr(engine, "_spans", spans)
    monkeypatch.setattr(engine, "_label", label)
    return marked, reported
