"""What the fsdp2 backend publishes: manifests, whole tensors and shards of the model, its base and its adapter."""
