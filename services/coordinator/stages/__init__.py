"""The stages of the job loop, one file each, in the words of the design."""
