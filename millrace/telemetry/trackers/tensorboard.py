"""TensorBoard event files, written with TensorBoard's own writer. Needs neither torch nor TensorFlow."""

import time
from collections.abc import Mapping

from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.event_file_writer import EventFileWriter

from millrace.telemetry.trackers import TrackedJob


class TensorBoard:
    """Writes one event file in `<folder>/tensorboard`, which `tensorboard --logdir` shows."""

    def __init__(self, job: TrackedJob) -> None:
        self._writer = EventFileWriter(str(job.folder / "tensorboard"), flush_secs=10)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        scalars = [Summary.Value(tag=name, simple_value=value) for name, value in sorted(values.items())]
        self._writer.add_event(Event(step=step, wall_time=time.time(), summary=Summary(value=scalars)))

    def close(self) -> None:
        self._writer.close()
