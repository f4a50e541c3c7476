"""The seconds of a step beside those of the longer side at full load, if few answers are much longer than the others.

    python -m benchmarks.tail --repeats 3
    python -m benchmarks.tail --case "no streaming: schedule.max_staleness=0 trainer.streaming=false"
    python -m benchmarks.tail --apart --steps 6

Real services: vLLM, the FSDP2 trainer, the coordinator with its Redis. Answers have lognormal lengths, the 99th
percentile ten times the median, by the probabilities of the model itself (model.py). Each repeat begins with two jobs
that measure the engine's rate, with a full and with an emptying engine. They give G, the seconds in which the full
engine generates a step's tokens. Then the trainer is made to take as long: its loss waits for each token (loss.py).
Each case is a job of its own. Its step is compared with the longer of G and T, the trainer's measured seconds, and with
what the simulator predicts from the lengths and the rate of the first two jobs alone, and says of the job with its own.
With `--apart` the engine computes on one core and everything else on the others, as engine and trainer have GPUs of
their own; without it they take each other's time.

Prints a JSON object for each case, and a table.
"""

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import psutil

from benchmarks.stacks import finished, stack_in
from benchmarks.tail.model import made_model
from millrace.cli.settings import changes_of
from millrace.client import Client
from millrace.rest import StepMetrics
from millrace.rest.timeline import IdleCause
from millrace.simulation.job import simulate
from millrace.simulation.setting import Request
from millrace.spec import JobSpec, parse
from millrace.spec.document import merged
from millrace.telemetry.spans.kinds import LaneKind, SpanKind
from services.coordinator.diagnosis.forecast import Measured

FULL = 4
"""`max_staleness` of the job that keeps the engine full."""
WARM = 3
TOKEN_BUDGET = 768
"""Tokens of a micro-batch: a few of them make a step, as in jobs of the usual size. A streaming step begins when one is
full."""
SPANS_S = 20.0
"""How long it is waited for the spans of a job's last steps."""
TOLD = (
    "timing_s/train",
    "timing_s/update_weights",
    "timing_s/gen",
    "training/staleness/mean",
    "training/staleness/max",
)
BETWEEN = (IdleCause.COORDINATION, IdleCause.CHECKPOINT, IdleCause.UNKNOWN)


@dataclass(frozen=True)
class Case:
    """A job to measure."""

    name: str
    changes: Sequence[str]
    """Fields of the spec as `--set` has them."""

    @classmethod
    def of(cls, text: str) -> "Case":
        name, _, changes = text.partition(":")
        return cls(name.strip(), changes.split())


DEFAULTS = [
    Case("0", ["schedule.max_staleness=0", "trainer.streaming=false"]),
    Case("0, streaming", ["schedule.max_staleness=0", "trainer.streaming=true"]),
    *(Case(f"{bound}", [f"schedule.max_staleness={bound}"]) for bound in (1, 2, 4)),
    Case(
        "1, carried",
        [
            "schedule.max_staleness=1",
            "schedule.too_stale=train",
            "algorithm.correction.name=tis_token",
            "schedule.carried_prompts=16",
            "trainer.streaming=true",
        ],
    ),
]
"""Their names begin with `max_staleness`."""


@dataclass(frozen=True)
class Run:
    """What a job took, in the steps between its first and its last ones."""

    job_id: str
    first: int
    last: int
    step_s: float
    metrics: Mapping[str, float]
    requests: Sequence[Request]
    between_s: float
    pause_s: float
    simulated_s: float | None
    """Seconds of a step, simulated with the job's own lengths and rates, as `millrace diagnose` says."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--median", type=float, default=40.0, help="length of an answer")
    parser.add_argument("--longest", type=int, default=600, help="longest answer")
    parser.add_argument("--prompts", type=int, default=16, help="of a step")
    parser.add_argument("--samples", type=int, default=4, help="answers to a prompt")
    parser.add_argument("--slots", type=int, default=16, help="answers that the engine generates at once")
    parser.add_argument("--steps", type=int, default=10, help="of each job that are measured")
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--apart", action="store_true", help="the engine has a core that nothing else uses")
    parser.add_argument(
        "--case", type=Case.of, action="append", help="'NAME: FIELD=VALUE FIELD=VALUE', in place of all"
    )
    parser.add_argument("--more", type=Case.of, action="append", default=[], help="another case, beside the others")
    parser.add_argument("--set", action="append", default=[], help="FIELD=VALUE, for the jobs of all cases")
    options = parser.parse_args()
    if options.apart and len(os.sched_getaffinity(0)) < 2:
        parser.error("--apart needs two cores, and this process may use one.")
    with tempfile.TemporaryDirectory(prefix="millrace-tail-") as name:
        folder = Path(name)
        made_model(folder / "model", options.median, options.longest)
        (folder / "rows.jsonl").write_text("\n".join(json.dumps(row(n)) for n in range(4096)))
        found = []
        with stack_in(folder / "stack") as (stack, client):
            if options.apart:
                set_apart(stack.pids())
            for repeat in range(options.repeats):
                for measured in one_repeat(client, folder, options):
                    found.append(measured | {"repeat": repeat})
                    print(json.dumps(found[-1]), flush=True)
    print(table(found))


def set_apart(services: Mapping[str, int]) -> None:
    """Gives one core to the replicas among `services`, which have their pids, and the others to the rest. Processes
    that they start later have the cores of their parents."""
    *others, last = sorted(os.sched_getaffinity(0))
    for name, pid in services.items():
        cores = [last] if name.startswith("rollout") else others
        service = psutil.Process(pid)
        for process in [service, *service.children(recursive=True)]:
            for thread in process.threads():
                os.sched_setaffinity(thread.id, cores)


def row(number: int) -> dict[str, Any]:
    prompt = [{"role": "user", "content": f"Count, {number}."}]
    return {"data_source": "tail", "prompt": prompt, "reward_model": {"ground_truth": "nothing"}}


def one_repeat(client: Client, folder: Path, options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Measures the full engine and the trainer, then each case."""
    full = run(client, job(folder, options, FULL), 6)
    alone = run(client, job(folder, options, 0), options.steps)
    known = Measured.of(
        [*full.requests, *alone.requests],
        options.slots,
        alone.metrics,
        pause_s=alone.pause_s,
        between_s=alone.between_s,
    )
    assert known is not None
    tokens = options.prompts * options.samples * statistics.fmean(known.lengths)
    full_s, update_s = tokens / options.slots * known.engine.decode(options.slots, 0), alone.metrics["timing_s/train"]
    token_s = max(0.0, full_s - update_s) / tokens
    known = replace(known, replicas=1, train_s=max(full_s, update_s))
    yield {
        "case": "full engine",
        "full_s": full_s,
        "update_s": update_s,
        "tokens": tokens,
        "full_job_step_s": full.step_s,
        "full_job_update_s": full.metrics["timing_s/train"],
        "token_s_alone": known.engine.decode(0, 0),
        "token_s_full": known.engine.decode(options.slots, 0),
        "publication_s": known.publication_s,
        "between_s": known.between_s,
        "load": os.getloadavg()[0],
    }
    for case in options.case or [*DEFAULTS, *options.more]:
        spec = job(folder, options, 0, token_s, [*options.set, *case.changes])
        found = run(client, spec, options.steps)
        longer_s = max(full_s, found.metrics["timing_s/train"])
        predicted_s = simulate(known.setting(spec), 40).step_s
        yield {
            "case": case.name,
            "step_s": found.step_s,
            "longer_s": longer_s,
            "ratio": found.step_s / longer_s,
            "predicted_s": predicted_s,
            "error": predicted_s / found.step_s - 1,
            "simulated_s": found.simulated_s,
            "load": os.getloadavg()[0],
            **{name: found.metrics[name] for name in TOLD},
        }


def job(
    folder: Path, options: argparse.Namespace, bound: int, token_s: float = 0.0, changes: Sequence[str] = ()
) -> JobSpec:
    engine = {"enforce_eager": True, "max_model_len": options.longest + 128, "max_num_seqs": options.slots}
    tree: dict[str, Any] = {
        "name": "tail",
        "output": str(folder / f"output-{time.time_ns()}"),
        "model": {"path": str(folder / "model")},
        "data": {"files": [str(folder / "rows.jsonl")], "max_prompt_tokens": 64},
        "reward": {"function": "exact", "workers": 1},
        "rollout": {
            "samples_per_prompt": options.samples,
            "max_response_tokens": options.longest,
            "temperature": 1.0,
            "dtype": "float32",
            "engine_options": {"vllm": engine},
        },
        "algorithm": {
            "advantage": {"name": "grpo"},
            "policy_loss": {"name": f"{Path(__file__).with_name('loss.py')}:waiting", "options": {"token_s": token_s}},
        },
        "trainer": {"dtype": "float32", "token_budget": TOKEN_BUDGET, "optimizer": {"lr": 1e-6, "weight_decay": 0.0}},
        "schedule": {"steps": 1, "prompts_per_step": options.prompts, "max_staleness": bound},
        "deadlines": {"configure_s": 600, "step_s": 600, "no_replica_s": 600},
    }
    return parse(merged(tree, changes_of(changes)))


def run(client: Client, spec: JobSpec, steps: int) -> Run:
    """Runs a job of so many steps that count, between those in which the engine fills and those in which nothing is
    left to issue. Raises RuntimeError if it failed."""
    first = WARM + spec.schedule.max_staleness + 1
    last = first + steps - 1
    whole = last + spec.schedule.max_staleness + 1
    spec = parse(merged(spec.model_dump(mode="json"), {"schedule": {"steps": whole}}))
    done = finished(client, spec, 3600.0)
    rows = {row.step: row for row in client.metrics(done.id)}
    requests, pauses = timeline(client, done.id, first, last, spec)
    diagnosis = client.diagnosis(done.id, first, last)
    return Run(
        done.id,
        first,
        last,
        step_s=(rows[last].time_s - rows[first - 1].time_s) / steps,
        metrics=means([rows[step] for step in range(first, last + 1)]),
        requests=requests,
        between_s=sum(diagnosis.loop_s.get(cause, 0.0) for cause in BETWEEN),
        simulated_s=diagnosis.simulated_s,
        pause_s=statistics.fmean(pauses) if pauses else 0.0,
    )


def means(rows: Sequence[StepMetrics]) -> dict[str, float]:
    names = set.intersection(*({*row.values} for row in rows))
    return {name: statistics.fmean(row.values[name] for row in rows) for name in names}


def timeline(client: Client, job_id: str, first: int, last: int, spec: JobSpec) -> tuple[list[Request], list[float]]:
    """The requests of the steps and the pauses of their publications, when the spans of all have come."""
    wanted = (last - first + 1) * spec.schedule.prompts_per_step * spec.rollout.samples_per_prompt
    until = time.monotonic() + SPANS_S
    while True:
        seen = client.timeline(job_id, first, last)
        spans = [(lane.member, span) for lane in seen.lanes if lane.kind is LaneKind.ROLLOUT for span in lane.spans]
        requests = [
            Request(member, span.start_s, span.end_s, span.attributes.get("tokens", 0.0))
            for member, span in spans
            if span.kind is SpanKind.GENERATE
        ]
        if len(requests) >= 0.9 * wanted or time.monotonic() > until:
            return requests, [span.end_s - span.start_s for _, span in spans if span.kind is SpanKind.PAUSE]
        time.sleep(0.5)


def table(found: Sequence[Mapping[str, Any]]) -> str:
    """A line for each case: medians over the repeats."""
    lines = ["| case | s a step | ÷ max(G, T) | predicted | error |", "|---|---|---|---|---|"]
    cases = list(dict.fromkeys(each["case"] for each in found if "ratio" in each))
    for case in cases:
        of = [each for each in found if each["case"] == case]
        step, ratio, predicted, error = (
            statistics.median(each[name] for each in of) for name in ("step_s", "ratio", "predicted_s", "error")
        )
        lines.append(
            f"| {case} | {step:.2f} | {ratio:.2f} | {predicted:.2f} | {100 * error:+.0f} % |".replace("-", "−")
        )
    return "\n".join(lines)


if __name__ == "__main__":
    main()
