"""Names of other trainers in a job file: the fix says what is meant."""

from typing import Any

import pytest

from millrace.backends.megatron import MegatronOptions
from millrace.errors import InvalidJob
from millrace.rl.registry import catalogue
from millrace.rl.registry.catalogue import KL_ESTIMATORS, AlgorithmKind
from millrace.spec import JobSpec, parse
from millrace.spec.checking import choices
from millrace.validation.foreign_names import FIELDS, UNITS, VALUES, name_here, paths

SMALLEST = {"name": "a job", "output": "/out", "model": {"path": "/model"}, "data": {"files": ["train.parquet"]}}
OPTIONS = {
    "algorithm.policy_loss": {o.name for o in catalogue.find(AlgorithmKind.POLICY_LOSS, "ppo").options},
    "algorithm.advantage": {
        o.name for name in ("grpo", "gae") for o in catalogue.find(AlgorithmKind.ADVANTAGE, name).options
    },
}


def is_there(place: str) -> bool:
    """Whether a job spec has such a field; what engines take is theirs to say."""
    part: Any = JobSpec
    for step in (steps := place.split(".")):
        if step in ("options", "engine_options", "backend_options"):
            continue
        if (field := getattr(part, "model_fields", {}).get(step)) is None:
            break
        kinds = [field.annotation, *getattr(field.annotation, "__args__", ())]
        part = next((kind for kind in kinds if hasattr(kind, "model_fields")), None)
    else:
        return True
    if "backend_options" in steps:
        return steps[-1] in MegatronOptions.model_fields
    return "engine_options" in steps or steps[-1] in OPTIONS.get(".".join(steps[:-2]), ())


@pytest.mark.parametrize("name", FIELDS)
def test_each_field_of_another_framework_leads_to_one_here(name: str) -> None:
    assert all(is_there(path) for path in paths(name))


@pytest.mark.parametrize("name", VALUES)
def test_each_function_of_another_framework_leads_to_one_here(name: str) -> None:
    assert name_here(name, (*KL_ESTIMATORS, *catalogue.names(AlgorithmKind.POLICY_LOSS))) == VALUES[name]


def test_fields_that_count_something_else_are_known() -> None:
    assert set(UNITS) <= set(FIELDS)


def test_a_part_that_is_several_here_is_told_as_all_of_them() -> None:
    with pytest.raises(InvalidJob, match="here that is `model` or `rollout` or `trainer`"):
        parse({**SMALLEST, "actor_rollout_ref": {}})


@pytest.mark.parametrize(
    ("part", "name", "fix"),
    [
        ("rollout", "n", "did you mean `samples_per_prompt`?"),
        ("evaluation", "n", "did you mean `samples_per_prompt`?"),
        ("trainer", "lr", "here that is `trainer.optimizer.lr`."),
        ("trainer", "ppo_micro_batch_size", "did you mean `token_budget`?"),
        (
            "trainer",
            "ppo_mini_batch_size",
            "`updates_per_step`? The number counts something else: there it",
        ),
        (
            "data",
            "ppo_mini_batch_size",
            "`trainer.updates_per_step`. The number counts something else: there it",
        ),
        ("data", "train_batch_size", "here that is `schedule.prompts_per_step`."),
        ("rollout", "max_new_tokens", "did you mean `max_response_tokens`?"),
        ("algorithm", "clip_ratio", "here that is `algorithm.policy_loss.options.clip_low`."),
        ("trainer", "tensor_model_parallel_size", "or `trainer.backend_options.tensor_parallel`."),
        ("schedule", "total_epochs", "did you mean `passes`?"),
        ("schedule", "total_training_steps", "did you mean `steps`?"),
        ("trainer", "max_staleness", "did you mean `schedule.max_staleness`?"),
        ("trainer", "low_var_kl", "remove it; the fields here are backend, "),
    ],
)
def test_a_field_by_another_trainer_s_name(part: str, name: str, fix: str) -> None:
    with pytest.raises(InvalidJob) as refusal:
        parse({**SMALLEST, part: {**SMALLEST.get(part, {}), name: 1}})
    assert f"{part}.{name}: there is no such field. Fix: " in str(refusal.value) and fix in str(refusal.value)


@pytest.mark.parametrize(
    ("algorithm", "fix"),
    [
        ({"kl": "low_var_kl"}, "did you mean `k3`? Choose one of k1, "),
        ({"policy_loss": "vanilla"}, "did you mean `ppo`?"),
        ({"policy_loss": {"name": "ppo", "options": {"eps_clip_high": 0.3}}}, "did you mean `clip_high`?"),
    ],
)
def test_a_function_or_option_by_another_trainer_s_name(algorithm: dict[str, Any], fix: str) -> None:
    with pytest.raises(InvalidJob) as refusal:
        choices.check(parse({**SMALLEST, "algorithm": algorithm}))
    assert fix in str(refusal.value)
