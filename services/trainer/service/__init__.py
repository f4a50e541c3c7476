"""The calls that rank 0 serves, and what each rank does for a command."""
