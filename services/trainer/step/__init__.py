"""From references to groups to new weights and metrics."""
