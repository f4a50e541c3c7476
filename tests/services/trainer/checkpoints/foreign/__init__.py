"""Distributed checkpoints of other programs."""
