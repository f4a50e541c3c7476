"""Which files a sandbox sees: the system's programs and libraries, Python, Millrace, and the folder of the user's code.

Everything else does not exist inside. Paths are those of the process that starts the sandbox.
"""

import os
import pwd
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32")
SETTINGS = (
    "alternatives",
    "ca-certificates",
    "ca-certificates.conf",
    "group",
    "host.conf",
    "hosts",
    "ld.so.cache",
    "ld.so.conf",
    "ld.so.conf.d",
    "localtime",
    "mime.types",
    "nsswitch.conf",
    "passwd",
    "pki",
    "protocols",
    "resolv.conf",
    "services",
    "ssl",
    "timezone",
)
"""What programs read in /etc."""
BROAD = frozenset({"/", "/var/tmp", "/var/lib", "/var/run"})
"""Folders that hold much that has nothing to do with each other, besides those at the top of the tree and homes."""


@dataclass(frozen=True)
class View:
    """The files that a sandbox sees, read-only."""

    needed: tuple[str, ...]
    """Real paths without which Python does not run: its installation, the packages of Millrace."""
    code: tuple[str, ...]
    """Real paths of the user's code and of what the operator adds."""
    links: tuple[tuple[str, str], ...]
    """Names of these paths that lead there over symbolic links, each with the real path."""
    hidden: tuple[str, ...]
    """Real paths that are empty even if a folder that is seen holds them."""

    @property
    def shown(self) -> list[str]:
        """All real paths, outer ones first; none lies in another one."""
        system = [os.path.realpath(path) for path in SYSTEM]
        settings = [f"/etc/{name}" for name in SETTINGS]
        return _outermost([*system, *settings, *self.needed, *self.code])


def view(code: Iterable[Path] = (), hidden: Sequence[str] = ()) -> View:
    """What this interpreter needs, the entries of its search path, and `code`: files with the folder in which they
    lie, or folders. A folder that is broad or hidden is not shown, of such a folder only the file."""
    away = tuple(os.path.realpath(path) for path in hidden if path)
    seen = [*_installed(), *_loaded_packages()]
    others = [path for path in _search_path() if not _is_kept_back(path, away)]
    others += [shown for path in code for shown in _with_folder(path, away)]
    return _view_of(seen, others, away)


def interpreter() -> View:
    """What programs in Python need: the interpreter, and the packages that are installed beside it."""
    return _view_of(_installed(), [], ())


def _view_of(needed: Sequence[Path], code: Sequence[Path], hidden: tuple[str, ...]) -> View:
    named = [os.path.abspath(path) for path in (*needed, *code) if path.exists()]
    links = {(name, real) for name in named if (real := os.path.realpath(name)) != name}
    return View(
        tuple(os.path.realpath(path) for path in needed if path.exists()),
        tuple(os.path.realpath(path) for path in code if path.exists()),
        tuple(sorted(links)),
        hidden,
    )


def _installed() -> list[Path]:
    return [Path(path) for path in (sys.prefix, sys.base_prefix, sys.exec_prefix, sys.base_exec_prefix)]


def _loaded_packages() -> list[Path]:
    """Imported packages that share millrace's parent folder. Listed singly: that folder may be a whole repository."""
    home = _home_of_millrace()
    names = {name.partition(".")[0] for name in sys.modules}
    return [home / name for name in sorted(names) if (home / name).is_dir()]


def _home_of_millrace() -> Path:
    return Path(__file__).absolute().parents[2]


def _search_path() -> list[Path]:
    """The entries of `sys.path`, without the working folder that `python -m` adds and the folder of `millrace`."""
    left_out = {os.path.realpath(_home_of_millrace())}
    named = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    if os.getcwd() not in named:
        left_out.add(os.path.realpath(os.getcwd()))
    entries = [*sys.path, *_editable_packages()]
    return [Path(entry) for entry in entries if entry and os.path.realpath(entry) not in left_out]


def _editable_packages() -> list[str]:
    """The folders of packages that are installed in place by setuptools, which are on no search path."""
    modules = [sys.modules.get(getattr(finder, "__module__", "")) for finder in sys.meta_path]
    return [folder for module in modules for folder in getattr(module, "MAPPING", {}).values()]


def _with_folder(path: Path, hidden: Sequence[str]) -> list[Path]:
    """The folder of a file, and the file itself: a link may lead to it from another folder."""
    if path.is_dir():
        return [path]
    return [path] if _is_kept_back(path.parent, hidden) else [path.parent, path]


def _is_kept_back(path: Path, hidden: Sequence[str]) -> bool:
    """Whether a folder is broad, or lies in a hidden one."""
    real = os.path.realpath(path)
    broad = real in BROAD or os.path.dirname(real) == "/" or real in _homes()
    return (broad and os.path.isdir(real)) or any(is_within(real, each) for each in hidden)


def _homes() -> set[str]:
    try:
        own = pwd.getpwuid(os.getuid()).pw_dir
    except KeyError:
        own = "/"
    return {os.path.realpath(home) for home in (own, os.environ.get("HOME", "/"))}


def is_within(path: str, folder: str) -> bool:
    """Whether `path` is `folder` or lies in it. Both are real paths."""
    return path == folder or path.startswith(folder.rstrip("/") + "/")


def _outermost(paths: Iterable[str]) -> list[str]:
    kept: list[str] = []
    for path in sorted(set(paths), key=lambda path: (path.count("/"), path)):
        if os.path.exists(path) and not any(is_within(path, outer) for outer in kept):
            kept.append(path)
    return kept
