"""The fsdp2 backend: torch's fully_shard over Hugging Face models, with Gloo on CPUs and NCCL on GPUs."""
