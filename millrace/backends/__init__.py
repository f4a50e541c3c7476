"""What is known of each training backend without importing it."""
