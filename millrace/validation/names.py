"""Names that a job spec does not have: what verl, slime, TRL and the engines call its fields, since a job written for
them has their names, and which known name was probably meant by a misspelt one."""

import difflib
from collections.abc import Collection


def by_name(called: dict[str, str]) -> dict[str, str]:
    """The key of each name in the values, which separate names by spaces."""
    return {name: key for key, names in called.items() for name in names.split()}


FIELDS = by_name(
    {
        "model, rollout, trainer": "actor_rollout_ref",
        "trainer": "actor",
        "algorithm.critic": "critic",
        "reward": "reward_model",
        "rollout.samples_per_prompt": "n n_samples_per_prompt num_generations group_size",
        "rollout.max_response_tokens": "max_new_tokens max_tokens response_length max_response_length "
        "max_completion_length rollout_max_response_len",
        "rollout.temperature": "rollout_temperature",
        "rollout.environment": "multi_turn tool_config_path interaction_config_path",
        "rollout.environment.max_turns": "max_assistant_turns",
        "rollout.engine_options.tensor_parallel_size, trainer.backend_options.tensor_parallel": (
            "tensor_model_parallel_size"
        ),
        "rollout.engine_options.tensor_parallel_size": "tensor_parallel_size rollout_num_gpus_per_engine",
        "rollout.engine_options.data_parallel_size": "data_parallel_size",
        "rollout.engine_options.gpu_memory_utilization": "gpu_memory_utilization",
        "rollout.engine_options.max_num_seqs": "max_num_seqs",
        "rollout.engine_options.max_model_len": "max_model_len",
        "rollout.engine_options.enforce_eager": "enforce_eager",
        "rollout.engine_options.sglang.mem_fraction_static": "mem_fraction_static",
        "data.max_prompt_tokens": "prompt_length max_prompt_length rollout_max_prompt_len",
        "data.files": "train_files prompt_data",
        "data.images": "image_key limit_images",
        "trainer.train_tower": "freeze_vision_tower",
        "data.overlong_prompts": "truncation filter_overlong_prompts",
        "data.chat_template_options": "apply_chat_template_kwargs",
        "evaluation.files": "val_files eval_prompt_data",
        "evaluation.every_steps": "test_freq eval_interval",
        "model.path": "hf_checkpoint model_path model_name_or_path",
        "model.weights": "dist_checkpointing_path use_dist_checkpointing",
        "reward.function": "custom_reward_function custom_rm_path reward_fn rm_type sandbox_fusion",
        "reward.options": "reward_kwargs",
        "algorithm.advantage": "adv_estimator advantage_estimator multi_objective_aggregation",
        "algorithm.policy_loss": "loss_mode importance_sampling_level",
        "algorithm.aggregation": "loss_agg_mode",
        "algorithm.kl": "kl_loss_type kl_penalty use_kl_loss",
        "algorithm.kl_in": "use_kl_in_reward",
        "algorithm.kl_coefficient": "kl_coef kl_loss_coef beta",
        "algorithm.kl_target": "target_kl",
        "algorithm.kl_coefficient, algorithm.kl_target, algorithm.kl_horizon": "kl_ctrl",
        "algorithm.kl_horizon": "horizon",
        "algorithm.entropy_coefficient": "entropy_coef entropy_coeff",
        "algorithm.policy_loss.options.clip_low": "clip_ratio clip_ratio_low eps_clip epsilon",
        "algorithm.policy_loss.options.clip_high": "clip_ratio_high eps_clip_high epsilon_high",
        "algorithm.policy_loss.options.dual_clip": "clip_ratio_c eps_clip_c delta",
        "algorithm.policy_loss.options.tau_positive": "tau_pos sapo_temperature_pos",
        "algorithm.policy_loss.options.tau_negative": "tau_neg sapo_temperature_neg",
        "algorithm.policy_loss.options.fraction": "clip_cov_ratio kl_cov_ratio",
        "algorithm.policy_loss.options.bounds": "clip_cov_lb clip_cov_ub",
        "algorithm.policy_loss.options.coefficient": "ppo_kl_coef",
        "algorithm.policy_loss.options.beta": "dro_beta",
        "algorithm.policy_loss, algorithm.aggregation": "loss_type",
        "algorithm.advantage.options.std": "norm_adv_by_std_in_grpo",
        "algorithm.advantage.options.gamma": "gamma",
        "algorithm.advantage.options.lam": "lam",
        "algorithm.critic.clip": "cliprange_value",
        "algorithm.critic.warmup_steps": "critic_warmup",
        "algorithm.correction": "tis use_tis rollout_is rollout_rs rollout_correction rollout_is_threshold "
        "rollout_rs_threshold vllm_importance_sampling_correction vllm_importance_sampling_mode "
        "vllm_importance_sampling_cap vllm_importance_sampling_clip_max vllm_importance_sampling_clip_min",
        "algorithm.normalize_correction_weights": "rollout_is_batch_normalize",
        "algorithm.old_logprobs": "bypass_mode",
        "algorithm.advantage.options.std_over": "scale_rewards",
        "algorithm.top_entropy_fraction": "top_entropy_quantile",
        "algorithm.off_policy_limit": "off_policy_mask_threshold",
        "algorithm.router_replay": "use_rollout_routing_replay",
        "algorithm.drop_groups_without_signal": "filter_groups dynamic_sampling_filter_path",
        "algorithm.max_refills": "max_num_gen_batches",
        "algorithm.overlong_buffer_tokens": "overlong_buffer overlong_buffer_cfg",
        "algorithm.overlong_penalty": "penalty_factor",
        "algorithm.advantage.options.weights": "reward_weights",
        "trainer.backend": "strategy",
        "trainer.token_budget": "micro_batch_size micro_batch_size_per_gpu ppo_micro_batch_size "
        "ppo_micro_batch_size_per_gpu ppo_max_token_len_per_gpu max_tokens_per_gpu "
        "max_token_len_per_gpu log_prob_micro_batch_size_per_gpu",
        "trainer.updates_per_step": "mini_batch_size ppo_mini_batch_size num_steps_per_rollout",
        "trainer.activation_recompute": "gradient_checkpointing enable_gradient_checkpointing",
        "model.use_shm": "use_shm",
        "trainer.backend_options.offload_activations": "enable_activation_offload",
        "trainer.backend_options.tensor_parallel": "tp",
        "trainer.backend_options.pipeline_parallel": "pp pipeline_model_parallel_size",
        "trainer.backend_options.context_parallel": "cp context_parallel_size",
        "trainer.backend_options.expert_parallel": "ep expert_model_parallel_size",
        "trainer.optimizer.lr": "lr learning_rate",
        "trainer.optimizer": "optim",
        "trainer.optimizer.betas": "adam_beta1 adam_beta2",
        "trainer.optimizer.warmup_steps": "lr_warmup_steps lr_warmup_iters",
        "trainer.optimizer.schedule": "lr_scheduler_type lr_decay_style",
        "trainer.optimizer.clip_grad_norm": "grad_clip clip_grad max_grad_norm",
        "schedule.prompts_per_step": "train_batch_size rollout_batch_size",
        "schedule.steps": "max_steps num_rollout total_training_steps",
        "schedule.passes": "num_epoch total_epochs num_train_epochs",
        "schedule.max_staleness": "staleness_threshold",
        "schedule.save_every_steps": "save_freq save_interval",
        "schedule.keep_checkpoints": "max_actor_ckpt_to_keep",
        "tracking.trackers": "logger",
        "tracking.project": "project_name",
        "name": "experiment_name",
        "output": "output_dir default_local_dir",
        "trainer.backend_options": "fsdp_config megatron",
        "algorithm.kl, trainer.reference": "ref",
        "trainer.backend_options.fsdp_size": "fsdp_size",
        "trainer.backend_options.offload_parameters, trainer.backend_options.offload_reference": "param_offload",
        "trainer.backend_options.offload_optimizer": "optimizer_offload offload_optim",
        "trainer.backend_options.optimizer_offload_fraction": "offload_fraction",
        "trainer.backend_options.last_stage_layers": "last_layer",
        "trainer.backend_options.sequence_parallel_size": "ulysses_sequence_parallel_size",
        "trainer.reference.backend_options.sequence_parallel_size": "ref.ulysses_sequence_parallel_size",
        "trainer.critic.backend_options.sequence_parallel_size": "critic.ulysses_sequence_parallel_size",
        "rollout.engine_options.max_num_batched_tokens": "max_num_batched_tokens",
        "trainer.token_budget, trainer.reference.token_budget": "log_prob_max_token_len_per_gpu",
        "trainer.reference.token_budget": "ref.log_prob_max_token_len_per_gpu",
        "trainer.critic.token_budget": "critic.ppo_max_token_len_per_gpu forward_max_token_len_per_gpu",
        "trainer.backend_options.logprob_chunk_tokens": "entropy_from_logits_chunk_size",
        "model.lora": "lora",
        "model.lora.rank": "lora_rank lora_r lora.rank",
        "model.lora.alpha": "lora_alpha lora.alpha",
        "model.lora.dropout": "lora_dropout lora.dropout",
        "model.lora.adapter_path": "lora_adapter_path adapter_path",
        "model.lora.init": "lora_a_init_method",
        "model.lora.target_modules": "lora_target_modules target_modules",
        "model.lora.exclude_modules": "exclude_modules",
        "model.lora.merge": "lora.merge",
    }
)
"""Another framework's name of a field, and the path of the same field in a job spec; some have several paths. A name
with a dot is one below a section of that name."""

VALUES: dict[str, str] = {
    "low_var_kl": "k3",
    "mse": "k2",
    "vanilla": "ppo",
    "geo_mean": "gmpo",
    "grpo_vectorized": "grpo",
    "rloo_vectorized": "rloo",
    "tir_optimal_token_baseline": "optimal_token_baseline",
}
"""Another framework's name of a function, and the name of the same function in a job spec."""

ABSENT = by_name(
    {
        "the matrix B of an adapter begins with zeros": "lora_b_init_method",
        "dropout comes before the adapter": "dropout_position",
        "an adapter is plain LoRA, or DoRA with model.lora.dora": "lora.type",
        "replicas get their weights from the trainer before the first request": "load_format",
        "weights are published in pieces, and no rank gathers them whole": "layered_summon",
        "a batch is trained once: trainer.updates_per_step cuts it into the shares of several updates": (
            "ppo_epochs num_iterations"
        ),
        "the divisor of the `*-norm` aggregations is rollout.max_response_tokens": "loss_scale_factor",
        "the entropy is always reported": "calculate_entropy",
        "answers are not drawn again by their reward": "use_pf_ppo pf_ppo",
        "answers that were cut are trained; algorithm.overlong_buffer_tokens punishes them": (
            "mask_truncated_completions"
        ),
        "the KL in the loss is not weighted by the ratio": "use_bias_correction_kl",
        "the reference is the model as it was loaded": "sync_ref_model",
        "algorithm.entropy_coefficient stays as it is": "use_adaptive_entropy",
        "generation and training have GPUs of their own": "hybrid_engine",
        "FSDP2 gathers each layer ahead of its use by itself": "forward_prefetch",
        "FSDP2 frees each layer after its forward pass": "reshard_after_forward",
        "the megatron backend reads and publishes Hugging Face tensors itself": "use_mbridge vanilla_mbridge",
        "sequences are always packed, without padding": "use_remove_padding",
        "micro-batches are always filled up to trainer.token_budget tokens": "use_dynamic_bsz log_prob_use_dynamic_bsz",
        "logits exist for trainer.backend_options.logprob_chunk_tokens tokens at a time, in both passes": (
            "entropy_from_logits_with_chunking entropy_checkpointing"
        ),
        "heads that predict several tokens at once are not trained": "mtp enable_mtp",
        "how many hosts and GPUs there are is said where the services are started: docs/running.md": (
            "nnodes n_gpus_per_node"
        ),
        "the engine is chosen where a replica is started: `--engine vllm`": "rollout.name rollout.engine",
    }
)
"""Settings of other frameworks that have no counterpart, and why. A name with a dot is one below a section of that
name."""

UNITS = by_name(
    {
        "there true keeps the tower as it is, here true trains it": "freeze_vision_tower",
        "there it is the size of one update's share of the batch, here the number of updates in a step: batch / size": (
            "mini_batch_size ppo_mini_batch_size"
        ),
        "there it is a number of samples, here of tokens": (
            "micro_batch_size micro_batch_size_per_gpu ppo_micro_batch_size ppo_micro_batch_size_per_gpu"
        ),
        "there it is times ulysses_sequence_parallel_size, here it is the whole micro-batch that such ranks share": (
            "ppo_max_token_len_per_gpu max_token_len_per_gpu log_prob_max_token_len_per_gpu"
        ),
    }
)
"""Fields whose number counts something else in a job spec: what it counts there and here."""
SIMILAR = 0.6
"""Least similarity, from 0 to 1, of a name that is suggested (`difflib.SequenceMatcher.ratio`)."""


def name_here(name: str, known: Collection[str]) -> str | None:
    """The one of `known`, fields of one level or names of functions, that another framework calls `name`. None if
    that is none of them, or several."""
    found = [path.rpartition(".")[2] for path in paths(name)] + [VALUES.get(name.lower(), "")]
    here = [each for each in found if each in known]
    return here[0] if len(here) == 1 else None


def paths(name: str, section: str = "") -> list[str]:
    """The paths in a job spec of what another framework calls `name`, below `section`; empty for an unknown name."""
    found = FIELDS.get(f"{section}.{name}".lower()) or FIELDS.get(name.lower())
    return found.split(", ") if found is not None else []


def why_absent(section: str, name: str) -> str:
    """Why there is nothing like the setting `name`, below `section`, of another framework; empty for another name."""
    return ABSENT.get(f"{section}.{name}".lower()) or ABSENT.get(name.lower(), "")


def unit_note(name: str) -> str:
    """What the number of another framework's field counts there and here; empty if it is the same."""
    return UNITS.get(name.lower(), "")


def closest(name: str, known: Collection[str], similar: float = SIMILAR) -> str | None:
    """The known name that somebody probably meant who wrote `name`: the one that another framework calls so, or the
    one with the most similar spelling, of at least this similarity. None if no name is similar."""
    if (here := name_here(name, known)) is not None:
        return here
    lowered = {each.lower(): each for each in known}
    return next((lowered[near] for near in difflib.get_close_matches(name.lower(), lowered, 1, similar)), None)


def choose(name: str, known: Collection[str]) -> str:
    """The fix for a `name` that is none of `known`: "did you mean `x`? Choose one of x, y."."""
    listed = f"one of {', '.join(known)}."
    near = closest(name, known)
    return f"did you mean `{near}`? Choose {listed}" if near is not None else f"choose {listed}"
