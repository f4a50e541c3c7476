"""Requests to jobs, the runner that runs one job after another, and the loop of a job."""
