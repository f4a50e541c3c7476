"""How well the machines are used: throughput, FLOPs utilisation, memory, experts."""

from millrace.telemetry.metrics.declaration import Owner, StepMetric, Unit

COORDINATOR, REPLICA, TRAINER = Owner.COORDINATOR, Owner.REPLICA, Owner.TRAINER

TOTAL_TOKENS = "perf/total_num_tokens"

PERFORMANCE = (
    StepMetric(TOTAL_TOKENS, Unit.TOKENS, COORDINATOR, "Prompt and response tokens of all trajectories."),
    StepMetric("perf/time_per_step", Unit.SECONDS, COORDINATOR, "The same as `timing_s/step`."),
    StepMetric(
        "perf/throughput",
        Unit.TOKENS_PER_SECOND,
        COORDINATOR,
        "`perf/total_num_tokens` / `timing_s/step` / number of devices, those of the replicas included.",
    ),
    StepMetric(
        "trainer/idle_ratio",
        Unit.SHARE,
        COORDINATOR,
        "`timing_s/gen` / `timing_s/step`: the share of the step in which the trainer waited for groups.",
    ),
    StepMetric(
        "rollouter/idle_ratio",
        Unit.SHARE,
        REPLICA,
        "Share of the time since the version before in which a replica had no sample in its engine; mean over the "
        "replicas. The event `publication.done` has that of each.",
    ),
    StepMetric("perf/mfu/actor", Unit.SHARE, TRAINER, "Model FLOPs utilisation of the policy's updates."),
    StepMetric("perf/mfu/actor_infer", Unit.SHARE, TRAINER, "Of the policy's forward pass before the updates."),
    StepMetric("perf/mfu/ref", Unit.SHARE, TRAINER, "Of the reference's forward pass."),
    StepMetric("perf/mfu/critic", Unit.SHARE, TRAINER, "Of the critic's updates."),
    StepMetric("perf/cpu_memory_used_gb", Unit.GIBIBYTES, TRAINER, "Resident host memory of the rank that has most."),
    StepMetric(
        "perf/max_memory_allocated_gb",
        Unit.GIBIBYTES,
        TRAINER,
        "Peak of the GPU memory in use, of the rank that has most.",
    ),
    StepMetric(
        "perf/max_memory_reserved_gb",
        Unit.GIBIBYTES,
        TRAINER,
        "Peak of the GPU memory that PyTorch reserved, of the rank that has most.",
    ),
    StepMetric(
        "moe/load_max",
        Unit.RATIO,
        TRAINER,
        "Tokens of the busiest expert over the mean of its layer's experts (`megatron`).",
    ),
    StepMetric("moe/load_idle", Unit.SHARE, TRAINER, "Experts that got no token in the step (`megatron`)."),
    StepMetric(
        "moe/replayed",
        Unit.SHARE,
        TRAINER,
        "Tokens that went to the experts that the engine reported (`algorithm.router_replay`).",
    ),
    StepMetric("moe/aux_loss", Unit.LOSS, TRAINER, "Load-balancing loss before its coefficient (`megatron`)."),
)
