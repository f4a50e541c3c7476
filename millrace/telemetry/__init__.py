"""Observability of the services: logs, metrics, traces, experiment trackers. Needs no torch."""
