"""The benches run, and what they publish lies where it belongs."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from millrace.bench import app
from millrace.bench.layouts import ReplicaLayout, TrainerLayout
from millrace.bench.publication import measured
from millrace.errors import InvalidJob
from millrace.megatron.architectures.published import SHAPES

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
    ("shape", "trainer", "replica", "replicas"),
    [
        ("tiny-moe", "ep=2", "tp=1", 1),
        # two replicas: tests/services/trainer/publication/test_sharded.py has several receivers
        pytest.param("tiny", "fsdp=1", "tp=1", 2, marks=pytest.mark.matrix),
    ],
)
def test_every_mode_puts_everything_in_its_place(
    shape: str, trainer: str, replica: str, replicas: int, tmp_path: Path
) -> None:
    """By the command, which writes what it prints."""
    output, modes = tmp_path / "figures.json", ["shadow", "inplace", "broadcast"]
    options = {
        **{"shape": shape, "trainer": trainer, "replica": replica, "replicas": replicas, "device": "cpu"},
        **{"modes": ",".join(modes), "repeats": 2, "message-mb": 1 / 128, "limit-s": 120, "output": output},
    }
    arguments = [part for name, value in options.items() for part in (f"--{name}", str(value))]
    told = CliRunner().invoke(app, ["publication", *arguments], catch_exceptions=False)
    assert told.exit_code == 0, told.output
    result = json.loads(output.read_text())
    assert list(result["modes"]) == modes and result["plan"]["rounds"] > 3
    for row in result["modes"].values():
        assert row["misplaced"] == 0 and row["transfer"]["p50"] > 0 and row["gbs_a_receiver"] > 0
    assert result["modes"]["inplace"]["slot_bytes"] < result["modes"]["shadow"]["slot_bytes"]
    assert all(mode in told.stdout for mode in modes) and result["plan"]["hash"] in told.stdout


def test_planning_needs_no_memory_for_weights() -> None:
    arguments = ["plan", "--shape", "qwen3-30b-a3b", "--trainer", "ep=8", "--ranks", "8"]
    arguments += ["--replica", "ep=2", "--workers", "2", "--replicas", "2", "--gpus-per-host", "4"]
    told = CliRunner().invoke(app, arguments)
    assert told.exit_code == 0 and "18867 tensors, 61.1 GB" in told.output
    # Both replicas are on one host: over the network go the 32.1 GB of each of two workers, not of all four.
    assert "64.1 GB go from host to host; a trainer host sends 32.1 GB" in told.output


def test_what_cannot_be_run_is_refused() -> None:
    asked = {"shape": "tiny", "trainer": "tp=1", "replica": "tp=1", "replicas": 1, "modes": ["shadow"], "repeats": 1}
    with pytest.raises(InvalidJob, match="no shape 'large'"):
        measured({**asked, "shape": "large", "device": ""}, 1.0)
    with pytest.raises(InvalidJob, match="no mode other"):
        measured({**asked, "modes": ["other"], "device": ""}, 1.0)
    with pytest.raises(InvalidJob, match="no layout"):
        TrainerLayout(SHAPES["tiny"], "tp:2").ranks  # noqa: B018
    assert ReplicaLayout(SHAPES["tiny"], "tp=4").ranks == 4
