"""Models, optimizers and versions on the disk, for any number of ranks in any topology."""
