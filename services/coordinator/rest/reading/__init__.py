"""Routes that read what a job has left: curves, groups of samples, its spec."""
