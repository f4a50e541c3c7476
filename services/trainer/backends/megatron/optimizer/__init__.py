"""Megatron's optimizer, and access to its float32 state."""
