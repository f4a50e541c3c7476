"""The learning benchmark without its runs: jobs that can work, results that are kept, a page that is written anew."""

from pathlib import Path

import pytest

from benchmarks.learning import page
from benchmarks.learning.jobs import ADAPTERS, ALGORITHMS, COMPARISONS, job_spec
from benchmarks.learning.results import HELD_OUT, TRAINING, Result, Results
from millrace.admission import choices
from millrace.demo.run import LORA_RATE
from millrace.rest import JobState, JobView, StepMetrics


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_every_job_can_work(algorithm: str, tmp_path: Path) -> None:
    data = (tmp_path / "train", tmp_path / "held")
    spec = job_spec(tmp_path, algorithm, ALGORITHMS[algorithm], seed=3, steps=4, data=data)
    choices.check(spec)
    assert spec.algorithm.preset == algorithm
    assert (spec.schedule.steps, spec.trainer.seed, spec.trainer.optimizer.warmup_steps) == (4, 3, 4)
    assert spec.trainer.optimizer.lr == 5e-4


@pytest.mark.parametrize("name", ADAPTERS)
def test_adapters_learn_faster_and_all_else_is_the_same(name: str, tmp_path: Path) -> None:
    data, variant = (tmp_path / "train", tmp_path / "held"), ADAPTERS[name]
    spec = job_spec(tmp_path, name, variant, seed=0, steps=4, data=data)
    assert spec.trainer.backend == name.partition("-")[0]
    rank = spec.model.lora.rank if spec.model.lora else None
    assert rank == variant.lora
    assert spec.trainer.optimizer.lr == pytest.approx(5e-4 * (LORA_RATE if rank else 1.0))


def result(algorithm: str, seed: int, after: float) -> Result:
    job = JobView(
        id="job-0",
        name="learning",
        state=JobState.SUCCEEDED,
        step=10,
        steps=10,
        version=10,
        reward=1.0,
        checkpoint=None,
        report=None,
        evaluation_before=0.125,
        evaluation_last=after,
        created_s=0.0,
        spec={},
    )
    rows = [StepMetrics(step=n, time_s=2.0 * n, values={TRAINING: 0.1 * n}) for n in range(1, 11)]
    rows[4].values[HELD_OUT], rows[9].values[HELD_OUT] = (0.125 + after) / 2, after
    return Result.of(algorithm, seed, job, rows)


def test_what_is_kept_is_found_again(tmp_path: Path) -> None:
    results = Results(tmp_path / "results", 10)
    assert results.find("ppo", 1) is None
    kept = result("ppo", 1, 0.9)
    results.keep(kept)
    assert results.find("ppo", 1) == kept
    assert Results(tmp_path / "results", 20).find("ppo", 1) is None
    assert list(kept.held_out) == [0, 5, 10] and kept.before == 0.125 and kept.after == 0.9
    assert kept.training_last == pytest.approx(0.55) and kept.seconds == 18.0


def test_the_page_keeps_what_is_around_and_is_the_same_for_the_same_results(tmp_path: Path) -> None:
    written = tmp_path / "BENCHMARKS.md"
    written.write_text("# Benchmarks\n\nbefore\n")
    results = [result(name, seed, 0.9 if name == "ppo" else 0.2) for name in ("grpo", "ppo") for seed in (0, 1)]
    page.write(written, COMPARISONS["algorithms"], results, margin=0.3)
    text, figure = written.read_text(), (tmp_path / "docs" / "learning.svg").read_bytes()
    assert "| ppo | 0, 1 | 0.125 | 0.900 (0.90, 0.90) | 0.550 | 2 of 2 | 2.00 |" in text
    assert "0 of 2" in text and "(docs/learning.svg)" in text and b"<svg" in figure
    written.write_text(text + "\nafter\n")
    page.write(written, COMPARISONS["algorithms"], results, margin=0.3)
    assert written.read_text() == text + "\nafter\n"
    assert (tmp_path / "docs" / "learning.svg").read_bytes() == figure
