"""Scores groups in contained processes."""
