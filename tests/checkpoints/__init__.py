"""The indexes of distributed checkpoints."""
