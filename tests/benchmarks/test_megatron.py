"""What the measurements on GPUs ask for, looked at where there is none."""

from pathlib import Path

import pytest

from benchmarks.megatron.cases import PARTS, Launch, Machine
from millrace.backends.megatron import parse
from millrace.megatron.architectures import read_shape
from millrace.megatron.rules import broken_rules


@pytest.mark.parametrize("gpus", [2, 4, 8])
def test_every_case_is_allowed_and_has_a_name_of_its_own(gpus: int, tmp_path: Path) -> None:
    launches = [launch for part in PARTS.values() for launch in part(Machine(tmp_path, True, False, gpus))]
    assert len({launch.name for launch in launches}) == len(launches)
    for launch in launches:
        assert max(launch.gpus) < gpus
        assert len({case["name"] for case in launch.cases}) == len(launch.cases), launch.name
        assert broken(launch) == {}


def broken(launch: Launch) -> dict[str, list[str]]:
    found = {}
    for case in launch.cases:
        if case["kind"] != "huggingface" and "options" in case and case.get("backend", "megatron") == "megatron":
            shape = read_shape(Path(case["model"]))
            found[case["name"]] = broken_rules(parse(case["options"]), shape, len(launch.gpus), cuda=True)
    return {name: rules for name, rules in found.items() if rules}
