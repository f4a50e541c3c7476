"""What the memory of the trainer's ranks holds, phase by phase: each value is that of the rank that has most. The parts
are the tensors that a rank keeps, measured by their storages; `millrace validate --memory` predicts the same parts."""

from millrace.telemetry.metrics.declaration import Owner, StepMetric, Unit

TRAINER, GIBIBYTES = Owner.TRAINER, Unit.GIBIBYTES

UPDATE, PREDICTED = "update", "predicted"
"""The middle of the keys `memory/…/…` of the measured and of the predicted parts of an update."""

MEMORY = (
    StepMetric(
        "memory/{phase}/{kept}",
        GIBIBYTES,
        TRAINER,
        "What that part takes on the device, at its largest in the phase. On a CPU it is in host memory.",
    ),
    StepMetric(
        "memory/{phase}/offloaded",
        GIBIBYTES,
        TRAINER,
        "Those parts as far as they are in host memory, for a trainer on GPUs.",
    ),
    StepMetric(
        "memory/{phase}/rest",
        GIBIBYTES,
        TRAINER,
        "The peak without those parts: activations, logits, gathered layers, buffers. On GPUs only.",
    ),
    StepMetric("memory/{phase}/peak", GIBIBYTES, TRAINER, "The allocator's peak in the phase. On GPUs only."),
    StepMetric(
        "memory/predicted/{predicted}",
        GIBIBYTES,
        TRAINER,
        "The part of the predicted peak, for micro-batches as large as the token budget.",
    ),
    StepMetric("memory/predicted/peak", GIBIBYTES, TRAINER, "The predicted peak: the sum of those parts."),
)
