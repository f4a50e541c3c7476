"""The trainer: one gRPC server in front of a group of ranks.

Rank 0 serves the calls of the coordinator and sends each as a command to all ranks, which do the torch work.
"""
