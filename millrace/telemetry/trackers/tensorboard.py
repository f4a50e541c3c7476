"""TensorBoard event files, written by TensorBoard's own writer; neither torch nor TensorFlow is needed."""

import time
from collections.abc import Mapping

from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.event_file_writer import EventFileWriter

from millrace.telemetry.trackers import Run


class TensorBoard:
    """One event file under `<folder>/tensorboard`; `tensorboard --logdir` on it shows the job."""

    def __init__(self, run: Run) -> None:
        self._writer = EventFileWriter(str(run.folder / "tensorboard"), flush_secs=10)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        scalars = [Summary.Value(tag=name, simple_value=value) for name, value in sorted(values.items())]
        self._writer.add_event(Event(step=step, wall_time=time.time(), summary=Summary(value=scalars)))

    def close(self) -> None:
        self._writer.close()
