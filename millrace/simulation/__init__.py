"""A job as a discrete-event model: replicas, trainer, publications, the staleness bound and faults.

It predicts how long steps take, how long each side waits, and how old the trained tokens are. Time is in seconds,
lengths are in tokens. Nothing here reads a job spec: planner and diagnosis say what a job is in these terms.
"""
