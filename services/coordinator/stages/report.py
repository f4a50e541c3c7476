"""The report of a job that has ended: report.json and report.md in its output folder."""

import asyncio
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import structlog
from pydantic_core import to_json

from millrace import events
from millrace.memory.ledger import Part, Phase
from millrace.rest import JobState, StepMetrics
from millrace.rest.coverage import Coverage, covered
from millrace.telemetry.metrics.catalogue import find
from millrace.telemetry.metrics.step.batch import MEAN_SCORE
from millrace.telemetry.metrics.step.evaluation import ASKED_PROMPTS, EVALUATION_RESULTS, SCORED_PROMPTS
from millrace.telemetry.metrics.step.memory import MEMORY, OFFLOADED, PEAK, PREDICTED, REST
from millrace.telemetry.metrics.step.mismatch import MISMATCH_SUMMARY
from millrace.telemetry.metrics.step.timing import TIMING
from services.coordinator.observe.step_metrics import mean
from services.coordinator.stages.run import Run
from services.coordinator.store import StoreDown

log = structlog.get_logger(__name__)
LAST = 10
"""Number of steps over which the final reward is averaged."""


async def report(run: Run, state: JobState, message: str) -> None:
    """Writes both files and stores their path with the job. `state` is the one in which the job ends, `message` says
    how. An error here does not make the job fail.

    Raises StoreDown.
    """
    folder = Path(run.spec.output)
    try:
        contents = await _gather(run, state, message)
        await asyncio.to_thread(_write, folder, contents)
    except StoreDown:
        raise
    except Exception as error:
        log.warning("no report was written", folder=str(folder), exc_info=error)
        await run.tell(events.ReportFailed(), f"no report was written to {folder}: {type(error).__name__}: {error}")
        return
    await run.components.store.jobs.update(run.job.id, report=str(folder / "report.md"))
    await run.refresh()


async def _gather(run: Run, state: JobState, message: str) -> dict[str, Any]:
    job, rows = run.job, await run.records.rows(0, run.job.step)
    ledger, clock = await run.prompts.view(), job.clock(time.time())
    return {
        "job": {
            "id": job.id,
            "name": job.name,
            "state": state,
            "message": message,
            "steps": job.step,
            "steps_wanted": run.steps,
            "seconds": clock["ran_s"],
            "seconds_in_queue": clock["queued_s"],
        },
        "reward": {
            "held_out_before": job.evaluation_before,
            "held_out_before_prompts": _prompts(job.evaluation_before_scored, job.evaluation_before_asked),
            "held_out_after": job.evaluation_last,
            "held_out_after_prompts": _prompts(job.evaluation_last_scored, job.evaluation_last_asked),
            "held_out_after_step": job.evaluation_step if job.evaluation_step >= 0 else None,
            "training_first": _reward(rows[:1]),
            "training_last": _reward(rows[-LAST:]),
        },
        "warnings": [warning.model_dump(mode="json") for warning in job.warnings],
        "ledger": ledger.model_dump(),
        "publications": _publications(await run.records.publications()),
        "mismatch": _mismatch(rows),
        "seconds_per_step": _seconds(rows),
        "memory": memory_by_phase(rows),
        "checkpoint": job.checkpoint,
        "model": run.spec.model.path,
        "evaluations": [_evaluation(row) for row in await run.records.rows(-1, job.step) if _evaluation(row)],
        "spec": run.spec.model_dump(mode="json"),
    }


def _reward(rows: Sequence[StepMetrics]) -> float | None:
    found = [row.values[MEAN_SCORE] for row in rows if MEAN_SCORE in row.values]
    return mean(found) if found else None


def _prompts(scored: int, asked: int) -> dict[str, int] | None:
    coverage = Coverage.of(scored, asked)
    return None if coverage is None else coverage.model_dump()


def _evaluation(row: StepMetrics) -> dict[str, float]:
    values = {name: value for name, value in row.values.items() if find(name) in EVALUATION_RESULTS}
    prompts = {name: row.values[name] for name in (SCORED_PROMPTS, ASKED_PROMPTS) if name in row.values}
    return {"step": float(row.step), **prompts, **values} if values or prompts else {}


def _seconds(rows: Sequence[StepMetrics]) -> dict[str, float]:
    """The mean of each timing over the steps that have it."""
    names = sorted({name for row in rows for name in row.values if find(name) in TIMING})
    return {name: mean([row.values[name] for row in rows if name in row.values]) for name in names}


def _mismatch(rows: Sequence[StepMetrics]) -> dict[str, float]:
    """Mean and largest value, over the steps, of each metric of how far the engines were from the trainer."""
    found: dict[str, float] = {}
    for name in sorted({name for row in rows for name in row.values if find(name) in MISMATCH_SUMMARY}):
        values = [row.values[name] for row in rows if name in row.values]
        found |= {name: mean(values), f"{name} (largest)": max(values)}
    return found


def _publications(reports: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Means over the trainer's publications, each with its slowest member's time; the number of copies by siblings."""
    copies = [r for r in reports if r.get("source") == "sibling"]
    sent = [r for r in reports if len(r["members"]) > 1 and r not in copies]
    if not sent:
        return {"count": 0}
    figures = {
        "count": float(len(sent)),
        "copies": float(len(copies)),
        "failed_attempts": float(sum(r["failures"] for r in sent)),
    }
    figures |= {"bytes": float(sent[-1]["members"][0]["bytes"]), "seconds": mean([r["seconds"] for r in sent])}
    for name in ("gather_s", "wire_s", "verify_s", "apply_s", "pause_s"):
        slowest = [max(float(member[name]) for member in r["members"]) for r in sent]
        figures |= {name: mean(slowest), f"{name}_max": max(slowest)}
    return figures


def _write(folder: Path, contents: dict[str, Any]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    _replace(folder / "report.json", to_json(contents, indent=2, inf_nan_mode="strings").decode())
    _replace(folder / "report.md", _markdown(contents))


def _replace(path: Path, text: str) -> None:
    """Writes a file so that a reader sees either all of it or nothing."""
    part = path.with_name(f".{path.name}.part")
    part.write_text(text, encoding="utf-8")
    part.replace(path)


def _markdown(contents: dict[str, Any]) -> str:
    job, reward, ledger = contents["job"], contents["reward"], contents["ledger"]
    lines = [f"# {job['name']}", ""]
    if job["state"] is not JobState.SUCCEEDED:
        lines += [f"**The job {_ended(job['state'])}:** {job['message']}", ""]
    steps = f"{job['steps']} of {job['steps_wanted']} steps"
    lines += [f"`{job['id']}`, {steps} in {job['seconds']:.0f} s from `{contents['model']}`, "]
    lines[-1] += f"after {job['seconds_in_queue']:.0f} s in the queue."
    lines += ["", "## Reward", "", "| | before | after |", "|---|---|---|"]
    lines += [f"| held-out | {_held_out(reward, 'before')} | {_held_out_after(job, reward)} |"]
    lines += [f"| training, first step and last {LAST} | {_figure(reward['training_first'])} | "]
    lines[-1] += f"{_figure(reward['training_last'])} |"
    if contents["warnings"]:
        lines += ["", "## Warnings", ""]
    for warning in contents["warnings"]:
        over = ", over since" if warning["over"] else ""
        lines += [f"* after step {warning['step']}{over}: {warning['message']}"]
    lines += ["", "## Ledger", "", *_table({k: v for k, v in ledger.items() if k != "reasons"})]
    if ledger["reasons"]:
        lines += ["", "Dropped:", "", *_table(ledger["reasons"])]
    lines += ["", "## Publications", "", *_table(contents["publications"])]
    lines += ["", "## Engine against trainer", "", *_table(contents["mismatch"])]
    lines += ["", "## Seconds per step", "", *_table(contents["seconds_per_step"])]
    lines += memory_lines(contents["memory"])
    lines += ["", "## Checkpoint", "", f"`{contents['checkpoint']}`" if contents["checkpoint"] else "none", ""]
    return "\n".join(lines)


def _ended(state: JobState) -> str:
    return "was cancelled" if state is JobState.CANCELLED else str(state)


def _held_out(reward: dict[str, Any], when: str) -> str:
    """The held-out score, with the number of its prompts if some have no score."""
    prompts = reward[f"held_out_{when}_prompts"]
    return covered(_figure(reward[f"held_out_{when}"]), None if prompts is None else Coverage(**prompts))


def _held_out_after(job: dict[str, Any], reward: dict[str, Any]) -> str:
    """The held-out score after training, with its step if that is not the last one of the job."""
    if reward["held_out_after_step"] is None:
        return (
            "not evaluated" if reward["held_out_before"] is None else f"not evaluated: the job {_ended(job['state'])}"
        )
    found, step = _held_out(reward, "after"), reward["held_out_after_step"]
    return found if step == job["steps_wanted"] else f"{found} (after step {step})"


def _table(values: dict[str, Any]) -> list[str]:
    return ["| | |", "|---|---|", *(f"| {name} | {_figure(value)} |" for name, value in values.items())]


def _figure(value: float | int | None) -> str:
    if value is None:
        return "–"
    return f"{value:,.0f}" if float(value).is_integer() else f"{value:.4g}"


ROWS = (*Part, REST, PEAK, OFFLOADED)
MemoryByPhase = Mapping[str, Mapping[str, Mapping[str, float]]]
"""GiB by phase, part, and `predicted` or `measured`."""


def memory_by_phase(rows: Sequence[StepMetrics]) -> MemoryByPhase:
    """The largest value of any step, on the rank that has most. Phases are in the order of a step."""
    found: dict[str, dict[str, dict[str, float]]] = {}
    for row in rows:
        for name, value in row.values.items():
            if find(name) in MEMORY:
                phase, *kind, part = name.split("/")[1:]
                sizes = found.setdefault(phase, {}).setdefault(part, {})
                column = PREDICTED if kind else "measured"
                sizes[column] = max(sizes.get(column, 0.0), value)
    return {
        phase: {part: found[phase][part] for part in ROWS if part in found[phase]} for phase in Phase if phase in found
    }


def memory_lines(memory: MemoryByPhase) -> Iterator[str]:
    """A table in Markdown, in GiB."""
    if not memory:
        return
    yield from ("", "## Memory of the trainer's fullest rank, GiB", "")
    yield f"| predicted → measured | {' | '.join(memory)} |"
    yield f"|---{'|---' * len(memory)}|"
    for part in ROWS:
        if any(part in parts for parts in memory.values()):
            yield f"| {part} | {' | '.join(_cell(parts.get(part)) for parts in memory.values())} |"
    yield ""
    yield "`rest` is the peak without the parts above that are kept; what is predicted only is measured as part of it."


def _cell(sizes: Mapping[str, float] | None) -> str:
    if sizes is None:
        return "–"
    return " → ".join(f"{sizes[column]:.4g}" if column in sizes else "–" for column in (PREDICTED, "measured"))
