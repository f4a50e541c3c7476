"""Reading Python files without running them."""

import ast
import threading
from pathlib import Path

ATTEMPTS = 5
_ONE_AT_A_TIME = threading.Lock()


def syntax_tree(path: Path) -> ast.Module:
    """The syntax tree of a file. Raises SyntaxError and ValueError for a file that is not Python, OSError for one that
    cannot be read.

    CPython 3.11 counts the depth of all trees that threads make at the same time in one place, and raises SystemError
    now and then (python/cpython#106905). So one thread parses at a time here, and again where code of others parsed.
    """
    source = path.read_bytes()
    with _ONE_AT_A_TIME:
        for _ in range(ATTEMPTS - 1):
            try:
                return ast.parse(source, filename=str(path))
            except SystemError:
                continue
        return ast.parse(source, filename=str(path))
