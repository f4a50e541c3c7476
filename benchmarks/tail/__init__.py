"""How long a step takes when few answers are much longer than the others: `python -m benchmarks.tail`."""
