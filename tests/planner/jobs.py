"""Jobs and clusters for plans."""

from pathlib import Path
from typing import Any

from millrace.planner.hardware import KINDS
from millrace.planner.plan import Cluster, Plan, make_plan
from millrace.planner.search import model_shape
from millrace.planner.workload import workload
from millrace.spec import JobSpec, load, parse
from millrace.spec.document import merged

PRESETS = Path(__file__).parents[2] / "presets"


def preset(name: str, **changes: Any) -> JobSpec:
    """A ready job with other values in some sections."""
    return parse(merged(load(PRESETS / f"{name}.yaml").model_dump(mode="json"), changes))


def planned(spec: JobSpec, trainer_gpus: int = 8, rollout_gpus: int = 8, gpu: str = "h200", **cluster: bool) -> Plan:
    made = Cluster(KINDS[gpu], trainer_gpus, rollout_gpus, **cluster)
    return make_plan(spec, model_shape(spec), made, workload(spec))
