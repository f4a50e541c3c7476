"""Metrics of a step that add up over micro-batches and ranks."""
