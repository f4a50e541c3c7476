"""Checkpoints that other programs wrote, read by their indexes: torch's distributed checkpoint (DCP), and
Megatron-Core's dist-checkpoint, which is one with Megatron's names.

Torch-free: missing tensors are reported when a job is submitted. `services/trainer/checkpoints/foreign` reads the
values.
"""
