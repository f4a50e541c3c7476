"""Chaos: kills, stops and ends processes of a real job at random instants, and checks what must always hold.

`python -m benchmarks.chaos --seeds 5`, or `make chaos SEEDS=5`. One seed is one stack with one job. The seed decides
the faults, their targets and their instants. What is checked is read from Redis, checkpoints, metrics and files alone.
"""
