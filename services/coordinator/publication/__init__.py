"""One publication from PREPARE to COMMIT, its retries, and how a replica joins a job."""
