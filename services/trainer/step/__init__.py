"""A training step: from references to groups to new weights and metrics."""
