"""What the trainer's rooms share: the protocol of a backend, a micro-batch, the tensors that a rank holds."""
