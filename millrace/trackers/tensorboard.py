"""TensorBoard event files, written with TensorBoard's own writer. Needs neither torch nor TensorFlow."""

import time
from collections.abc import Mapping, Sequence

from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.plugins.text.metadata import create_summary_metadata
from tensorboard.summary.writer.event_file_writer import EventFileWriter
from tensorboard.util.tensor_util import make_tensor_proto

from millrace.rest import SampleView
from millrace.trackers import COLUMNS, Cell, TrackedJob, rows

LONGEST_CELL = 2000
"""Characters of a sample's text that the table shows."""
SPECIAL = str.maketrans({"|": "\\|", "\n": "↵ ", "\r": ""})
"""Characters that would end a cell of a Markdown table."""


class TensorBoard:
    """Writes one event file in `<folder>/tensorboard`, which `tensorboard --logdir` shows."""

    def __init__(self, job: TrackedJob) -> None:
        self._writer = EventFileWriter(str(job.folder / "tensorboard"), flush_secs=10)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._add(step, [Summary.Value(tag=name, simple_value=value) for name, value in sorted(values.items())])

    def log_samples(self, step: int, samples: Sequence[SampleView]) -> None:
        table: list[Sequence[Cell]] = [COLUMNS, ["---"] * len(COLUMNS), *rows(samples)]
        text = make_tensor_proto("\n".join(f"|{'|'.join(_written(cell) for cell in line)}|" for line in table))
        metadata = create_summary_metadata("samples", "Prompts with their answers and rewards.")
        self._add(step, [Summary.Value(tag="samples", metadata=metadata, tensor=text)])

    def _add(self, step: int, values: list[Summary.Value]) -> None:
        self._writer.add_event(Event(step=step, wall_time=time.time(), summary=Summary(value=values)))

    def close(self) -> None:
        self._writer.close()


def _written(cell: Cell) -> str:
    return "" if cell is None else str(cell)[:LONGEST_CELL].translate(SPECIAL)
