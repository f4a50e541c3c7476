"""Models, optimizers and versions on disk, in any topology."""
