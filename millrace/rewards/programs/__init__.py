"""Scores answers that are programs by running them against test cases, in sandboxes."""
