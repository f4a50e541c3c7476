"""Metrics of the time that the parts of a step take."""

from millrace.telemetry.metrics.declaration import Owner, StepMetric, Unit

COORDINATOR, TRAINER, REPLICA, SECONDS = Owner.COORDINATOR, Owner.TRAINER, Owner.REPLICA, Unit.SECONDS

STEP_SECONDS = "timing_s/step"
UPDATE_WEIGHTS = "timing_s/update_weights"
"""The last of the values that a finished step always has."""
TESTING = "timing_s/testing"
TESTING_WAIT = "timing_s/testing_wait"
STANDBY_COPY = "timing_s/copy_to_standbys"
PER_TOKEN = ("gen", "ref", "values", "adv", "update_critic", "update_actor")
"""The parts of a step that `timing_per_token_ms/{part}` is reported of."""

TIMING = (
    StepMetric(
        STEP_SECONDS,
        SECONDS,
        COORDINATOR,
        "The whole step: the sum of `timing_s/gen`, `timing_s/train` and `timing_s/update_weights`.",
    ),
    StepMetric(
        "timing_s/gen",
        SECONDS,
        COORDINATOR,
        "Waiting until enough groups for the step were complete; with `trainer.streaming` without the time in which the"
        " trainer worked on parts of them.",
    ),
    StepMetric("timing_s/train", SECONDS, COORDINATOR, "The trainer's step, all its parts, seen from the coordinator."),
    StepMetric(UPDATE_WEIGHTS, SECONDS, COORDINATOR, "The publication of the new weights, failed attempts included."),
    StepMetric(
        TESTING,
        SECONDS,
        COORDINATOR,
        "The evaluation on held-out prompts, if one was due, until its last answer; training goes on beside it.",
    ),
    StepMetric(
        TESTING_WAIT,
        SECONDS,
        COORDINATOR,
        "How long the job waited for that evaluation: before it published the next version, or ended.",
    ),
    StepMetric("timing_s/save_checkpoint", SECONDS, COORDINATOR, "How long the job waited for a checkpoint."),
    StepMetric(
        "timing_s/save_checkpoint_background",
        SECONDS,
        COORDINATOR,
        "From the start of a save until the checkpoint was on the disk; in the row of the step that noticed the end.",
    ),
    StepMetric(
        STANDBY_COPY,
        SECONDS,
        COORDINATOR,
        "How long the job waited for the trainer's state to be copied for trainers that stand by.",
    ),
    StepMetric(
        "timing_s/generate/{statistic}",
        SECONDS,
        REPLICA,
        "Generating a group, from the lease's arrival at the replica until its last sample ended; over the groups.",
    ),
    StepMetric("timing_s/score/{statistic}", SECONDS, REPLICA, "Scoring a group after that; over the groups."),
    StepMetric(
        "timing_s/reward",
        SECONDS,
        REPLICA,
        "The same as `timing_s/score/max`: groups are scored while others are generated, so a step waits for the last"
        " one at most.",
    ),
    StepMetric(
        "timing_per_token_ms/{part}",
        Unit.MILLISECONDS,
        COORDINATOR,
        "`timing_s/{part}` over the response tokens (`gen`) or over all tokens (the others), as in verl.",
    ),
    StepMetric("timing_s/fetch", SECONDS, TRAINER, "Fetching the groups and dividing them over the ranks."),
    StepMetric(
        "timing_s/old_log_prob",
        SECONDS,
        TRAINER,
        "The forward pass of the policy before the updates; about 0 if none is needed.",
    ),
    StepMetric("timing_s/ref", SECONDS, TRAINER, "The forward pass of the reference; about 0 if there is none."),
    StepMetric("timing_s/values", SECONDS, TRAINER, "The forward pass of the critic."),
    StepMetric("timing_s/adv", SECONDS, TRAINER, "Rewards, corrections and advantages."),
    StepMetric("timing_s/update_actor", SECONDS, TRAINER, "All updates of the policy."),
    StepMetric("timing_s/update_critic", SECONDS, TRAINER, "All updates of the critic."),
)
