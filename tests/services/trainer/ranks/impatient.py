"""`python -m services.trainer` to which a silent rank is dead sooner, for tests that wait for that."""

import typer

import services.trainer.__main__ as trainer
from services.trainer.ranks import commands, heartbeats

heartbeats.SILENT_S, commands.STRAGGLE_S = 12.0, 8.0

if __name__ == "__main__":
    typer.run(trainer.main)
