"""What the memory of the trainer's ranks holds, phase by phase, measured and predicted: each value is that of the rank
that has most. The parts are the tensors that a rank keeps, measured by their storages. What exists during a pass only
(`gathered`, `activations`, `logits`, `staging`) is predicted part by part, and measured together as `rest`; activations
of an update are measured by themselves too. The prediction is that of `millrace validate --memory`, for micro-batches
as large as the token budget, at the moment of a phase that needs most."""

from millrace.telemetry.metrics.declaration import Unit, by_trainer

REST, OFFLOADED, PEAK = "rest", "offloaded", "peak"
PREDICTED = "predicted"
"""Middle part of the keys of predictions for a phase."""

MEMORY = (
    by_trainer(
        "memory/{phase}/{kept}",
        Unit.GIBIBYTES,
        "What that part takes on the device, at its largest in the phase. On a CPU it is in host memory.",
    ),
    by_trainer(
        "memory/{phase}/offloaded",
        Unit.GIBIBYTES,
        "Those parts as far as they are in host memory, for a trainer on GPUs.",
    ),
    by_trainer(
        "memory/{phase}/rest",
        Unit.GIBIBYTES,
        "The peak without those parts: activations, logits, gathered layers, buffers. On GPUs only.",
    ),
    by_trainer(
        "memory/update/activations",
        Unit.GIBIBYTES,
        "What the forward pass of an update's first micro-batch left for its backward pass: activations, and with FSDP2"
        " embedding and head, which stay gathered. A part of `rest`, on GPUs only.",
    ),
    by_trainer("memory/{phase}/peak", Unit.GIBIBYTES, "The allocator's peak in the phase. On GPUs only."),
    by_trainer(
        "memory/{phase}/predicted/{predicted}",
        Unit.GIBIBYTES,
        "What was predicted for that part at the phase's peak. Absent if it is nothing.",
    ),
    by_trainer(
        "memory/{phase}/predicted/offloaded",
        Unit.GIBIBYTES,
        "What was predicted of the kept parts in host memory, for a trainer on GPUs.",
    ),
    by_trainer(
        "memory/{phase}/predicted/rest", Unit.GIBIBYTES, "What was predicted of the peak without the kept parts."
    ),
    by_trainer("memory/{phase}/predicted/peak", Unit.GIBIBYTES, "The predicted peak of the phase."),
)
