"""What an install leaves out is left out where it has to be, and nowhere else."""

import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_only_installs_for_a_cpu_leave_out_what_engines_on_gpus_import() -> None:
    assert "uv" not in tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]
    assert "override" not in (ROOT / "deploy/trainer.Dockerfile").read_text()
    installs = re.findall(r"^\t.*uv pip install.*EXTRAS.*$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert installs and all("--override $(OVERRIDES)" in install for install in installs)
    assert "cpu-*) export UV_OVERRIDE=cpu-overrides.txt" in (ROOT / "deploy/rollout.Dockerfile").read_text()
    lines = (ROOT / "deploy/cpu-overrides.txt").read_text().splitlines()
    left_out = {line.split()[0] for line in lines if line.endswith(" ; python_version < '3'")}
    (torch,) = (line for line in lines if line[0] != "#" and line.split()[0] not in left_out)
    assert left_out == {"torchvision", "torchaudio", "torchcodec"}
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert torch in extras["cpu-vllm"]
