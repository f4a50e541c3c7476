"""What the trainer does with the algorithms of `millrace/rl`: find the function, call it, aggregate its result."""
