"""The sender's side of a publication: sharded, and gather-and-broadcast."""
