"""The stages of the job loop, one file each, and what they work with."""
