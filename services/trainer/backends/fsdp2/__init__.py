"""torch's fully_shard over Hugging Face models: CPU on Gloo, GPU on NCCL."""
