"""What the waiting of episodes costs: `python -m benchmarks.waiting`."""
