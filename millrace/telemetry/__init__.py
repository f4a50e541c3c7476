"""What the services say about themselves: logs, Prometheus metrics, traces, experiment trackers. Torch-free."""
