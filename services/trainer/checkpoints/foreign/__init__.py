"""Distributed checkpoints of other programs: read box by box, and written by `millrace export`."""
