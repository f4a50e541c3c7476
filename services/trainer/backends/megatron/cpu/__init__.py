"""Megatron-Core on a host without CUDA: the same backend, for tests and small models."""
