"""A task that learns in about a minute on two cores: `millrace demo`, or `make demo` in a checkout.

Nothing is downloaded. `model` makes a small language model on the spot, warmed by a short supervised run until it gets
the task right now and then; `tasks` writes the prompts; `run` starts the local stack, submits `job.yaml` over REST like
any other job and shows what came of it.
"""
