"""Scores groups with the job's reward function, in isolated processes."""
