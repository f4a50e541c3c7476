"""A plan and what a search found, in words and tables, for people, and as JSON, for programs."""

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from millrace.backends import BACKENDS
from millrace.memory.ledger import peak
from millrace.memory.savings import Saving, together
from millrace.memory.text import HEADROOM, gib, replica_lines, trainer_lines
from millrace.planner.plan import Limit, Plan
from millrace.planner.search import OPTIONS, Proposal, changed
from millrace.planner.trainer.layout import Cause, Seconds, total
from millrace.spec import JobSpec

LEAST_SHOWN = 0.005
"""Share of a part's seconds under which a cause has no line."""

CAUSES = {
    Cause.PRODUCTS: "matrix products of layers",
    Cause.ATTENTION: "attention",
    Cause.TOWER: "tower for images",
    Cause.ELEMENTWISE: "reading and writing activations",
    Cause.LAUNCHES: "starting products of experts",
    Cause.HEAD: "output head",
    Cause.TENSOR: "tensor and context parallelism",
    Cause.EXPERTS: "tokens to experts and back",
    Cause.PIPELINE: "waiting for pipeline stages",
    Cause.PACKING: "waiting for fuller ranks",
    Cause.DATA: "gradients and weights over copies",
    Cause.OPTIMIZER: "optimizer",
    Cause.OFFLOAD: "moving to and from host memory",
}
LIMITS = {
    Limit.TRAINER_MEMORY: "memory of the trainer's GPUs",
    Limit.REPLICA_MEMORY: "memory of the replicas' GPUs",
    Limit.HOST_MEMORY: "memory of the trainer's hosts",
}
SHOWN = 10
WIDTHS = (8, 28, 11, 10, 9, 12, 12, 9, 6)
HEADS = ("step", "layout", "recompute", "offloaded", "replica", "GPU", "host", "update", "MFU")


def seconds(value: float) -> str:
    """`12.3 s`, with three figures."""
    return f"{value:,.0f} s" if value >= 100 else f"{value:.3g} s"


def lines(plan: Plan) -> Iterator[str]:
    """The whole plan: memory, then times, then what they cost."""
    gpu = plan.cluster.gpu
    yield from trainer_lines(plan.spec, plan.shape, plan.cluster.trainer_gpus, gpu.memory)
    verdict = "does not fit" if Limit.HOST_MEMORY in plan.limits else "fits"
    room = f"{gib(gpu.host_room)} that services may use"
    yield f"  memory of the fullest host: {gib(plan.host_bytes)} of {room}: {verdict}"
    yield from replica_lines(plan.replica.memory, gpu.memory)
    yield ""
    yield from _step(plan)
    yield ""
    yield from _summary(plan)


def _step(plan: Plan) -> Iterator[str]:
    work, made = plan.work, plan.generation
    how = "in turns on the same GPUs, which Millrace does not do" if plan.cluster.colocated else "each on its own GPUs"
    lengths = f"{work.mean_prompt:,.0f} + {work.mean_response:,.0f} tokens on average"
    if work.image_tokens:
        lengths += f", {work.image_tokens:,.0f} of them of an image"
    yield f"a step of {work.sequences:,} sequences, {lengths}; trainer and replicas {how}:"
    running = f"up to {made.most_running:,.0f} requests at a time in each of {plan.replicas}"
    yield _row("generation", made.total, running)
    yield _row("  reading prompts", made.prefill_s)
    if made.tail_s:
        yield _row(
            "  with fewer than half of the requests", made.tail_s, f"longest response {made.longest:,.0f} tokens"
        )
    for name, part in (("forward passes before the update", plan.training.scoring), ("update", plan.training.update)):
        if total(part):
            yield _row(name, total(part), f"MFU {plan.training.mfu:.2f}" if name == "update" else "")
            yield from _causes(part)
    if plan.publication is not None:
        pause = f"{gib(plan.publication.bytes)}, {plan.publication.commit}, pause {seconds(plan.publication.pause)}"
        yield _row("publication", plan.publication.seconds, pause)
    else:
        yield _row("changing over", plan.turns_s, "weights to the engine, the trainer's state to host memory and back")


def _causes(part: Seconds) -> Iterator[str]:
    for cause, value in sorted(part.items(), key=lambda each: -each[1]):
        if value > LEAST_SHOWN * total(part):
            yield _row(f"  {CAUSES[cause]}", value)


def _row(name: str, value: float, note: str = "") -> str:
    return f"  {name:40}{seconds(value):>10}  {note}".rstrip()


def _summary(plan: Plan) -> Iterator[str]:
    least = "the longer side at full load" if plan.overlapped else "one side after the other"
    how = "" if plan.simulated is None else "simulated, "
    step = f"{seconds(plan.step_s)} ({how}max_staleness {plan.work.max_staleness})"
    yield f"step: {step}; {seconds(plan.least_s)} is {least}"
    yield f"tokens/s: {plan.tokens_per_s:,.0f}, {plan.tokens_per_s / plan.cluster.gpus:,.0f} a GPU"
    price = plan.cluster.gpu.price_per_hour
    yield f"price of a million trained tokens: {plan.cost_per_million:.2f}, at {price:g} a GPU hour"
    if not plan.cluster.colocated:
        yield f"idle: trainer {plan.trainer_idle:.0%}, replicas {plan.rollout_idle:.0%} of the step"
        if plan.simulated is not None and plan.simulated.late:
            late = f"{plan.simulated.late:.1f} groups a step, {plan.simulated.lost_share:.0%} of the tokens"
            yield f"generated again as they came too late: {late}"
        yield f"balanced: {plan.balanced_ratio:.2f} rollout GPUs for each trainer GPU"
    for limit in plan.limits:
        yield f"does not fit: {LIMITS[limit]}"


def as_dict(plan: Plan, *, simulate: bool = True) -> dict[str, Any]:
    """The plan as JSON has it: bytes, seconds, shares from 0 to 1. Without `simulate`, what comes of the simulation is
    null."""
    chosen: list[Saving] = []
    after = peak(plan.trainer_memory).total
    if Limit.TRAINER_MEMORY in plan.limits:
        limit = (1 - HEADROOM) * plan.cluster.gpu.memory
        chosen, after = together(plan.spec, plan.shape, plan.cluster.trainer_gpus, limit)
    replica, publication = plan.replica.memory, plan.publication
    return {
        "trainer_gpus": plan.cluster.trainer_gpus,
        "rollout_gpus": plan.cluster.rollout_gpus,
        "colocated": plan.cluster.colocated,
        "fits": not plan.limits,
        "exceeded": [limit.value for limit in plan.limits],
        "settings": {saving.field: saving.value for saving in chosen},
        "memory": {
            "trainer": {phase.value: _bytes(ledger.device) for phase, ledger in plan.trainer_memory.items()},
            "trainer_peak": peak(plan.trainer_memory).total,
            "trainer_peak_with_settings": after,
            "host": plan.host_bytes,
            "replica": _bytes(replica.ledger.device),
            "replica_cached_tokens": replica.cached_tokens,
        },
        "seconds": {
            "step": plan.step_s if simulate else None,
            "step_at_full_load": plan.least_s,
            "generation": plan.generation.total,
            "generation_prefill": plan.generation.prefill_s,
            "generation_tail": plan.generation.tail_s,
            "scoring": _seconds(plan.training.scoring),
            "update": _seconds(plan.training.update),
            "publication": publication.seconds if publication else None,
            "pause": publication.pause if publication else None,
            "changing_over": plan.turns_s,
        },
        "mfu": plan.training.mfu,
        "tokens_per_second": plan.tokens_per_s if simulate else None,
        "trainer_idle": plan.trainer_idle if simulate else None,
        "rollout_idle": plan.rollout_idle if simulate else None,
        "mean_staleness": plan.simulated.mean_staleness if simulate and plan.simulated else None,
        "cost_per_million_tokens": plan.cost_per_million if simulate else None,
        "balanced_ratio": None if plan.cluster.colocated else plan.balanced_ratio,
    }


def _bytes(parts: Mapping[Any, float]) -> dict[str, float]:
    return {part.value: size for part, size in parts.items() if size}


def _seconds(part: Seconds) -> dict[str, float]:
    return {"total": total(part), **{cause.value: value for cause, value in part.items() if value}}


def found_lines(spec: JobSpec, found: Sequence[Proposal]) -> Iterator[str]:
    """The fastest layouts, and what in `spec` the first one would change."""
    cluster = found[0].plan.cluster
    rollout = "" if cluster.colocated else f" and {cluster.rollout_gpus} of replicas"
    yield f"{cluster.trainer_gpus} GPUs of the trainer{rollout}; layouts that fit: {len(found)}. The fastest:"
    yield _line(HEADS)
    for proposal in found[:SHOWN]:
        yield _line(_cells(proposal.plan))
    yield "for the first one the job needs:"
    for field, value in found[0].changes.items():
        if _needed(spec, field, value):
            yield f"  --set {field}={json.dumps(value)}"


def _needed(spec: JobSpec, field: str, value: Any) -> bool:
    """Whether a field of the spec has another value now, its default if it is not given."""
    name = field.removeprefix(f"{OPTIONS}.")
    known = BACKENDS[spec.trainer.backend].options.model_fields
    if name != field and name in known:
        return bool(spec.trainer.backend_options.get(name, known[name].default) != value)
    return changed(spec, {field: value}) != spec


def _cells(plan: Plan) -> tuple[str, ...]:
    o = plan.layout
    sizes = {"TP": o.tensor, "PP": o.pipeline, "CP": o.context, "EP": o.expert, "DP": o.data}
    shown = " ".join(f"{name}{size}" for name, size in sizes.items() if size > 1) or "one GPU"
    moved = "weights" if o.moved_weights else f"{o.offloaded_optimizer:.0%}"
    return (
        seconds(plan.step_s),
        shown,
        "full" if o.recomputed.everything else "none",
        moved,
        f"{plan.replicas} × {plan.replica.workers}",
        gib(peak(plan.trainer_memory).total),
        gib(plan.host_bytes),
        seconds(sum(plan.training.update.values())),
        f"{plan.training.mfu:.2f}",
    )


def _line(cells: Sequence[str]) -> str:
    return "  " + "".join(f"{cell:<{width}}" for cell, width in zip(cells, WIDTHS, strict=True)).rstrip()


def as_list(found: Sequence[Proposal]) -> list[dict[str, Any]]:
    """Every layout with its settings and its plan. The steps of the first ones are simulated."""
    return [
        {"settings_to_change": dict(proposal.changes), "plan": as_dict(proposal.plan, simulate=place < SHOWN)}
        for place, proposal in enumerate(found)
    ]
