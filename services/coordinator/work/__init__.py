"""Leases: which replica works on which prompt, until when."""
