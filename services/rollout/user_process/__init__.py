"""A process of a user's code in a sandbox, and a pool of such processes."""
