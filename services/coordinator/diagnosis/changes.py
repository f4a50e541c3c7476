"""What to change for each bottleneck, the most helpful first. A test checks that each setting is in the spec."""

from millrace.rest.diagnosis import Bottleneck, ChangeView


def _change(setting: str, advice: str) -> ChangeView:
    return ChangeView(setting=setting, advice=advice)


CHANGES: dict[Bottleneck, tuple[ChangeView, ...]] = {
    Bottleneck.GENERATION: (
        _change("", "start more replicas: they join while the job runs (docs/running.md)."),
        _change("rollout.engine_options", "let each engine run more samples at once: `max_num_seqs` in vLLM."),
        _change("rollout.max_response_tokens", "lower it where long answers earn nothing."),
        _change("rollout.samples_per_prompt", "generate fewer answers to each prompt."),
    ),
    Bottleneck.LONG_TAIL: (
        _change("", "remove a slow replica with `millrace drain MEMBER`, or find out what else its host does."),
        _change("schedule.max_staleness", "raise it, so that the others generate for later steps meanwhile."),
        _change("rollout.max_response_tokens", "lower it: the longest answers decide."),
    ),
    Bottleneck.REWARDS: (
        _change("reward.workers", "raise it: so many processes of a replica score at once."),
        _change("reward.timeout_s", "lower it, so that a call that hangs costs less."),
        _change("schedule.max_staleness", "raise it, so that generation goes on while groups are scored."),
    ),
    Bottleneck.ENVIRONMENT: (
        _change("rollout.environment.episode_s", "lower it, so that an episode that hangs costs less."),
        _change("rollout.environment.max_turns", "lower it where later turns earn nothing."),
        _change("rollout.environment.processes", "raise it where plain calls of the class are slow."),
        _change("rollout.environment.episodes_per_process", "raise it, so that more episodes generate meanwhile."),
    ),
    Bottleneck.TRAINER: (
        _change("", "start the trainer with more ranks."),
        _change("trainer.token_budget", "raise it as far as memory allows: larger micro-batches use a GPU better."),
        _change("trainer.activation_recompute", "switch it off where memory allows: it costs about a third more work."),
        _change("schedule.max_staleness", "set it to 1 at least, so that engines generate while the trainer trains."),
    ),
    Bottleneck.PUBLICATION: (
        _change("publication.path", "set delta where the link is slow: only what changed is sent."),
        _change("publication.commit", "set shadow where memory allows: generation goes on during the transfer."),
        _change("model.lora", "train an adapter: only the adapter is published."),
    ),
    Bottleneck.QUEUE: (
        _change("", "see why replicas take no prompts: `millrace fleet`, `millrace logs`."),
        _change("rollout.lease_s", "lower it, so that prompts of a lost replica are issued again sooner."),
    ),
    Bottleneck.MEMORY: (
        _change("rollout.engine_options", "leave more memory free: lower `gpu_memory_utilization`."),
        _change("trainer.activation_recompute", "switch it on, and raise trainer.token_budget again."),
        _change("trainer.backend_options", "offload to host memory or use more ranks: docs/memory.md."),
    ),
    Bottleneck.STALENESS_BOUND: (
        _change("schedule.max_staleness", "set it to 1: engines generate the next step while the last answers end."),
        _change("rollout.max_response_tokens", "lower it: the longest answers decide."),
    ),
    Bottleneck.EVALUATION: (
        _change("evaluation.every_steps", "raise it, to evaluate less often."),
        _change("evaluation.prompts", "lower it, to evaluate on fewer prompts."),
    ),
    Bottleneck.CHECKPOINT: (
        _change("schedule.save_in_background", "set it to true: training goes on while a checkpoint is written."),
        _change("schedule.save_every_steps", "raise it, to save less often."),
    ),
}
