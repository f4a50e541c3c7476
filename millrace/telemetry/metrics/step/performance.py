"""How well the machines are used: throughput, FLOPs utilisation, memory, experts."""

from millrace.telemetry.metrics.declaration import Unit, by_coordinator, by_replica, by_trainer

TOTAL_TOKENS = "perf/total_num_tokens"

PERFORMANCE = (
    by_coordinator(TOTAL_TOKENS, Unit.TOKENS, "Prompt and response tokens of all trajectories."),
    by_coordinator("perf/time_per_step", Unit.SECONDS, "The same as `timing_s/step`."),
    by_coordinator(
        "perf/throughput",
        Unit.TOKENS_PER_SECOND,
        "`perf/total_num_tokens` / `timing_s/step` / number of devices, those of the replicas included.",
    ),
    by_coordinator(
        "trainer/idle_ratio",
        Unit.SHARE,
        "`timing_s/gen` / `timing_s/step`: the share of the step in which the trainer waited for groups.",
    ),
    by_replica(
        "rollouter/idle_ratio",
        Unit.SHARE,
        "Share of the time since the version before in which a replica had no sample in its engine; mean over the "
        "replicas. The event `publication.done` has that of each.",
    ),
    by_trainer("perf/mfu/actor", Unit.SHARE, "Model FLOPs utilisation of the policy's updates."),
    by_trainer("perf/mfu/actor_infer", Unit.SHARE, "Of the policy's forward pass before the updates."),
    by_trainer("perf/mfu/ref", Unit.SHARE, "Of the reference's forward pass."),
    by_trainer("perf/mfu/critic", Unit.SHARE, "Of the critic's updates."),
    by_trainer("perf/cpu_memory_used_gb", Unit.GIBIBYTES, "Resident host memory of the rank that has most."),
    by_trainer(
        "perf/max_memory_allocated_gb", Unit.GIBIBYTES, "Peak of the GPU memory in use, of the rank that has most."
    ),
    by_trainer(
        "perf/max_memory_reserved_gb",
        Unit.GIBIBYTES,
        "Peak of the GPU memory that PyTorch reserved, of the rank that has most.",
    ),
    by_trainer(
        "moe/load_max", Unit.RATIO, "Tokens of the busiest expert over the mean of its layer's experts (`megatron`)."
    ),
    by_trainer("moe/load_idle", Unit.SHARE, "Experts that got no token in the step (`megatron`)."),
    by_trainer(
        "moe/replayed",
        Unit.SHARE,
        "Tokens that went to the experts that the engine reported (`algorithm.router_replay`).",
    ),
    by_trainer("moe/aux_loss", Unit.LOSS, "Load-balancing loss before its coefficient (`megatron`)."),
)
