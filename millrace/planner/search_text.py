"""What a search found, for people and for programs."""

import json
from collections.abc import Iterator, Sequence
from typing import Any

from millrace.backends import BACKENDS
from millrace.memory.ledger import peak
from millrace.memory.text import gib
from millrace.planner.candidates import OPTIONS, changed
from millrace.planner.plan import Plan
from millrace.planner.search import Proposal
from millrace.planner.text import as_dict, seconds
from millrace.spec import JobSpec

SHOWN = 10
WIDTHS = (8, 28, 11, 10, 9, 12, 12, 9, 6)
HEADS = ("step", "layout", "recompute", "offloaded", "replica", "GPU", "host", "update", "MFU")


def lines(spec: JobSpec, found: Sequence[Proposal]) -> Iterator[str]:
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
    """Whether a field of the spec has another value now, its default where it is not given."""
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
