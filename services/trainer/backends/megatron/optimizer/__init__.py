"""Megatron's optimizer, and where its float32 state lies."""
