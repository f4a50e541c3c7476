"""Model folders read into the shards of a module."""
