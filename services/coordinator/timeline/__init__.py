"""The timeline of a job: what every service did when, and why it was idle."""
