"""Sections of a report that are not tables alone: the head, the curves, the samples."""

import json
from collections.abc import Mapping, Sequence
from itertools import groupby

from millrace.report.contents import Contents
from millrace.report.curves import Curve, chart, curve
from millrace.report.markup import Element, Part, details, element, section, table
from millrace.report.scales import written
from millrace.report.tables import clock
from millrace.rest import JobView, SampleView, StepMetrics
from millrace.telemetry.metrics.catalogue import SECTIONS, find

Rows = Sequence[tuple[int, Mapping[str, float]]]

FIRST = (
    "critic/rewards/mean",
    "critic/score/mean",
    "response_length/mean",
    "response_length/clip_ratio",
    "actor/entropy",
    "actor/ppo_kl",
    "actor/grad_norm",
    "actor/pg_loss",
    "rollout_corr/kl",
    "training/staleness/mean",
    "training/groups_without_signal",
    "perf/throughput",
)
"""Metrics whose curves are shown before all others."""
PARTS_OF_A_STEP = {"timing_s/gen": "wait for groups", "timing_s/train": "train", "timing_s/update_weights": "publish"}
"""Metrics of the one chart that has several curves."""
HELD_OUT = "val-core/"
SHOWN_OF_PROMPT = 90
"""Characters of a prompt's end that its line shows."""


def head(contents: Contents) -> Element:
    """Name, state, reward, times, and what is wrong."""
    job = contents.job
    facts = [
        ("state", job.status),
        ("step", f"{job.step:,} of {job.steps:,}" if job.steps else f"{job.step:,}"),
        ("reward", _reward(job.reward)),
        ("held-out", f"{_reward(job.evaluation_before)} → {_reward(job.evaluation_last)}"),
        ("ran", _duration(job.ran_s)),
        ("queued", _duration(job.queued_s)),
        ("submitted", clock(job.created_s)),
        ("model", str(job.spec.get("model", {}).get("path", ""))),
    ]
    if job.checkpoint:
        facts.append(("checkpoint", job.checkpoint))
    listed = element("dl", *(element("div", element("dt", name), element("dd", value)) for name, value in facts))
    made = f"{job.id}, as of {clock(contents.time_s)}"
    return element("header", element("h1", job.name), element("p", made, class_="quiet"), *_troubles(job), listed)


def _troubles(job: JobView) -> list[Element]:
    texts = [("failed", f"Failed: {job.failure}")] if job.failure else []
    texts += [("waits", f"Waits: {job.waiting.message}")] if job.waiting else []
    for warning in job.warnings:
        over = " (over since)" if warning.over else ""
        texts.append(("warning", f"Warning after step {warning.step}{over}: {warning.message}"))
    return [element("p", text, class_=f"trouble {kind}") for kind, text in texts]


def _reward(value: float | None) -> str:
    return "–" if value is None else f"{value:.3f}"


def _duration(seconds: float) -> str:
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02} min" if hours else f"{minutes} min {rest:02} s" if minutes else f"{seconds:.1f} s"


def curves_section(metrics: Sequence[StepMetrics]) -> Element:
    """The main curves, then all metrics by their subjects, folded."""
    rows = [(row.step, row.values) for row in metrics]
    names = sorted({name for _, values in rows for name in values})
    if not names:
        return section("Curves", element("p", "No step has been trained yet."))
    main = [name for name in FIRST if name in names]
    held_out = [name for name in names if name.startswith(HELD_OUT)][:6]
    charts = [_chart(rows, names, name) for name in (*main[:1], *held_out, *main[1:])]
    charts.insert(1 + len(held_out), _step_chart(rows))
    folded = [
        details(f"{heading} ({len(found)})", element("div", *found, class_="charts"))
        for heading, found in _all(rows, names)
    ]
    return section("Curves", element("div", *(one for one in charts if one is not None), class_="charts"), *folded)


def _step_chart(rows: Rows) -> Element | None:
    curves = [curve(name, rows, key, None) for key, name in PARTS_OF_A_STEP.items()]
    return chart("a step's seconds", "What a step waits for: groups, the trainer, the publication.", "s", curves)


def _all(rows: Rows, names: Sequence[str]) -> list[tuple[str, list[Element]]]:
    """Charts of all metrics by heading. Metrics that are the edges of a band have none of their own."""
    headings = {metric: part.heading for part in SECTIONS for metric in part.metrics}
    edges = {edge for name in names for edge in _band(names, name) or ()}
    found: dict[str, list[Element]] = {}
    for name in names:
        declared = find(name)
        heading = headings.get(declared, "Others") if declared is not None else "Others"
        if name not in edges and (made := _chart(rows, names, name)) is not None:
            found.setdefault(heading, []).append(made)
    order = [*headings.values(), "Others"]
    return sorted(found.items(), key=lambda item: order.index(item[0]))


def _chart(rows: Rows, names: Sequence[str], name: str) -> Element | None:
    declared = find(name)
    meaning, unit = (declared.meaning.replace("`", ""), str(declared.unit)) if declared is not None else ("", "")
    curves: list[Curve] = [curve(name, rows, name, _band(names, name))]
    return chart(name, meaning, unit, curves)


def _band(names: Sequence[str], name: str) -> tuple[str, str] | None:
    """The keys of the lowest and highest value, of a metric that is a mean and has both."""
    base, _, last = name.rpartition("/")
    low, high = f"{base}/min", f"{base}/max"
    return (low, high) if last == "mean" and low in names and high in names else None


def samples_section(samples: Sequence[SampleView]) -> Element | None:
    """One part for each prompt with all its answers, folded."""
    if not samples:
        return None
    groups = groupby(samples, key=lambda one: (one.step, one.purpose, one.prompt_id))
    parts = [_group(list(answers)[::-1]) for _, answers in groups]
    return section("Samples", element("p", f"The newest answers that are kept, by prompt: {len(samples)}."), *parts)


def _group(answers: Sequence[SampleView]) -> Element:
    first = answers[0]
    rewards = [one.reward for one in answers if one.reward is not None]
    told = f"rewards {', '.join(map(written, rewards))}" if rewards else "no reward"
    words = " ".join(first.prompt.split())
    end = words if len(words) <= SHOWN_OF_PROMPT else f"…{words[-SHOWN_OF_PROMPT:]}"
    truth = (
        first.ground_truth
        if isinstance(first.ground_truth, str)
        else json.dumps(first.ground_truth, ensure_ascii=False)
    )
    columns = [">reward", ">advantage", ">tokens", "ended by", "versions", "replica", "answer"]
    prompt = element("pre", first.prompt, class_="text")
    rows = [_answer(one) for one in answers]
    return details(
        f"step {first.step}, {first.purpose}, prompt {first.prompt_id}: {told} · {end}",
        element("h3", "Prompt"),
        prompt,
        element("p", "Ground truth: ", element("code", truth)),
        table(columns, rows, class_="answers"),
    )


def _answer(one: SampleView) -> list[Part]:
    reward = one.reward_failure or ("–" if one.reward is None else written(one.reward))
    advantage = "–" if one.advantage is None else written(one.advantage)
    text: Part = element("pre", one.answer, class_="text")
    if one.turns:
        turns = [
            element(
                "div",
                *([element("pre", turn.given, class_="text given")] if turn.given else []),
                element("pre", turn.answer, class_="text"),
            )
            for turn in one.turns
        ]
        text = element("div", *turns)
    versions = ", ".join(map(str, one.versions))
    return [reward, advantage, f"{one.tokens:,}", one.stop_reason, versions, one.member, text]
