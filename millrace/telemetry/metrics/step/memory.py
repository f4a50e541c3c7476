"""What the memory of the trainer's ranks holds, phase by phase, measured and predicted: each value is that of the rank
that has most. The parts are the tensors that a rank keeps, measured by their storages. What exists during a pass only
(`gathered`, `activations`, `logits`, `staging`) is predicted part by part, and measured together as `rest`; activations
of an update are measured by themselves too. The prediction is that of `millrace validate --memory`, for micro-batches
as large as the token budget, at the moment of a phase that needs most."""

from millrace.telemetry.metrics.declaration import Owner, StepMetric, Unit

TRAINER, GIBIBYTES = Owner.TRAINER, Unit.GIBIBYTES

REST, OFFLOADED, PEAK = "rest", "offloaded", "peak"
PREDICTED = "predicted"
"""Middle part of the keys of predictions for a phase."""

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
    StepMetric(
        "memory/update/activations",
        GIBIBYTES,
        TRAINER,
        "What the forward pass of an update's first micro-batch left for its backward pass: activations, and with FSDP2"
        " embedding and head, which stay gathered. A part of `rest`, on GPUs only.",
    ),
    StepMetric("memory/{phase}/peak", GIBIBYTES, TRAINER, "The allocator's peak in the phase. On GPUs only."),
    StepMetric(
        "memory/{phase}/predicted/{predicted}",
        GIBIBYTES,
        TRAINER,
        "What was predicted for that part at the phase's peak. Absent if it is nothing.",
    ),
    StepMetric(
        "memory/{phase}/predicted/offloaded",
        GIBIBYTES,
        TRAINER,
        "What was predicted of the kept parts in host memory, for a trainer on GPUs.",
    ),
    StepMetric(
        "memory/{phase}/predicted/rest",
        GIBIBYTES,
        TRAINER,
        "What was predicted of the peak without the kept parts.",
    ),
    StepMetric("memory/{phase}/predicted/peak", GIBIBYTES, TRAINER, "The predicted peak of the phase."),
)
