"""Pickles, secrets and broken checkpoints are found in files and in Redis' values."""

import json
import pickle
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from safetensors.numpy import save_file

from benchmarks.chaos.files import checkpoint_is_whole, is_pickled, nothing_forbidden
from millrace.ids import JobId, Version
from services.trainer.checkpoints.checkpoint import Description
from tests.benchmarks.chaos.test_invariants import sound, with_record


def test_pickles_are_told_from_what_only_begins_as_one(tmp_path: Path) -> None:
    torch.save({"weight": torch.zeros(2)}, tmp_path / "torch")
    assert is_pickled((tmp_path / "torch").read_bytes()) and is_pickled(pickle.dumps({"a": [1, 2]}))
    assert not is_pickled(b"\x80\x04 and then something else") and not is_pickled(json.dumps([1]).encode())


def test_files_and_values_are_looked_through(tmp_path: Path) -> None:
    (tmp_path / "log").write_text("nothing of note")
    assert list(nothing_forbidden([tmp_path], [b"value"], "s3cret")) == []
    (tmp_path / "below").mkdir()
    (tmp_path / "below" / "log").write_text("Bearer s3cret")
    (tmp_path / "below" / "state").write_bytes(pickle.dumps([1, 2, 3]))
    found = "\n".join(nothing_forbidden([tmp_path], [b"a s3cret", pickle.dumps(1)], "s3cret"))
    for told in ("log holds the token", "state is a pickle", "Redis holds the token", "Redis holds a pickle"):
        assert told in found


def test_a_checkpoint_is_read(tmp_path: Path) -> None:
    (tmp_path / "state").mkdir()
    save_file({"weight": np.zeros(4, np.float32)}, tmp_path / "state" / "rank-0.safetensors")
    size = (tmp_path / "state" / "rank-0.safetensors").stat().st_size
    files = {"rank-0.safetensors": size}
    whole = Description(JobId("job-1"), Version(12), {"": 12}, None, 1, "", "hash", files)
    seen = with_record(sound(), checkpoint=str(tmp_path))
    assert "is none" in "".join(checkpoint_is_whole(seen))
    whole.write(tmp_path)
    assert list(checkpoint_is_whole(seen)) == []
    replace(whole, updates={"": 13}).write(tmp_path)  # a step was applied twice
    assert "after {'': 13} updates" in "".join(checkpoint_is_whole(seen))
    whole.write(tmp_path)
    (tmp_path / "state" / "rank-0.safetensors").write_bytes(b"\xff" * size)
    assert "cannot be read" in "".join(checkpoint_is_whole(seen))
    (tmp_path / "state" / "rank-0.safetensors").write_bytes(b"short")
    assert "has not the" in "".join(checkpoint_is_whole(seen))
