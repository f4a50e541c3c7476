"""Replicas of pools, which score with a model of their own, and how a replica that generates calls them."""
