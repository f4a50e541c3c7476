"""Models, optimizers and versions on the disk, for any number of ranks in any topology."""

FILE = "trainer.json"
"""The file of a checkpoint that says what it is of. It is written last."""
FORMAT = 2
