"""Who plays the episodes of a job."""
