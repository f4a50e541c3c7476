"""One weight publication, and how a replica joins."""
