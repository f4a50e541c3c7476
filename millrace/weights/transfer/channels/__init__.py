"""Channels: how tensors travel between the ranks of a publication. One file each."""
