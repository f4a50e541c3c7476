"""The planner's predictions beside what was measured: on the pages that the presets come from, and in BENCHMARKS.md.

    python -m benchmarks.planner            # prints the table
    python -m benchmarks.planner --write    # puts it into docs/planner.md

Nothing is measured here, and nothing is adjusted to a row: every prediction is what `millrace plan` says of the job.
"""

import argparse
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

from benchmarks.frozen_head import frozen_head_gradient
from benchmarks.planner_cases import MEASURED_JOBS, PUBLICATIONS, SMALL, Measured, job
from millrace.megatron.architectures.published import PUBLISHED
from millrace.megatron.architectures.shape import active_parameters
from millrace.memory.ledger import peak
from millrace.memory.prediction import predict
from millrace.planner.hardware import GIB, KINDS
from millrace.planner.plan import Cluster, Plan, make_plan
from millrace.planner.publishing import publication_times
from millrace.planner.replica import replica_of
from millrace.planner.search import Request, fewest, model_shape
from millrace.planner.trainer.layout import Imbalance, layout_of, total
from millrace.planner.trainer.times import Trainer, training_times
from millrace.planner.workload import Workload, workload
from millrace.spec import JobSpec, load, parse
from millrace.spec.document import merged
from millrace.spec.passes import StepPasses

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "planner.md"
BEGIN, END = "<!-- table: written by `python -m benchmarks.planner --write` -->\n", "<!-- end of table -->\n"
H200, H20 = KINDS["h200"], KINDS["h20"]
BY_TOKENS = {1: 0.0, 8: 0.1017, 16: 0.166, 32: 0.231}
"""Waiting of data-parallel ranks with verl's micro-batches, by BENCHMARKS.md, "Packing and balancing". That of 16 lies
between."""
EVEN = Imbalance(packing=lambda ranks: 0.0, expert_spread=0.0)
"""The measured jobs have sequences of equal length, or one rank, and the same number of tokens for every expert."""
PROMPT, RESPONSE, RESPONSE_30B = 150, 1960, 1000
"""Mean lengths. The page has the response of DeepSeek-V3 only; the others are assumed."""
MORE_HOSTS = "Not explained, see above"


@dataclass(frozen=True)
class Row:
    """A measured value and its prediction."""

    case: str
    what: str
    unit: str
    measured: float
    predicted: float
    within: float
    """Target: the largest deviation, as a share."""
    why: str = ""
    """Why the prediction is outside."""

    @property
    def off(self) -> float:
        return self.predicted / self.measured - 1

    @property
    def text(self) -> str:
        percent = round(100 * self.off)
        off = f"{percent:+d} %".replace("-", "−") if percent else "0 %"
        return f"{self.what} {_number(self.measured)} → {_number(self.predicted)} ({off})".strip()


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def rows() -> Iterator[Row]:
    yield from pages()
    yield from whole_job()
    yield from measured_jobs()
    yield from publications()


def table(found: Iterable[Row]) -> str:
    """One line a case: seconds, GiB and the rest, each measured → predicted."""
    lines = ["| case | seconds | GiB | |", "|---|---|---|---|"]
    for case, of_case in groupby(found, key=lambda row: row.case):
        of = list(of_case)
        cells = ["; ".join(row.text for row in of if row.unit == unit) for unit in ("s", "GiB", "")]
        why = [f"{row.why}." for row in of if row.why]
        lines.append(f"| {case} | {cells[0]} | {cells[1]} | {' '.join([*filter(None, [cells[2]]), *why])} |")
    return "\n".join(lines) + "\n"


def preset(name: str, changes: dict[str, Any]) -> JobSpec:
    return parse(merged(load(ROOT / "presets" / f"{name}.yaml").model_dump(mode="json"), changes))


def as_on_the_page(name: str, *, replica: int, share: float, prompts: int, updates: int, kl: bool) -> JobSpec:
    """A preset with the sizes of the page's own script, which generates without CUDA graphs and keeps the reference in
    host memory."""
    longest, most = (9632, 11680) if kl else (8192, 10240)
    engine = {"max_model_len": most, "tensor_parallel_size": replica, "pipeline_parallel_size": 1}
    options = {"recompute": {"granularity": "full" if kl else "none"}}
    reference = {"backend_options": {"offload_reference": True}} if kl else {}
    return preset(
        name,
        {
            "data": {"max_prompt_tokens": 2048},
            "rollout": {
                "samples_per_prompt": 8 if kl else 16,
                "max_response_tokens": longest,
                "engine_options": {**engine, "gpu_memory_utilization": share, "enforce_eager": True},
            },
            "trainer": {
                "token_budget": most,
                "updates_per_step": updates,
                "backend_options": options,
                "reference": reference,
            },
            "algorithm": {"kl": "k3" if kl else None},
            "schedule": {"prompts_per_step": prompts, "max_staleness": 0},
        },
    )


def in_turns(spec: JobSpec, gpus: int, mean_response: float) -> Plan:
    work = workload(spec, PROMPT, mean_response)
    cluster = Cluster(H20, gpus, gpus, colocated=True)
    return make_plan(spec, model_shape(spec), cluster, work, imbalance=Imbalance(packing=BY_TOKENS.__getitem__))


def their_mfu(plan: Plan) -> float:
    """MFU by the formula of the pages' system: embeddings count as products, attention over the whole square."""
    shape, work = plan.shape, plan.work
    parameters = active_parameters(shape) + shape.vocabulary * shape.hidden
    query = shape.head_dim if shape.latent is None else shape.latent.plain_dim + shape.latent.rotary_dim
    pairs = work.tokens * work.mean_pair_length
    flops = 6 * parameters * work.tokens + 12 * pairs * query * shape.heads * shape.layers
    return plan.training.mfu * flops / plan.training.flops


def pages() -> Iterator[Row]:
    """The figures of verl's page, on H20s whose trainer and replicas take turns."""
    spec = as_on_the_page("deepseek-v3-96gpu", replica=32, share=0.6, prompts=96, updates=3, kl=True)
    plan, case = in_turns(spec, 96, RESPONSE), "verl: DeepSeek-V3, 96 H20"
    yield Row(case, "rollout", "s", 1050, plan.generation.total + plan.turns_s, 0.25)
    yield Row(case, "step", "s", 1700, plan.step_s, 0.25)
    yield Row(case, "GPU", "GiB", 66, peak(plan.trainer_memory).total / GIB, 0.25)
    yield Row(case, "host", "GiB", 1500, plan.host_bytes / GIB, 0.25)
    yield Row(case, "MFU", "", 0.19, their_mfu(plan), 0.25)
    small = as_on_the_page("qwen3-30b-a3b-8gpu", replica=4, share=0.7, prompts=512, updates=4, kl=False)
    for gpus, mfu, why in ((8, 0.40, ""), (16, 0.37, ""), (32, 0.31, MORE_HOSTS)):
        found = their_mfu(in_turns(small, gpus, RESPONSE_30B))
        yield Row(f"verl: Qwen3-30B-A3B, {gpus} H20", "MFU", "", mfu, found, 0.25, why)
    large = as_on_the_page("qwen3-235b-a22b-32gpu", replica=8, share=0.85, prompts=32, updates=2, kl=True)
    for model, job_spec, gpus in (("DeepSeek-V3", spec, 96), ("Qwen3-235B-A22B", large, 32)):
        work = workload(job_spec, PROMPT, RESPONSE)
        request = Request(job_spec, model_shape(job_spec), Cluster(H20, 8, 8, colocated=True), work)
        yield Row(f"verl: {model}, smallest system", "H20", "", gpus, fewest(request), 0.0)


def measured_jobs() -> Iterator[Row]:
    """Steps and peaks of BENCHMARKS.md on H200s."""
    for case in MEASURED_JOBS:
        if case.seconds:
            yield Row(case.name, "", "s", case.seconds, _update(case), 0.2)
        if case.gib:
            with frozen_head_gradient():
                found = peak(predict(case.spec, case.shape, case.gpus, case.tokens)).total / GIB
            yield Row(case.name, "", "GiB", case.gib, found, 0.1, case.why)


def _update(case: Measured) -> float:
    work = Workload(case.sequences, 1, case.prompt, case.response, case.longest, StepPasses(1, *[False] * 5), 0)
    layout = layout_of(case.spec, case.shape, case.gpus)
    trainer = Trainer(H200, case.shape, layout, work, case.tokens, case.spec.model.lora, EVEN)
    return total(training_times(trainer).update)


def publications() -> Iterator[Row]:
    for name, model, senders, workers, commit, seconds, why in PUBLICATIONS:
        spec = job(
            "megatron",
            rollout={"engine_options": {"tensor_parallel_size": workers}},
            publication={"commit": commit},
        )
        replica = replica_of(spec, PUBLISHED[model], "vllm", H200)
        found = publication_times(spec, replica.shape, replica, trainer_gpus=senders, rollout_gpus=workers)
        yield Row(f"publication of {name}", commit, "s", seconds, found.seconds, 0.2, why)


def whole_job() -> Iterator[Row]:
    """A GRPO job on two H200s, of which one trains and one generates, without streaming: Megatron-Core and vLLM 0.26,
    CUDA graphs."""
    for staleness, seconds in ((0, 12.0), (1, 6.4), (2, 6.3)):
        schedule = {"prompts_per_step": 32, "max_staleness": staleness}
        rollout = {"max_response_tokens": 3072, "samples_per_prompt": 8}
        spec = job("megatron", rollout=rollout, schedule=schedule, streaming=False)
        plan = make_plan(spec, SMALL, Cluster(H200, 1, 1), workload(spec, 32, 430))
        case = f"1.4B, 1 + 1 H200, 32 × 8 answers of 430 tokens on average, `max_staleness: {staleness}`"
        yield Row(case, "step", "s", seconds, plan.step_s, 0.2)
        if staleness == 0:
            yield Row(case, "generation", "s", 9.6, plan.generation.total, 0.2)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="put the table into docs/planner.md")
    if not parser.parse_args().write:
        print(table(rows()), end="")
        return
    page = PAGE.read_text(encoding="utf-8")
    before, rest = page.split(BEGIN)
    PAGE.write_text(before + BEGIN + table(rows()) + END + rest.split(END)[1], encoding="utf-8")


if __name__ == "__main__":
    main()
