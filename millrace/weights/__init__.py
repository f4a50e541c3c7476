"""Publication's shared parts. Torch-free: manifest, plan, phases. With torch: checksum, landing, channels."""
