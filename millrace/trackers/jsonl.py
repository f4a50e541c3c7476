"""Two files with one JSON object in each line: the metrics of each step, and the samples."""

import json
import os
import time
from collections.abc import Mapping, Sequence
from math import isfinite
from pathlib import Path
from typing import BinaryIO

from millrace.rest import SampleView
from millrace.trackers import TrackedJob

TAIL_BYTES = 65536
"""Bytes that are read at once from the end of a file in search of its last line break."""


class JsonLines:
    """Writes `<folder>/metrics.jsonl` and `<folder>/samples.jsonl`.

    A line of metrics has `step`, `time_s` (Unix time) and every metric by its name. JSON has no numbers that are not
    finite: they are the texts "NaN", "Infinity" and "-Infinity", as in the REST API. A step that is trained again has a
    second line; its last line is the valid one.
    """

    def __init__(self, job: TrackedJob) -> None:
        job.folder.mkdir(parents=True, exist_ok=True)
        self._metrics = _opened(job.folder / "metrics.jsonl")
        self._samples = _opened(job.folder / "samples.jsonl")

    def log(self, step: int, values: Mapping[str, float]) -> None:
        figures = {name: value if isfinite(value) else json.dumps(value) for name, value in values.items()}
        line = json.dumps({"step": step, "time_s": time.time(), **figures})
        self._metrics.write(line.encode() + b"\n")
        self._metrics.flush()

    def log_samples(self, step: int, samples: Sequence[SampleView]) -> None:
        self._samples.write(b"".join(sample.model_dump_json().encode() + b"\n" for sample in samples))
        self._samples.flush()

    def close(self) -> None:
        self._metrics.close()
        self._samples.close()


def _opened(path: Path) -> BinaryIO:
    """Opens the file to append whole lines. A last line that was cut, by a full disk or a crash, is removed first."""
    file = path.open("a+b")
    end = file.seek(0, os.SEEK_END)
    whole = end
    while whole > 0:
        start = max(0, whole - TAIL_BYTES)
        file.seek(start)
        found = file.read(whole - start).rfind(b"\n")
        whole = start if found < 0 else start + found + 1
        if found >= 0:
            break
    if whole < end:
        file.truncate(whole)
    return file
