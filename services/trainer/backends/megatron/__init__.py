"""The megatron backend: Megatron-Core, on GPUs with Transformer Engine, and the same code on hosts without CUDA."""

from services.trainer.backends.megatron.cpu import torch_calls

torch_calls.install()  # every module here imports megatron, and this one is imported before any of them
