"""Reading a job spec and telling every mistake in it."""
