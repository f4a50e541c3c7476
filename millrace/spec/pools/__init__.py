"""Replicas that score with models of their own, and what a job uses them for."""
