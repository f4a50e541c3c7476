"""The sender's side of a publication on the ranks: one protocol, sharded transfer, gather-and-broadcast."""
