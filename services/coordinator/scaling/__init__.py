"""Autoscaling of one pool of replicas: what is measured, the decision, and what starts and stops replicas."""
