"""The receiver's side of a publication, the same for all engines: the part in the replica's own process."""
