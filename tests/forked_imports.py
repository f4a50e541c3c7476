"""What the server of tests/forked.py imports for all. vLLM is not in it, nor Megatron, which changes torch."""

import contextlib
import importlib
import os

# As the trainer sets them; torch reads them when it is loaded.
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import torch
import transformers.models.qwen2.modeling_qwen2
import transformers.models.qwen3.modeling_qwen3  # noqa: F401

import millrace.cli  # noqa: F401
import services.coordinator.__main__
import services.coordinator.backup
import services.coordinator.process
import services.rollout.__main__
import services.rollout.process
import services.trainer.__main__
import services.trainer.backends.fsdp2.backend
import services.trainer.rank  # noqa: F401

if torch.version.cuda is None:  # with GPUs it may import torchao, which starts CUDA
    import peft  # noqa: F401

SERVING = ("anyio._backends._asyncio", "encodings.idna", "pydantic.v1", "uvicorn.lifespan.on", "uvloop")
"""What libraries import when a coordinator begins to serve, as far as it is installed."""
for name in SERVING:
    with contextlib.suppress(ImportError):
        importlib.import_module(name)

torch.set_num_threads(1)
