"""What vLLM finds in a process as it is imported: environment variables, and its classes of processes."""

import multiprocessing
import os
from multiprocessing.process import BaseProcess

from millrace.engines.vllm import ENTRY_POINT, plugin_missing
from millrace.errors import InvalidState
from services.rollout.engine import compute_threads
from services.rollout.engines.lifeline import own_descendants
from services.rollout.engines.vllm.processes import take_over_spawn

DEFAULTS = {
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn",  # gRPC's threads do not survive a fork
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_LOGGING_STREAM": "ext://sys.stderr",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # otherwise all replicas of a host bind to its first cores
}


def before_start() -> set[BaseProcess]:
    """Prepares this process for an engine, before vLLM is imported. Returns the children that it has now, which
    vLLM did not start."""
    own_descendants()
    set_environment()
    take_over_spawn()
    return set(multiprocessing.active_children())


def set_environment() -> None:
    """Sets the variables, before vLLM is imported. Variables that the user has set are kept. Raises InvalidState if
    Millrace's plugin is not installed."""
    if missing := plugin_missing():
        raise InvalidState(missing, "")
    for name, value in DEFAULTS.items():
        os.environ.setdefault(name, value)
    if (allowed := os.environ.get("VLLM_PLUGINS")) is not None and ENTRY_POINT not in allowed.split(","):
        os.environ["VLLM_PLUGINS"] = f"{allowed},{ENTRY_POINT}".lstrip(",")


def set_cpu_environment() -> None:
    """Sets the variables of vLLM's CPU build, before torch is imported in the processes that compute."""
    # In eager mode only one helper of the sampler would be compiled, which takes 15 s at every start.
    os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
    os.environ.setdefault("OMP_NUM_THREADS", str(compute_threads()))
