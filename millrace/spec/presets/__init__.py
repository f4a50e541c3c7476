"""Ready algorithms by the names that people say: one YAML file each, the `algorithm` part of a job spec."""

from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from millrace.spec.document import Document

HERE = Path(__file__).parent
ABOUT_KL = ("kl_coefficient", "kl_in")
"""What of a preset goes with its KL, if a job does without."""
Tree = Mapping[str, Any]


def names() -> tuple[str, ...]:
    """Every preset, sorted."""
    return tuple(sorted(path.stem for path in HERE.glob("*.yaml")))


def over_preset(given: Tree) -> dict[str, Any]:
    """`given` on top of the preset that it names, if it names one.

    A function of another name takes the place of the preset's with its options; of the same name, or with no name at
    all, it changes the options that it gives. A preset that does not exist changes nothing: its field is refused.
    """
    name = given.get("preset")
    if name not in names():
        return dict(given)
    preset = dict(_read(name))
    if given.get("kl", preset.get("kl")) is None:
        preset = {key: value for key, value in preset.items() if key not in ABOUT_KL}
    return _over(preset, given)


def _over(preset: Tree, given: Tree) -> dict[str, Any]:
    merged = dict(preset)
    for key, value in given.items():
        below = preset.get(key)
        if isinstance(value, str) and isinstance(below, Mapping) and "name" in below:
            value = {"name": value}
        if isinstance(value, Mapping) and isinstance(below, Mapping) and _same_function(below, value):
            value = _over(below, value)
        merged[key] = value
    return merged


def _same_function(preset: Tree, given: Tree) -> bool:
    return bool(given.get("name", preset.get("name")) == preset.get("name"))


@cache
def _read(name: str) -> Tree:
    tree: Tree = Document.of_file(HERE / f"{name}.yaml").tree
    return tree
