"""Metrics of the time that the parts of a step take."""

from millrace.telemetry.metrics.declaration import Unit, by_coordinator, by_replica, by_trainer

STEP_SECONDS = "timing_s/step"
UPDATE_WEIGHTS = "timing_s/update_weights"
"""The last of the values that a finished step always has."""
TESTING = "timing_s/testing"
TESTING_WAIT = "timing_s/testing_wait"
STANDBY_COPY = "timing_s/copy_to_standbys"
PER_TOKEN = ("gen", "ref", "values", "adv", "update_critic", "update_actor")
"""The parts of a step that `timing_per_token_ms/{part}` is reported of."""

TIMING = (
    by_coordinator(
        STEP_SECONDS,
        Unit.SECONDS,
        "The whole step: the sum of `timing_s/gen`, `timing_s/train` and `timing_s/update_weights`.",
    ),
    by_coordinator(
        "timing_s/gen",
        Unit.SECONDS,
        "Waiting until enough groups for the step were complete; with `trainer.streaming` without the time in which the"
        " trainer worked on parts of them.",
    ),
    by_coordinator("timing_s/train", Unit.SECONDS, "The trainer's step, all its parts, seen from the coordinator."),
    by_coordinator(UPDATE_WEIGHTS, Unit.SECONDS, "The publication of the new weights, failed attempts included."),
    by_coordinator(
        TESTING,
        Unit.SECONDS,
        "The evaluation on held-out prompts, if one was due, until its last answer; training goes on beside it.",
    ),
    by_coordinator(
        TESTING_WAIT,
        Unit.SECONDS,
        "How long the job waited for that evaluation: before it published the next version, or ended.",
    ),
    by_coordinator("timing_s/save_checkpoint", Unit.SECONDS, "How long the job waited for a checkpoint."),
    by_coordinator(
        "timing_s/save_checkpoint_background",
        Unit.SECONDS,
        "From the start of a save until the checkpoint was on the disk; in the row of the step that noticed the end.",
    ),
    by_coordinator(
        STANDBY_COPY,
        Unit.SECONDS,
        "How long the job waited for the trainer's state to be copied for trainers that stand by.",
    ),
    by_replica(
        "timing_s/generate/{statistic}",
        Unit.SECONDS,
        "Generating a group, from the lease's arrival at the replica until its last sample ended; over the groups.",
    ),
    by_replica("timing_s/score/{statistic}", Unit.SECONDS, "Scoring a group after that; over the groups."),
    by_replica(
        "timing_s/reward",
        Unit.SECONDS,
        "The same as `timing_s/score/max`: groups are scored while others are generated, so a step waits for the last"
        " one at most.",
    ),
    by_coordinator(
        "timing_per_token_ms/{part}",
        Unit.MILLISECONDS,
        "`timing_s/{part}` over the response tokens (`gen`) or over all tokens (the others), as in verl.",
    ),
    by_trainer("timing_s/fetch", Unit.SECONDS, "Fetching the groups and dividing them over the ranks."),
    by_trainer(
        "timing_s/old_log_prob",
        Unit.SECONDS,
        "The forward pass of the policy before the updates; about 0 if none is needed.",
    ),
    by_trainer("timing_s/ref", Unit.SECONDS, "The forward pass of the reference; about 0 if there is none."),
    by_trainer("timing_s/values", Unit.SECONDS, "The forward pass of the critic."),
    by_trainer("timing_s/adv", Unit.SECONDS, "Rewards, corrections and advantages."),
    by_trainer("timing_s/update_actor", Unit.SECONDS, "All updates of the policy."),
    by_trainer("timing_s/update_critic", Unit.SECONDS, "All updates of the critic."),
)
