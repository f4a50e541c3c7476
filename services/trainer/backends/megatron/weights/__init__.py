"""The tensors of the model folder: reading them, gathering them, the shards of a rank, and the state of a
checkpoint."""
