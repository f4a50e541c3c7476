"""LoRA on Megatron's layers: what an adapter computes, its first values, and what is published and saved of it."""
