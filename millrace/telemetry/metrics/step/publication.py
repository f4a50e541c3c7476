"""The publication after a step. Seconds, tensors and bytes are those of the member that has most."""

from millrace.telemetry.metrics.declaration import Owner, StepMetric, Unit

COORDINATOR, REPLICA = Owner.COORDINATOR, Owner.REPLICA

PAUSE_SECONDS = "publication/pause_s"

PUBLICATION = (
    StepMetric("publication/replicas", Unit.COUNT, COORDINATOR, "Replicas that the publication reached."),
    StepMetric("publication/failures", Unit.COUNT, COORDINATOR, "Attempts before the one that succeeded."),
    StepMetric(
        "publication/bytes",
        Unit.BYTES,
        COORDINATOR,
        "Size of one copy of the weights, or of the adapter alone.",
    ),
    StepMetric("publication/gather_s", Unit.SECONDS, COORDINATOR, "Collecting full tensors from the trainer's shards."),
    StepMetric(
        "publication/sent_bytes",
        Unit.BYTES,
        COORDINATOR,
        "Sent by all ranks of the trainer to all replicas. With `publication.path: delta` less than their weights.",
    ),
    StepMetric(
        "publication/changed",
        Unit.SHARE,
        COORDINATOR,
        "Part of the 16-bit words that changed since the version before; 0 if everything was sent.",
    ),
    StepMetric(
        "publication/code_s",
        Unit.SECONDS,
        COORDINATOR,
        "Comparing, encoding and decoding, if only changes are sent.",
    ),
    StepMetric(
        "publication/snapshot_bytes",
        Unit.BYTES,
        COORDINATOR,
        "Host memory of a trainer's rank with what it sent last; 0 unless only changes are sent.",
    ),
    StepMetric("publication/wire_s", Unit.SECONDS, COORDINATOR, "Sending and receiving."),
    StepMetric("publication/verify_s", Unit.SECONDS, COORDINATOR, "Computing and comparing checksums."),
    StepMetric("publication/staging_bytes", Unit.BYTES, COORDINATOR, "Memory for the transfer."),
    StepMetric("publication/apply_s", Unit.SECONDS, REPLICA, "Writing the engine's parameters."),
    StepMetric(
        PAUSE_SECONDS,
        Unit.SECONDS,
        REPLICA,
        "From the last token under the old version until generation may continue.",
    ),
    StepMetric(
        "publication/loader_tensors", Unit.COUNT, REPLICA, "Tensors that went whole through the engine's own loader."
    ),
)
