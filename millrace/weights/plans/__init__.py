"""Who sends which box of which tensor to whom. Pure: no torch.distributed, no sockets."""
