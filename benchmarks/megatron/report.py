"""The results of the cases: comparisons, and tables."""

from pathlib import Path
from typing import Any

import numpy as np
from safetensors.torch import load_file
from torch import Tensor


def compared(scratch: Path) -> dict[str, dict[str, Any]]:
    """Every training compared with Hugging Face in float32 and with Megatron on one GPU.

    Log-probabilities are compared by their difference, weights by their difference relative to the length of the way
    that the two updates moved them. Keyed by the name of the case.
    """
    found: dict[str, dict[str, Any]] = {}
    for group, model in (("dense", "dense"), ("moe", "moe"), ("replayed", "moe"), ("latent", "latent")):
        trained = scratch / "trained" / group
        truth = trained / f"{group}, huggingface float32"
        if not truth.with_suffix(".npy").exists():
            continue
        start, end = load_file(scratch / model / "model.safetensors"), load_file(truth / "model.safetensors")
        alone = trained / f"{group}.safetensors"
        for file in sorted(trained.glob("*.safetensors")):
            after, logprobs = load_file(file), np.load(file.with_suffix(".npy"))
            line: dict[str, Any] = {"group": group, "weights_vs_huggingface": _apart(after, end, start)}
            line |= _logprobs("huggingface", logprobs, np.load(truth.with_suffix(".npy")))
            if alone.exists() and file != alone:
                line["weights_vs_alone"] = _apart(after, load_file(alone), start)
                line |= _logprobs("alone", logprobs, np.load(alone.with_suffix(".npy")))
            found[file.stem] = line
    return found


def _logprobs(of: str, mine: np.ndarray, other: np.ndarray) -> dict[str, float]:
    difference = np.abs(mine - other)
    return {f"logprobs_mean_vs_{of}": float(difference.mean()), f"logprobs_max_vs_{of}": float(difference.max())}


def _apart(mine: dict[str, Tensor], other: dict[str, Tensor], start: dict[str, Tensor]) -> float:
    """|mine − other| / |other − start| over all weights; NaN where the names differ."""
    names = mine.keys() & other.keys() & start.keys()
    if len(names) != len(mine):
        return float("nan")
    apart = sum(float((mine[n] - other[n]).double().square().sum()) for n in names)
    moved = sum(float((other[n] - start[n]).double().square().sum()) for n in names)
    return float((apart / moved) ** 0.5)


def tables(found: dict[str, Any]) -> str:
    """The results as Markdown."""
    lines = [str(found["host"]), ""]
    apart = found.get("equal", {})
    for launch, cases in found["launches"].items():
        lines.append(f"## {launch}")
        for case in cases:
            if not case["ok"]:
                lines.append(f"- {case['name']}: FAILED: {case['error'].strip().splitlines()[-1][:300]}")
                continue
            line = {**case, **apart.get(case["name"], {})}
            values = {k: v for k, v in line.items() if k not in ("name", "ok", "rank", "group")}
            lines.append(f"- {case['name']}: " + ", ".join(f"{k} {_short(v)}" for k, v in values.items()))
    return "\n".join(lines)


def _short(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, list):
        return "[" + " ".join(map(_short, value)) + "]"
    if isinstance(value, dict):
        return "{" + " ".join(f"{k}={_short(v)}" for k, v in value.items()) + "}"
    return str(value)
