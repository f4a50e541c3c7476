"""Leases, groups, and the job that a replica holds."""
