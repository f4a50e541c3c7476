"""What the trainer does with the algorithms of `millrace/rl`: it finds their functions, calls them, and aggregates what they return."""
