"""The declarations of the step metrics, how a key finds its own, and what happens to a key without one."""

import io
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import structlog

from millrace.telemetry import logs
from millrace.telemetry.metrics import histograms
from millrace.telemetry.metrics.catalogue import STEP_METRICS, STRICT, UndeclaredMetric, check, find
from millrace.telemetry.metrics.declaration import PLACEHOLDERS, Owner, StepMetric

ROOT = Path(__file__).resolve().parents[3]
EXAMPLES = {
    "criterion": "seq_mean_k3",
    "data_source": "openai/gsm8k",
    "engine": "vllm",
    "k": "4",
    "kept": "weights",
    "n": "16",
    "name": "ours",
    "part": "gen",
    "phase": "update",
    "predicted": "activations",
    "variable": "acc",
    "reward_part": "format",
    "statistic": "max",
}
PREFIXES = "|".join(sorted({metric.key.partition("/")[0] for metric in STEP_METRICS}))
CODE_KEYS = re.compile(rf"""["']((?:{PREFIXES})/[\w@/-]+)["']""")
PAGE_KEYS = re.compile(rf"`((?:{PREFIXES})/[\w@/-]+)`")


def example(metric: StepMetric) -> str:
    return metric.key.format(**EXAMPLES)


def test_every_declaration_is_complete_and_nothing_is_declared_twice() -> None:
    keys = [metric.key for metric in STEP_METRICS]
    assert len(keys) == len(set(keys)) > 100
    for metric in STEP_METRICS:
        assert set(metric.placeholders) <= set(PLACEHOLDERS)
        assert metric.meaning.endswith(".") and not metric.meaning[0].islower()
        assert metric.user_defined == ("name" in metric.placeholders)


@pytest.mark.parametrize("metric", STEP_METRICS, ids=lambda metric: metric.key)
def test_a_key_finds_its_declaration(metric: StepMetric) -> None:
    assert find(example(metric)) is metric


@pytest.mark.parametrize("key", ["", "perf", "perf/mfu", "perf/mfu/other", "critic/score/median", "val-core/a/best@4"])
def test_a_key_that_nobody_declared_is_not_found(key: str) -> None:
    assert find(key) is None


def test_a_name_of_a_users_own_function_is_checked_only_against_its_prefix() -> None:
    check(["actor/ours", "rollout_corr/ours"], [Owner.TRAINER], user_defined=True)
    for key in ("actor/ours", "rollout_corr/ours"):
        with pytest.raises(UndeclaredMetric, match=key):
            check([key], [Owner.TRAINER])
    with pytest.raises(UndeclaredMetric, match="critic/ours"):
        check(["critic/ours"], [Owner.TRAINER], user_defined=True)


def test_a_key_that_belongs_to_another_service_is_refused() -> None:
    check(["timing_s/gen", "timing_s/generate/max"], [Owner.COORDINATOR, Owner.REPLICA])
    with pytest.raises(UndeclaredMetric, match="owned by the coordinator, but the trainer reported it"):
        check(["timing_s/gen"], [Owner.TRAINER])


def test_in_production_an_undeclared_key_is_logged_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(STRICT)
    stream, before = io.StringIO(), structlog.get_config()
    try:
        with logs.root_logger_restored():
            logs.configure("trainer", stream=stream)
            check(["perf/invented", "perf/invented"], [Owner.TRAINER])
            check(["perf/invented"], [Owner.TRAINER])
    finally:
        structlog.configure(**before)
    assert stream.getvalue().count("perf/invented") == 1


def written_keys() -> Iterator[tuple[str, str]]:
    """Each key that the code or a page spells out, with its place."""
    for folder in ("millrace", "services", "benchmarks"):
        for path in sorted((ROOT / folder).rglob("*")):
            if path.suffix in (".py", ".html"):
                for key in CODE_KEYS.findall(path.read_text()):
                    yield f"{path.relative_to(ROOT)}", key
    for path in sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")]):
        if path.name != "metrics.md":
            for key in PAGE_KEYS.findall(path.read_text()):
                yield f"{path.relative_to(ROOT)}", key


def test_every_key_that_code_and_pages_spell_out_is_declared() -> None:
    """Whoever reads a metric, a table of the command or the page, would not notice a key that nobody reports."""
    found = list(written_keys())
    assert len(found) > 80
    found = [(place, key) for place, key in found if histograms.find(key) is None]
    undeclared = [(place, key) for place, key in found if find(key) is None and find(f"{key}/mean") is None]
    assert undeclared == []
