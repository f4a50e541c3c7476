"""Generates the stubs in millrace/wire/v1 from proto/millrace/v1: `make proto`. With --check it only compares.

protoc writes imports by the proto's package (`millrace.v1`); here import path = file path, so they are rewritten.
"""

import filecmp
import pathlib
import re
import sys
import tempfile

import grpc_tools
from grpc_tools import protoc

ROOT = pathlib.Path(__file__).resolve().parent.parent
STUBS = ROOT / "millrace" / "wire" / "v1"
WELL_KNOWN = pathlib.Path(grpc_tools.__file__).parent / "_proto"


def generate(target: pathlib.Path) -> None:
    """Writes all stubs and an empty package file into `target`."""
    with tempfile.TemporaryDirectory() as scratch:
        protos = sorted(str(p) for p in (ROOT / "proto/millrace/v1").glob("*.proto"))
        outputs = [f"--{kind}_out={scratch}" for kind in ("python", "pyi", "grpc_python")]
        if protoc.main(["protoc", f"-I{ROOT / 'proto'}", f"-I{WELL_KNOWN}", *outputs, *protos]):
            raise SystemExit("protoc failed: its message is above")
        target.mkdir(parents=True, exist_ok=True)
        for stub in pathlib.Path(scratch, "millrace/v1").iterdir():
            text = re.sub(r"\bfrom millrace\.v1 import", "from millrace.wire.v1 import", stub.read_text())
            (target / stub.name).write_text(text)
        (target / "__init__.py").write_text("")


def main() -> None:
    if "--check" not in sys.argv:
        generate(STUBS)
        return
    with tempfile.TemporaryDirectory() as fresh:
        generate(pathlib.Path(fresh))
        names = {p.name for d in (pathlib.Path(fresh), STUBS) for p in d.iterdir() if p.is_file()}
        stale = sorted(n for n in names if not _same(pathlib.Path(fresh, n), STUBS / n))
    if stale:
        raise SystemExit(f"stubs are not those of proto/: {', '.join(stale)}. Run `make proto` and commit the result.")


def _same(one: pathlib.Path, other: pathlib.Path) -> bool:
    return one.exists() and other.exists() and filecmp.cmp(one, other, shallow=False)


if __name__ == "__main__":
    main()
