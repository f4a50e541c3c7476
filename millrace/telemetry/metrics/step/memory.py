"""What the memory of the trainer's ranks holds, phase by phase, measured and predicted: each value is that of the rank
that has most. The parts are the tensors that a rank keeps, measured by their storages. What exists during a pass only
(`gathered`, `activations`, `logits`, `staging`) is predicted part by part, and measured together as `rest`; activations
of an update are measured by themselves too. The prediction is that of `millrace validate --memory`, for micro-batches
as large as the token budget, at the moment of a phase that needs most."""

from millrace.telemetry.metrics.declaration import Unit, by_trainer

REST, OFFLOADED, PEAK = "rest", "offloaded", "peak"
PREDICTED = "predicted"
"""Middle part of the keys of predictions for a phase."""

MEMORY = tuple(
    by_trainer(key, Unit.GIBIBYTES, meaning)
    for key, meaning in {
        "memory/{phase}/{kept}": "What that part takes on the device, at its largest in the phase. On a CPU it is in"
        " host memory.",
        "memory/{phase}/offloaded": "Those parts as far as they are in host memory, for a trainer on GPUs.",
        "memory/{phase}/rest": "The peak without those parts: activations, logits, gathered layers, buffers. On GPUs"
        " only.",
        "memory/update/activations": "What the forward pass of an update's first micro-batch left for its backward"
        " pass: activations, and with FSDP2 embedding and head, which stay gathered. A part of `rest`, on GPUs only.",
        "memory/{phase}/peak": "The allocator's peak in the phase. On GPUs only.",
        "memory/{phase}/predicted/{predicted}": "What was predicted for that part at the phase's peak. Absent if it is"
        " nothing.",
        "memory/{phase}/predicted/offloaded": "What was predicted of the kept parts in host memory, for a trainer on"
        " GPUs.",
        "memory/{phase}/predicted/rest": "What was predicted of the peak without the kept parts.",
        "memory/{phase}/predicted/peak": "The predicted peak of the phase.",
    }.items()
)
