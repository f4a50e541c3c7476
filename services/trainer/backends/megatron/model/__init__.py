"""The model's chunks on a rank: configuration, layers, head."""
