"""What a replica's launcher imports for vLLM before it forks. None of it starts a thread or CUDA.

vLLM itself forks its processes by default from one that has imported as much. What its workers import beyond that is
added for the CPU build alone: on a GPU it might start CUDA, which does not survive a fork.
"""

import contextlib
import os
from importlib import import_module

from millrace.local.host import visible_devices
from services.rollout.engines.vllm.environment import set_cpu_environment, set_environment

EVERYWHERE = (
    "vllm.v1.engine.async_llm",
    "vllm.v1.engine.core",
    "services.rollout.engines.vllm.engine",
    "services.rollout.engines.vllm.processes",
)
ON_CPU = ("vllm.v1.executor.multiproc_executor", "vllm.v1.worker.cpu_worker", "vllm.model_executor.models.qwen3")

os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")  # whether there is a GPU is asked without starting CUDA
set_environment()
if on_cpu := not visible_devices():
    set_cpu_environment()
with contextlib.suppress(ImportError):
    # It finds the memory of the title by the environment, which is another one in the processes that are forked.
    import_module("setproctitle").getproctitle()
for module in (*EVERYWHERE, *(ON_CPU if on_cpu else ())):
    import_module(module)
