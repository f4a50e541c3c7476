"""Names of other trainers in a job file: the fix says what is meant."""

from typing import Any

import pytest

from millrace.admission import choices
from millrace.backends.fsdp2 import Fsdp2Options
from millrace.backends.megatron import MegatronOptions
from millrace.errors import InvalidJob
from millrace.rl.registry import catalogue
from millrace.rl.registry.catalogue import KL_ESTIMATORS, AlgorithmKind
from millrace.spec import JobSpec, parse
from millrace.validation.names import ABSENT, FIELDS, UNITS, VALUES, name_here, paths

SMALLEST = {"name": "a job", "output": "/out", "model": {"path": "/model"}, "data": {"files": ["train.parquet"]}}
OPTIONS = {
    f"algorithm.{field}": {o.name for name in catalogue.names(kind) for o in catalogue.find(kind, name).options}
    for field, kind in (("policy_loss", AlgorithmKind.POLICY_LOSS), ("advantage", AlgorithmKind.ADVANTAGE))
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
    if "backend_options" in steps[:-1]:
        return steps[-1] in MegatronOptions.model_fields or steps[-1] in Fsdp2Options.model_fields
    return "engine_options" in steps or steps[-1] in OPTIONS.get(".".join(steps[:-2]), ())


@pytest.mark.parametrize("name", FIELDS)
def test_each_field_of_another_framework_leads_to_one_here(name: str) -> None:
    assert all(is_there(path) for path in paths(name))


@pytest.mark.parametrize("name", VALUES)
def test_each_function_of_another_framework_leads_to_one_here(name: str) -> None:
    here = [one for kind in (AlgorithmKind.POLICY_LOSS, AlgorithmKind.ADVANTAGE) for one in catalogue.names(kind)]
    assert name_here(name, (*KL_ESTIMATORS, *here)) == VALUES[name]


SETTINGS = (
    "actor_rollout_ref.model.lora_rank",
    "actor_rollout_ref.model.lora_alpha",
    "actor_rollout_ref.model.target_modules",
    "actor_rollout_ref.rollout.load_format",
    "actor_rollout_ref.rollout.layered_summon",
    "actor_rollout_ref.model.lora_adapter_path",
    "actor_rollout_ref.model.lora.merge",
    "actor_rollout_ref.model.use_shm",
    "data.train_batch_size",
    "actor_rollout_ref.actor.optim.lr",
    "actor_rollout_ref.actor.fsdp_config.fsdp_size",
    "actor_rollout_ref.actor.fsdp_config.param_offload",
    "actor_rollout_ref.actor.fsdp_config.optimizer_offload",
    "actor_rollout_ref.rollout.tensor_model_parallel_size",
    "actor_rollout_ref.rollout.name",
    "actor_rollout_ref.rollout.gpu_memory_utilization",
    "actor_rollout_ref.rollout.n",
    "actor_rollout_ref.rollout.max_num_seqs",
    "actor_rollout_ref.rollout.max_model_len",
    "actor_rollout_ref.rollout.max_num_batched_tokens",
    "actor_rollout_ref.ref.fsdp_config.param_offload",
    "actor_rollout_ref.actor.ulysses_sequence_parallel_size",
    "actor_rollout_ref.actor.megatron.use_mbridge",
    "actor_rollout_ref.actor.megatron.vanilla_mbridge",
    "actor_rollout_ref.model.lora.type",
    "actor_rollout_ref.model.lora.rank",
    "actor_rollout_ref.model.lora.alpha",
    "actor_rollout_ref.model.lora.dropout",
    "actor_rollout_ref.model.lora.dropout_position",
    "actor_rollout_ref.model.lora.target_modules",
    "actor_rollout_ref.model.lora.exclude_modules",
    "actor_rollout_ref.model.lora.lora_A_init_method",
    "actor_rollout_ref.model.lora.lora_B_init_method",
    "actor_rollout_ref.model.lora.adapter_path",
    "actor_rollout_ref.actor.strategy",
    "actor_rollout_ref.ref.strategy",
    "critic.strategy",
    "actor_rollout_ref.model.enable_gradient_checkpointing",
    "actor_rollout_ref.model.enable_activation_offload",
    "critic.model.enable_activation_offload",
    "actor_rollout_ref.model.use_remove_padding",
    "actor_rollout_ref.actor.use_dynamic_bsz",
    "actor_rollout_ref.actor.ppo_max_token_len_per_gpu",
    "actor_rollout_ref.ref.log_prob_max_token_len_per_gpu",
    "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu",
    "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu",
    "actor_rollout_ref.actor.entropy_checkpointing",
    "actor_rollout_ref.ref.entropy_from_logits_with_chunking",
    "actor_rollout_ref.ref.entropy_from_logits_chunk_size",
    "actor_rollout_ref.ref.ulysses_sequence_parallel_size",
    "NNODES",
    "TP",
    "PP",
    "EP",
    "OFFLOAD_FRACTION",
    "OFFLOAD_OPTIM",
    "LAST_LAYER",
    "trainer.nnodes",
    "trainer.n_gpus_per_node",
    "MTP",
    "actor_rollout_ref.actor.megatron.dist_checkpointing_path",
    "actor_rollout_ref.actor.megatron.use_dist_checkpointing",
)
"""The settings of verl's pages on saving memory and on large mixtures of experts, by their names there."""
ALGORITHM = (
    "algorithm.rollout_correction.rollout_is",
    "algorithm.rollout_correction.rollout_is_threshold",
    "algorithm.rollout_correction.rollout_is_batch_normalize",
    "algorithm.rollout_correction.rollout_rs",
    "algorithm.rollout_correction.rollout_rs_threshold",
    "algorithm.rollout_correction.bypass_mode",
    "algorithm.rollout_correction.loss_type",
    "algorithm.adv_estimator",
    "algorithm.norm_adv_by_std_in_grpo",
    "algorithm.gamma",
    "algorithm.lam",
    "algorithm.use_kl_in_reward",
    "algorithm.kl_penalty",
    "algorithm.kl_ctrl.kl_coef",
    "algorithm.kl_ctrl.horizon",
    "algorithm.kl_ctrl.target_kl",
    "algorithm.use_pf_ppo",
    "algorithm.pf_ppo",
    "algorithm.filter_groups.max_num_gen_batches",
    "actor_rollout_ref.actor.ppo_epochs",
    "actor_rollout_ref.actor.clip_ratio",
    "actor_rollout_ref.actor.clip_ratio_low",
    "actor_rollout_ref.actor.clip_ratio_high",
    "actor_rollout_ref.actor.clip_ratio_c",
    "actor_rollout_ref.actor.tau_pos",
    "actor_rollout_ref.actor.tau_neg",
    "actor_rollout_ref.actor.policy_loss.loss_mode",
    "actor_rollout_ref.actor.policy_loss.clip_cov_ratio",
    "actor_rollout_ref.actor.policy_loss.clip_cov_lb",
    "actor_rollout_ref.actor.policy_loss.kl_cov_ratio",
    "actor_rollout_ref.actor.policy_loss.ppo_kl_coef",
    "actor_rollout_ref.actor.policy_loss.dro_beta",
    "actor_rollout_ref.actor.loss_agg_mode",
    "actor_rollout_ref.actor.loss_scale_factor",
    "actor_rollout_ref.actor.entropy_coeff",
    "actor_rollout_ref.actor.calculate_entropy",
    "actor_rollout_ref.actor.use_kl_loss",
    "actor_rollout_ref.actor.kl_loss_coef",
    "actor_rollout_ref.actor.kl_loss_type",
    "critic.cliprange_value",
)
"""verl's settings of its algorithms, by their names there."""
UNKNOWN = ("remove it.", "remove it; the fields here are")


def fixes(tree: dict[str, Any]) -> dict[str, str]:
    with pytest.raises(InvalidJob) as refused:
        parse({**SMALLEST, **tree})
    return {mistake.field: mistake.fix for mistake in refused.value.mistakes}


@pytest.mark.parametrize("setting", SETTINGS)
def test_a_setting_for_memory_is_known_wherever_it_is_put(setting: str) -> None:
    """In verl's tree, in one line as on its command line, and by its name in the sections of a job spec."""
    *sections, name = setting.split(".")
    tree: dict[str, Any] = {name: 1}
    for section in reversed(sections):
        tree = {section: tree}
    if (nested := fixes(tree)).keys() - {setting, *(setting.rpartition(".")[:1])}:
        assert not all(fix.startswith(UNKNOWN) for fix in nested.values())
    told = next(fix for field, fix in reversed(nested.items()) if setting.startswith(field))
    assert told and not told.startswith(UNKNOWN)
    for fix in fixes({setting: 1}).values():
        assert not fix.startswith(UNKNOWN)
    if sections[-1:] == ["lora"] or name in ("name", "use_shm"):
        return  # words that mean something else by themselves, or the same
    for section in ("trainer", "rollout", "model", "algorithm"):
        for fix in fixes({section: {**SMALLEST.get(section, {}), name: 1}}).values():
            assert not fix.startswith(UNKNOWN), (section, fix)


@pytest.mark.parametrize("setting", ALGORITHM)
def test_a_setting_of_an_algorithm_is_known_in_verls_tree_and_in_one_line(setting: str) -> None:
    *sections, name = setting.split(".")
    tree: dict[str, Any] = {name: 1}
    for section in reversed(sections):
        tree = {section: tree}
    for given in (tree, {setting: 1}):
        told = fixes(given)
        assert told and not any(fix.startswith(UNKNOWN) for fix in told.values()), told


def test_a_file_for_verl_is_told_setting_by_setting() -> None:
    told = fixes({"actor_rollout_ref": {"actor": {"optim": {"lr": 3e-5}, "unheard_of": 1}, "rollout": {"n": 5}}})
    assert told["actor_rollout_ref.actor.optim.lr"] == "here that is `trainer.optimizer.lr`."
    assert told["actor_rollout_ref.rollout.n"] == "here that is `rollout.samples_per_prompt`."
    assert "actor_rollout_ref.actor.unheard_of" not in told and len(told) < 10


def test_what_is_absent_has_no_other_name_here() -> None:
    assert not ABSENT.keys() & FIELDS.keys()


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
