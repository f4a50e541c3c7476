"""Small files with the schemas of the published data sets."""

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from tests.image_models import picture

SUMS = (
    ("Ada has 48 shells and gives half of them away. How many has she left?", "48/2 = <<48/2=24>>24 shells.\n#### 24"),
    ("A bus has 1,000 seats and gets 80 more. How many?", "1000 + 80 = <<1000+80=1080>>1,080 seats.\n#### 1,080"),
    ("It is 3 degrees, and 8 colder at night. How cold is the night?", "3 - 8 = <<3-8=-5>>-5 degrees.\n#### -5"),
    ("A pen costs $1.25. What do two cost?", "2 * 1.25 = $<<2*1.25=2.5>>2.5\n#### 2.5"),
)
SUM_TRUTHS = ("24", "1080", "-5", "2.5")
PROBLEMS = (
    ("Find $a + b$ where $a = 30$ and $b = 4$.", "34"),
    ("Compute $3 - 6$.", "-3"),
    ("Compute $2^{10}$.", "1024"),
)


def gsm8k_file(path: Path) -> Path:
    pq.write_table(pa.Table.from_pylist([{"question": q, "answer": a} for q, a in SUMS]), path)
    return path


def geometry_file(path: Path, **changed: Any) -> Path:
    """Two problems, with one image and with two, as the data sets of Hugging Face hold images; `changed` is other in
    the last one."""
    images = [{"bytes": picture(seed, 40, 30), "path": f"{seed}.png"} for seed in range(3)]
    rows: list[dict[str, Any]] = [
        {"images": images[:1], "problem": "<image>Find $x$.", "answer": "2 \\sqrt { 221 }"},
        {"images": images[1:], "problem": "<image>Find y, where <image>.", "answer": "4"},
    ]
    rows[-1] |= changed
    pq.write_table(pa.Table.from_pylist(rows), path)
    return path


def dapo_row(number: int, problem: str, truth: str) -> dict[str, Any]:
    content = (
        "Solve the following math problem step by step. The last line of your response should be of the form Answer: "
        "$Answer (without quotes) where $Answer is the answer to the problem.\n\n"
        f'{problem}\n\nRemember to put your answer on its own line after "Answer:".'
    )
    return {
        "data_source": "math_dapo",
        "prompt": [{"content": content, "role": "user"}],
        "ability": "MATH",
        "reward_model": {"ground_truth": truth, "style": "rule-lighteval/MATH_v2"},
        "extra_info": {"index": f"9a9b6eb4-a1cb-49d1-8c1e-{number:012d}"},
    }


def dapo_file(path: Path, repeats: int = 3, more: tuple[tuple[str, str], ...] = ()) -> Path:
    """Every problem `repeats` times, in turn, as in the published file; then `more`."""
    rows = [dapo_row(number, *problem) for _ in range(repeats) for number, problem in enumerate(PROBLEMS)]
    rows += [dapo_row(len(PROBLEMS) + number, *problem) for number, problem in enumerate(more)]
    pq.write_table(pa.Table.from_pylist(rows), path)
    return path


FILES = {"gsm8k": gsm8k_file, "dapo-math": dapo_file, "geometry3k": geometry_file}
"""What writes a small file of a data set."""
