"""The coordinator's folders import one way."""

import ast
from pathlib import Path

import services.coordinator

ROOT = Path(services.coordinator.__file__).parent
LAYERS = (
    {"state"},
    {"store"},
    {"fleet", "observe"},
    {"work"},
    {"publication"},
    {"stages"},
    {"jobs"},
    {"rest"},
)
"""From the lowest up. A folder imports from the layers below its own."""


def test_folders_import_only_from_layers_below() -> None:
    level = {folder: number for number, layer in enumerate(LAYERS) for folder in layer}
    assert set(level) == {path.parent.name for path in ROOT.glob("*/__init__.py")}
    for path in ROOT.glob("*/*.py"):
        folder = path.parent.name
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("services.coordinator."):
                used = str(node.module).split(".")[2]
                assert used == folder or level[used] < level[folder], f"{path} imports {node.module}"
