"""The publication after a step. Seconds, tensors and bytes are those of the member that has most."""

from millrace.telemetry.metrics.declaration import Unit, by_coordinator, by_replica

PAUSE_SECONDS = "publication/pause_s"

PUBLICATION = (
    by_coordinator("publication/replicas", Unit.COUNT, "Replicas that the publication reached."),
    by_coordinator("publication/failures", Unit.COUNT, "Attempts before the one that succeeded."),
    by_coordinator("publication/bytes", Unit.BYTES, "Size of one copy of the weights, or of the adapter alone."),
    by_coordinator("publication/gather_s", Unit.SECONDS, "Collecting full tensors from the trainer's shards."),
    by_coordinator(
        "publication/sent_bytes",
        Unit.BYTES,
        "Sent by all ranks of the trainer to all replicas. With `publication.path: delta` less than their weights.",
    ),
    by_coordinator(
        "publication/changed",
        Unit.SHARE,
        "Part of the 16-bit words that changed since the version before; 0 if everything was sent.",
    ),
    by_coordinator("publication/code_s", Unit.SECONDS, "Comparing, encoding and decoding, if only changes are sent."),
    by_coordinator(
        "publication/snapshot_bytes",
        Unit.BYTES,
        "Host memory of a trainer's rank with what it sent last; 0 unless only changes are sent.",
    ),
    by_coordinator("publication/wire_s", Unit.SECONDS, "Sending and receiving."),
    by_coordinator("publication/verify_s", Unit.SECONDS, "Computing and comparing checksums."),
    by_coordinator("publication/staging_bytes", Unit.BYTES, "Memory for the transfer."),
    by_replica("publication/apply_s", Unit.SECONDS, "Writing the engine's parameters."),
    by_replica(PAUSE_SECONDS, Unit.SECONDS, "From the last token under the old version until generation may continue."),
    by_replica("publication/loader_tensors", Unit.COUNT, "Tensors that went whole through the engine's own loader."),
)
