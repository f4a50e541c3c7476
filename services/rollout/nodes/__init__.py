"""The nodes of a replica whose engine lies on several hosts: how they meet, watch each other, and start as one.

Node 0, the leader, is the replica: it is the member of the fleet, holds the leases and the engine's front. The other
nodes, the followers, hold nothing but their share of the engine's workers. One life of all nodes together is a
generation: if one node is lost, all end, and their launchers start the next generation.
"""
