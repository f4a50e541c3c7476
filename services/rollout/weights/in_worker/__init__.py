"""The part of the receiver's side that runs inside each of an engine's workers."""
