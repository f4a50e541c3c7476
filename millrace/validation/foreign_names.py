"""What verl, slime, TRL and the engines call the fields of a job spec: a job written for them has their names."""

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
    "tensor_model_parallel_size": (
        "rollout.engine_options.tensor_parallel_size, trainer.backend_options.tensor_parallel"
    ),
    "tensor_parallel_size": "rollout.engine_options.tensor_parallel_size",
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
    "custom_reward_function": "reward.function",
    "custom_rm_path": "reward.function",
    "reward_fn": "reward.function",
    "rm_type": "reward.function",
    "reward_kwargs": "reward.options",
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
    "entropy_coef": "algorithm.entropy_coefficient",
    "entropy_coeff": "algorithm.entropy_coefficient",
    "clip_ratio": "algorithm.policy_loss.options.clip_low",
    "clip_ratio_low": "algorithm.policy_loss.options.clip_low",
    "eps_clip": "algorithm.policy_loss.options.clip_low",
    "clip_ratio_high": "algorithm.policy_loss.options.clip_high",
    "eps_clip_high": "algorithm.policy_loss.options.clip_high",
    "clip_ratio_c": "algorithm.policy_loss.options.dual_clip",
    "eps_clip_c": "algorithm.policy_loss.options.dual_clip",
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
    "vllm_importance_sampling_mode": "algorithm.correction",
    "scale_rewards": "algorithm.advantage.options.std_over",
    "top_entropy_quantile": "algorithm.top_entropy_fraction",
    "off_policy_mask_threshold": "algorithm.off_policy_limit",
    "use_rollout_routing_replay": "algorithm.router_replay",
    "filter_groups": "algorithm.drop_groups_without_signal",
    "dynamic_sampling_filter_path": "algorithm.drop_groups_without_signal",
    "max_num_gen_batches": "algorithm.max_refills",
    "overlong_buffer": "algorithm.overlong_buffer_tokens",
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
    "ref": "algorithm.kl, trainer.backend_options.offload_reference",
    "param_offload": "trainer.backend_options.offload_reference",
    "optimizer_offload": "trainer.backend_options.offload_optimizer",
    "offload_optim": "trainer.backend_options.offload_optimizer",
    "offload_fraction": "trainer.backend_options.optimizer_offload_fraction",
    "last_layer": "trainer.backend_options.last_stage_layers",
    "ulysses_sequence_parallel_size": "trainer.backend_options.context_parallel",
    "max_num_batched_tokens": "rollout.engine_options.max_num_batched_tokens",
    "max_token_len_per_gpu": "trainer.token_budget",
    "log_prob_max_token_len_per_gpu": "trainer.token_budget",
    "log_prob_micro_batch_size_per_gpu": "trainer.token_budget",
    "entropy_from_logits_chunk_size": "trainer.backend_options.logprob_chunk_tokens",
}
"""Another framework's name of a field, and the path of the same field in a job spec; some have several paths."""

VALUES: dict[str, str] = {
    "low_var_kl": "k3",
    "mse": "k2",
    "vanilla": "ppo",
}
"""Another framework's name of a function, and the name of the same function in a job spec."""

_LORA = "there is no LoRA here: all parameters are trained and published"
_BRIDGE = "the megatron backend reads and publishes Hugging Face tensors itself"
_HOSTS = "how many hosts and GPUs there are is said where the services are started: docs/running.md"
_ENTROPY = "logits exist for trainer.backend_options.logprob_chunk_tokens tokens at a time, in both passes"
_MTP = "heads that predict several tokens at once are not trained"
ABSENT: dict[str, str] = {
    "lora": _LORA,
    "lora_rank": _LORA,
    "lora_alpha": _LORA,
    "lora_adapter_path": _LORA,
    "lora_dropout": _LORA,
    "lora_a_init_method": _LORA,
    "lora_b_init_method": _LORA,
    "target_modules": _LORA,
    "exclude_modules": _LORA,
    "adapter_path": _LORA,
    "dropout_position": _LORA,
    "lora.type": _LORA,
    "lora.rank": _LORA,
    "lora.alpha": _LORA,
    "lora.dropout": _LORA,
    "lora.merge": _LORA,
    "load_format": "replicas get their weights from the trainer before the first request",
    "use_shm": "replicas get their weights from the trainer before the first request",
    "layered_summon": "weights are published in pieces, and no rank gathers them whole",
    "hybrid_engine": "generation and training have GPUs of their own",
    "fsdp_size": "FSDP2 shards over all ranks of the trainer",
    "forward_prefetch": "FSDP2 gathers each layer ahead of its use by itself",
    "reshard_after_forward": "FSDP2 frees each layer after its forward pass",
    "use_mbridge": _BRIDGE,
    "vanilla_mbridge": _BRIDGE,
    "use_dist_checkpointing": "any number of ranks in any topology reads the model folder",
    "dist_checkpointing_path": "any number of ranks in any topology reads the model folder",
    "enable_activation_offload": "activations are computed again instead: trainer.activation_recompute",
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
UNITS: dict[str, str] = {
    "mini_batch_size": _SIZE,
    "ppo_mini_batch_size": _SIZE,
    "micro_batch_size": _SAMPLES,
    "micro_batch_size_per_gpu": _SAMPLES,
    "ppo_micro_batch_size": _SAMPLES,
    "ppo_micro_batch_size_per_gpu": _SAMPLES,
}
"""Fields whose number counts something else in a job spec: what it counts there and here."""


def name_here(name: str, known: Collection[str]) -> str | None:
    """The one of `known`, fields of one level or names of functions, that another framework calls `name`. None where
    that is none of them, or several."""
    found = [path.rpartition(".")[2] for path in paths(name)] + [VALUES.get(name.lower(), "")]
    here = [each for each in found if each in known]
    return here[0] if len(here) == 1 else None


def paths(name: str) -> list[str]:
    """The paths in a job spec of what another framework calls `name`; empty for an unknown name."""
    found = FIELDS.get(name.lower())
    return found.split(", ") if found is not None else []


def why_absent(section: str, name: str) -> str:
    """Why there is nothing like the setting `name`, below `section`, of another framework; empty for another name."""
    return ABSENT.get(f"{section}.{name}".lower()) or ABSENT.get(name.lower(), "")


def unit_note(name: str) -> str:
    """What the number of another framework's field counts there and here; empty where it is the same."""
    return UNITS.get(name.lower(), "")
