"""The receiver's side of a publication, the same for all engines."""
