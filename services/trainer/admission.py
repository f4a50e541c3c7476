"""What this trainer cannot do for a job, told before its model is loaded."""

from millrace.errors import InvalidJob
from millrace.rl.catalogue import INPUTS, Kind, find
from millrace.spec import JobSpec

ABSENT = {
    "values_bt": "a critic",
    "greedy_rewards_b": "the reward of a greedy answer to each prompt",
    "rewards_bk": "several rewards of each trajectory",
    "sum_pi_squared_bt": "the sum of squared probabilities at each token",
}
"""Inputs of advantages that this trainer does not have, and what they would need."""


def check(spec: JobSpec) -> None:
    """Raises InvalidJob."""
    optimizer = spec.trainer.optimizer
    if optimizer.schedule != "constant" and spec.schedule.steps is None:
        raise InvalidJob(
            f'trainer.optimizer.schedule: "{optimizer.schedule}" will not do: it falls until the last step, and'
            " schedule.steps does not say which that is.",
            'set schedule.steps, or use "constant".',
        )
    algorithm = spec.algorithm
    for kind, field, choice in (
        (Kind.ADVANTAGE, "algorithm.advantage", algorithm.advantage),
        (Kind.POLICY_LOSS, "algorithm.policy_loss", algorithm.policy_loss),
        (Kind.CORRECTION, "algorithm.correction", algorithm.correction),
    ):
        if choice is None:
            continue
        entry = find(kind, choice.name, f"{field}.name")
        entry.check(choice.options, f"{field}.options")
        for name in sorted(entry.required_inputs & ABSENT.keys() & INPUTS[kind]):
            what = f'{field}.name: "{choice.name}" will not do: it needs {ABSENT[name]}, which this trainer has not.'
            raise InvalidJob(what, "choose another, for example grpo.")
