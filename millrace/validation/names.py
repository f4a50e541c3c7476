"""Names that a job spec does not have: what verl, slime, TRL and the engines call its fields, since a job written for
them has their names, and which known name was probably meant by a misspelt one."""

import difflib
from collections.abc import Collection

FIELDS: dict[str, str] = {
    "actor_rollout_ref": "model, rollout, trainer",
    "actor": "trainer",
    "critic": "algorithm.critic",
    "reward_model": "reward",
    "n": "rollout.samples_per_prompt",
    "n_samples_per_prompt": "rollout.samples_per_prompt",
    "num_generations": "rollout.samples_per_prompt",
    "group_size": "rollout.samples_per_prompt",
    "max_new_tokens": "rollout.max_response_tokens",
    "max_tokens": "rollout.max_response_tokens",
    "response_length": "rollout.max_response_tokens",
    "max_response_length": "rollout.max_response_tokens",
    "max_completion_length": "rollout.max_response_tokens",
    "rollout_max_response_len": "rollout.max_response_tokens",
    "rollout_temperature": "rollout.temperature",
    "multi_turn": "rollout.environment",
    "max_assistant_turns": "rollout.environment.max_turns",
    "tool_config_path": "rollout.environment",
    "interaction_config_path": "rollout.environment",
    "tensor_model_parallel_size": (
        "rollout.engine_options.tensor_parallel_size, trainer.backend_options.tensor_parallel"
    ),
    "tensor_parallel_size": "rollout.engine_options.tensor_parallel_size",
    "data_parallel_size": "rollout.engine_options.data_parallel_size",
    "rollout_num_gpus_per_engine": "rollout.engine_options.tensor_parallel_size",
    "gpu_memory_utilization": "rollout.engine_options.gpu_memory_utilization",
    "max_num_seqs": "rollout.engine_options.max_num_seqs",
    "max_model_len": "rollout.engine_options.max_model_len",
    "enforce_eager": "rollout.engine_options.enforce_eager",
    "mem_fraction_static": "rollout.engine_options.sglang.mem_fraction_static",
    "prompt_length": "data.max_prompt_tokens",
    "max_prompt_length": "data.max_prompt_tokens",
    "rollout_max_prompt_len": "data.max_prompt_tokens",
    "train_files": "data.files",
    "prompt_data": "data.files",
    "image_key": "data.images",
    "limit_images": "data.images",
    "freeze_vision_tower": "trainer.train_tower",
    "truncation": "data.overlong_prompts",
    "filter_overlong_prompts": "data.overlong_prompts",
    "apply_chat_template_kwargs": "data.chat_template_options",
    "val_files": "evaluation.files",
    "eval_prompt_data": "evaluation.files",
    "test_freq": "evaluation.every_steps",
    "eval_interval": "evaluation.every_steps",
    "hf_checkpoint": "model.path",
    "model_path": "model.path",
    "model_name_or_path": "model.path",
    "dist_checkpointing_path": "model.weights",
    "use_dist_checkpointing": "model.weights",
    "custom_reward_function": "reward.function",
    "custom_rm_path": "reward.function",
    "reward_fn": "reward.function",
    "rm_type": "reward.function",
    "reward_kwargs": "reward.options",
    "sandbox_fusion": "reward.function",
    "adv_estimator": "algorithm.advantage",
    "advantage_estimator": "algorithm.advantage",
    "loss_mode": "algorithm.policy_loss",
    "loss_agg_mode": "algorithm.aggregation",
    "kl_loss_type": "algorithm.kl",
    "kl_penalty": "algorithm.kl",
    "use_kl_loss": "algorithm.kl",
    "use_kl_in_reward": "algorithm.kl_in",
    "kl_coef": "algorithm.kl_coefficient",
    "kl_loss_coef": "algorithm.kl_coefficient",
    "target_kl": "algorithm.kl_target",
    "kl_ctrl": "algorithm.kl_coefficient, algorithm.kl_target, algorithm.kl_horizon",
    "horizon": "algorithm.kl_horizon",
    "beta": "algorithm.kl_coefficient",
    "entropy_coef": "algorithm.entropy_coefficient",
    "entropy_coeff": "algorithm.entropy_coefficient",
    "clip_ratio": "algorithm.policy_loss.options.clip_low",
    "clip_ratio_low": "algorithm.policy_loss.options.clip_low",
    "eps_clip": "algorithm.policy_loss.options.clip_low",
    "clip_ratio_high": "algorithm.policy_loss.options.clip_high",
    "eps_clip_high": "algorithm.policy_loss.options.clip_high",
    "clip_ratio_c": "algorithm.policy_loss.options.dual_clip",
    "eps_clip_c": "algorithm.policy_loss.options.dual_clip",
    "epsilon": "algorithm.policy_loss.options.clip_low",
    "epsilon_high": "algorithm.policy_loss.options.clip_high",
    "delta": "algorithm.policy_loss.options.dual_clip",
    "tau_pos": "algorithm.policy_loss.options.tau_positive",
    "tau_neg": "algorithm.policy_loss.options.tau_negative",
    "sapo_temperature_pos": "algorithm.policy_loss.options.tau_positive",
    "sapo_temperature_neg": "algorithm.policy_loss.options.tau_negative",
    "clip_cov_ratio": "algorithm.policy_loss.options.fraction",
    "clip_cov_lb": "algorithm.policy_loss.options.bounds",
    "clip_cov_ub": "algorithm.policy_loss.options.bounds",
    "kl_cov_ratio": "algorithm.policy_loss.options.fraction",
    "ppo_kl_coef": "algorithm.policy_loss.options.coefficient",
    "dro_beta": "algorithm.policy_loss.options.beta",
    "loss_type": "algorithm.policy_loss, algorithm.aggregation",
    "importance_sampling_level": "algorithm.policy_loss",
    "norm_adv_by_std_in_grpo": "algorithm.advantage.options.std",
    "gamma": "algorithm.advantage.options.gamma",
    "lam": "algorithm.advantage.options.lam",
    "cliprange_value": "algorithm.critic.clip",
    "critic_warmup": "algorithm.critic.warmup_steps",
    "tis": "algorithm.correction",
    "use_tis": "algorithm.correction",
    "rollout_is": "algorithm.correction",
    "rollout_rs": "algorithm.correction",
    "rollout_correction": "algorithm.correction",
    "rollout_is_threshold": "algorithm.correction",
    "rollout_rs_threshold": "algorithm.correction",
    "rollout_is_batch_normalize": "algorithm.normalize_correction_weights",
    "bypass_mode": "algorithm.old_logprobs",
    "vllm_importance_sampling_correction": "algorithm.correction",
    "vllm_importance_sampling_mode": "algorithm.correction",
    "vllm_importance_sampling_cap": "algorithm.correction",
    "vllm_importance_sampling_clip_max": "algorithm.correction",
    "vllm_importance_sampling_clip_min": "algorithm.correction",
    "scale_rewards": "algorithm.advantage.options.std_over",
    "top_entropy_quantile": "algorithm.top_entropy_fraction",
    "off_policy_mask_threshold": "algorithm.off_policy_limit",
    "use_rollout_routing_replay": "algorithm.router_replay",
    "filter_groups": "algorithm.drop_groups_without_signal",
    "dynamic_sampling_filter_path": "algorithm.drop_groups_without_signal",
    "max_num_gen_batches": "algorithm.max_refills",
    "overlong_buffer": "algorithm.overlong_buffer_tokens",
    "overlong_buffer_cfg": "algorithm.overlong_buffer_tokens",
    "penalty_factor": "algorithm.overlong_penalty",
    "reward_weights": "algorithm.advantage.options.weights",
    "multi_objective_aggregation": "algorithm.advantage",
    "strategy": "trainer.backend",
    "micro_batch_size": "trainer.token_budget",
    "micro_batch_size_per_gpu": "trainer.token_budget",
    "ppo_micro_batch_size": "trainer.token_budget",
    "ppo_micro_batch_size_per_gpu": "trainer.token_budget",
    "ppo_max_token_len_per_gpu": "trainer.token_budget",
    "max_tokens_per_gpu": "trainer.token_budget",
    "mini_batch_size": "trainer.updates_per_step",
    "ppo_mini_batch_size": "trainer.updates_per_step",
    "num_steps_per_rollout": "trainer.updates_per_step",
    "gradient_checkpointing": "trainer.activation_recompute",
    "enable_gradient_checkpointing": "trainer.activation_recompute",
    "use_shm": "model.use_shm",
    "enable_activation_offload": "trainer.backend_options.offload_activations",
    "tp": "trainer.backend_options.tensor_parallel",
    "pp": "trainer.backend_options.pipeline_parallel",
    "cp": "trainer.backend_options.context_parallel",
    "ep": "trainer.backend_options.expert_parallel",
    "pipeline_model_parallel_size": "trainer.backend_options.pipeline_parallel",
    "context_parallel_size": "trainer.backend_options.context_parallel",
    "expert_model_parallel_size": "trainer.backend_options.expert_parallel",
    "lr": "trainer.optimizer.lr",
    "learning_rate": "trainer.optimizer.lr",
    "optim": "trainer.optimizer",
    "adam_beta1": "trainer.optimizer.betas",
    "adam_beta2": "trainer.optimizer.betas",
    "lr_warmup_steps": "trainer.optimizer.warmup_steps",
    "lr_warmup_iters": "trainer.optimizer.warmup_steps",
    "lr_scheduler_type": "trainer.optimizer.schedule",
    "lr_decay_style": "trainer.optimizer.schedule",
    "grad_clip": "trainer.optimizer.clip_grad_norm",
    "clip_grad": "trainer.optimizer.clip_grad_norm",
    "max_grad_norm": "trainer.optimizer.clip_grad_norm",
    "train_batch_size": "schedule.prompts_per_step",
    "rollout_batch_size": "schedule.prompts_per_step",
    "max_steps": "schedule.steps",
    "num_rollout": "schedule.steps",
    "total_training_steps": "schedule.steps",
    "num_epoch": "schedule.passes",
    "total_epochs": "schedule.passes",
    "num_train_epochs": "schedule.passes",
    "staleness_threshold": "schedule.max_staleness",
    "save_freq": "schedule.save_every_steps",
    "save_interval": "schedule.save_every_steps",
    "max_actor_ckpt_to_keep": "schedule.keep_checkpoints",
    "logger": "tracking.trackers",
    "project_name": "tracking.project",
    "experiment_name": "name",
    "output_dir": "output",
    "default_local_dir": "output",
    "fsdp_config": "trainer.backend_options",
    "megatron": "trainer.backend_options",
    "ref": "algorithm.kl, trainer.reference",
    "fsdp_size": "trainer.backend_options.fsdp_size",
    "param_offload": "trainer.backend_options.offload_parameters, trainer.backend_options.offload_reference",
    "optimizer_offload": "trainer.backend_options.offload_optimizer",
    "offload_optim": "trainer.backend_options.offload_optimizer",
    "offload_fraction": "trainer.backend_options.optimizer_offload_fraction",
    "last_layer": "trainer.backend_options.last_stage_layers",
    "ulysses_sequence_parallel_size": "trainer.backend_options.sequence_parallel_size",
    "ref.ulysses_sequence_parallel_size": "trainer.reference.backend_options.sequence_parallel_size",
    "critic.ulysses_sequence_parallel_size": "trainer.critic.backend_options.sequence_parallel_size",
    "max_num_batched_tokens": "rollout.engine_options.max_num_batched_tokens",
    "max_token_len_per_gpu": "trainer.token_budget",
    "log_prob_max_token_len_per_gpu": "trainer.token_budget, trainer.reference.token_budget",
    "ref.log_prob_max_token_len_per_gpu": "trainer.reference.token_budget",
    "critic.ppo_max_token_len_per_gpu": "trainer.critic.token_budget",
    "forward_max_token_len_per_gpu": "trainer.critic.token_budget",
    "log_prob_micro_batch_size_per_gpu": "trainer.token_budget",
    "entropy_from_logits_chunk_size": "trainer.backend_options.logprob_chunk_tokens",
    "lora": "model.lora",
    "lora_rank": "model.lora.rank",
    "lora_alpha": "model.lora.alpha",
    "lora_dropout": "model.lora.dropout",
    "lora_adapter_path": "model.lora.adapter_path",
    "lora_a_init_method": "model.lora.init",
    "lora_r": "model.lora.rank",
    "lora_target_modules": "model.lora.target_modules",
    "target_modules": "model.lora.target_modules",
    "exclude_modules": "model.lora.exclude_modules",
    "adapter_path": "model.lora.adapter_path",
    "lora.rank": "model.lora.rank",
    "lora.alpha": "model.lora.alpha",
    "lora.dropout": "model.lora.dropout",
    "lora.merge": "model.lora.merge",
}
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

_BRIDGE = "the megatron backend reads and publishes Hugging Face tensors itself"
_HOSTS = "how many hosts and GPUs there are is said where the services are started: docs/running.md"
_ENTROPY = "logits exist for trainer.backend_options.logprob_chunk_tokens tokens at a time, in both passes"
_ONCE = "a batch is trained once: trainer.updates_per_step cuts it into the shares of several updates"
_MTP = "heads that predict several tokens at once are not trained"
ABSENT: dict[str, str] = {
    "lora_b_init_method": "the matrix B of an adapter begins with zeros",
    "dropout_position": "dropout comes before the adapter",
    "lora.type": "an adapter is plain LoRA, or DoRA with model.lora.dora",
    "load_format": "replicas get their weights from the trainer before the first request",
    "layered_summon": "weights are published in pieces, and no rank gathers them whole",
    "ppo_epochs": _ONCE,
    "num_iterations": _ONCE,
    "loss_scale_factor": "the divisor of the `*-norm` aggregations is rollout.max_response_tokens",
    "calculate_entropy": "the entropy is always reported",
    "use_pf_ppo": "answers are not drawn again by their reward",
    "pf_ppo": "answers are not drawn again by their reward",
    "mask_truncated_completions": "answers that were cut are trained; algorithm.overlong_buffer_tokens punishes them",
    "use_bias_correction_kl": "the KL in the loss is not weighted by the ratio",
    "sync_ref_model": "the reference is the model as it was loaded",
    "use_adaptive_entropy": "algorithm.entropy_coefficient stays as it is",
    "hybrid_engine": "generation and training have GPUs of their own",
    "forward_prefetch": "FSDP2 gathers each layer ahead of its use by itself",
    "reshard_after_forward": "FSDP2 frees each layer after its forward pass",
    "use_mbridge": _BRIDGE,
    "vanilla_mbridge": _BRIDGE,
    "use_remove_padding": "sequences are always packed, without padding",
    "use_dynamic_bsz": "micro-batches are always filled up to trainer.token_budget tokens",
    "log_prob_use_dynamic_bsz": "micro-batches are always filled up to trainer.token_budget tokens",
    "entropy_from_logits_with_chunking": _ENTROPY,
    "entropy_checkpointing": _ENTROPY,
    "mtp": _MTP,
    "enable_mtp": _MTP,
    "nnodes": _HOSTS,
    "n_gpus_per_node": _HOSTS,
    "rollout.name": "the engine is chosen where a replica is started: `--engine vllm`",
    "rollout.engine": "the engine is chosen where a replica is started: `--engine vllm`",
}
"""Settings of other frameworks that have no counterpart, and why. A name with a dot is one below a section of that
name."""

_SIZE = "there it is the size of one update's share of the batch, here the number of updates in a step: batch / size"
_SAMPLES = "there it is a number of samples, here of tokens"
_GPU = "there it is times ulysses_sequence_parallel_size, here it is the whole micro-batch that such ranks share"
UNITS: dict[str, str] = {
    "freeze_vision_tower": "there true keeps the tower as it is, here true trains it",
    "mini_batch_size": _SIZE,
    "ppo_mini_batch_size": _SIZE,
    "micro_batch_size": _SAMPLES,
    "micro_batch_size_per_gpu": _SAMPLES,
    "ppo_micro_batch_size": _SAMPLES,
    "ppo_micro_batch_size_per_gpu": _SAMPLES,
    "ppo_max_token_len_per_gpu": _GPU,
    "max_token_len_per_gpu": _GPU,
    "log_prob_max_token_len_per_gpu": _GPU,
}
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
