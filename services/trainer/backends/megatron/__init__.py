"""The megatron backend: Megatron-Core, on GPUs with Transformer Engine, and the same code on hosts without CUDA."""

from services.trainer.backends.megatron import cpu

cpu.install()  # every module here imports megatron, and this one is imported before any of them
