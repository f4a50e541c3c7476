"""The text of a job spec: what it costs to read, which numbers it has, and on which line a field stands."""

import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from millrace.errors import InvalidJob
from millrace.spec import load, parse
from millrace.spec.document import MOST_CHARACTERS, UNREADABLE, Document


def merges(levels: int = 9, width: int = 9) -> str:
    """Mappings each of which merges the one before several times: width ** levels fields."""
    lines = ["a0: &a0 {x: 1, y: 2}"]
    for level in range(1, levels):
        lines.append(f"a{level}: &a{level} {{<<: [{', '.join([f'*a{level - 1}'] * width)}]}}")
    return "\n".join(lines)


HOSTILE = {
    "merge keys": merges(),
    "an integer to the base of 60": f"seed: !!int '{'1:' * 400_000}1'",
    "a float to the base of 60": f"seed: !!float '{'1:' * 400_000}1.0'",
    "levels": "[" * 100_000,
    "levels of mappings": "{a: " * 100_000,
    "digits": f"seed: {'9' * 900_000}",
    "hexadecimal digits": f"seed: 0x{'f' * 900_000}",
    "a digit with an exponent of digits": f"seed: 1.0e+{'9' * 900_000}",
    "values": "- a\n" * 240_000,
    "commas": "[" + "a," * 400_000 + "]",
    "characters": "a" * (MOST_CHARACTERS + 1),
    "the same field twice": "name: a\nmodel: {}\nname: b",
}


@pytest.mark.parametrize("text", HOSTILE.values(), ids=HOSTILE)
def test_a_text_that_costs_more_than_it_looks_is_refused(text: str) -> None:
    with pytest.raises((InvalidJob, *UNREADABLE)):
        parse(Document(text).tree)


def test_nested_merge_keys_cost_no_memory(tmp_path: Path) -> None:
    """In a process of its own, whose peak of memory is known: 43 million fields are named by 500 bytes."""
    (tmp_path / "job.yaml").write_text(merges())
    code = (
        "import resource, sys; from pathlib import Path; from millrace.errors import InvalidJob;"
        "from millrace.spec.document import Document\n"
        "before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "try: Document.of_file(Path(sys.argv[1]))\n"
        "except InvalidJob as error: print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before, error)"
    )

    def limited() -> None:
        resource.setrlimit(resource.RLIMIT_CPU, (20, 20))

    argv = [sys.executable, "-c", code, str(tmp_path / "job.yaml")]
    told = subprocess.run(argv, capture_output=True, text=True, check=True, preexec_fn=limited).stdout
    kilobytes, _, message = told.partition(" ")
    assert int(kilobytes) < 50_000 and "merge keys bring more than" in message and "in line 5" in message


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-6", 1e-6),
        ("1.0e-6", 1e-6),
        ("-3", -3),
        ("0x1f", 31),
        ("1_000", 1000),
        (".5", 0.5),
        ("-.inf", float("-inf")),
        ("1:30", "1:30"),
        ("190:20:30.15", "190:20:30.15"),
        ("'8'", "8"),
        ("1.2.3", "1.2.3"),
        ("12e", "12e"),
        ("true", True),
        ("null", None),
    ],
)
def test_numbers_are_those_of_yaml_1_2(text: str, value: Any) -> None:
    assert Document(f"a: {text}").tree == {"a": value}


def test_merge_keys_mean_what_they_mean_in_yaml() -> None:
    text = """
    base: &base {lr: 1, eps: 2}
    other: &other {lr: 3, clip: 4}
    one: {<<: *base, lr: 5}
    both: {<<: [*base, *other]}
    nested: {<<: {<<: *other, lr: 6}}
    """
    tree = Document(text).tree
    assert tree["one"] == {"lr": 5, "eps": 2}
    assert tree["both"] == {"lr": 1, "eps": 2, "clip": 4}
    assert tree["nested"] == {"lr": 6, "clip": 4}


JOB = """\
name: words
output: /out
model: {}
data:
  files: [/data/train.jsonl]
rollout:
  temprature: 2
  engine_options:
    vllm:
      max_model_len: 8
trainer:
  optimizer:
    betas:
      - 0.9
      - 2
"""


def test_a_mistake_names_its_line(tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    path.write_text(JOB)
    with pytest.raises(InvalidJob) as refused:
        load(path)
    told = str(refused.value)
    assert "  rollout.temprature (line 7): there is no such field. Fix: did you mean `temperature`?" in told
    assert "  trainer.optimizer.betas.1 (line 15): 2: is not less than 1." in told
    assert "  model.path (line 3): is missing." in told
    assert {mistake.field: mistake.line for mistake in refused.value.mistakes}["rollout.temprature"] == 7
    path.write_text(JOB.replace("  temprature: 2\n", "").replace("- 2", "- 0.95").replace("{}", "{path: /model}"))
    with pytest.raises(InvalidJob, match=r"rollout\.engine_options\.vllm\.max_model_len \(line 9\): 8: prompt and"):
        load(path)


def test_lines_of_lists_missing_fields_and_json() -> None:
    document = Document('{"a": [1,\n {"b": 2}],\n "c": 3}')
    assert [document.line_of(field) for field in ("a", "a.1.b", "c", "c.d", "e", "")] == [1, 2, 3, 3, 0, 0]
    assert Document("").tree is None and Document("").line_of("a") == 0
