"""The model's tensors in Hugging Face terms: reading, exporting, shards, checkpoint state."""
