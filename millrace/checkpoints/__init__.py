"""Checkpoints that other programs wrote, as far as their indexes tell: torch's distributed checkpoint (DCP), and
Megatron-Core's dist-checkpoint, which is one with Megatron's names.

Torch-free: what is missing is told when a job is submitted. `services/trainer/checkpoints/foreign` reads the values.
"""
