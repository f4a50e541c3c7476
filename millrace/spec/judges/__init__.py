"""Judges of a job, and the rules about them."""
