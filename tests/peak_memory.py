"""How much memory this process or another one takes."""

from pathlib import Path


class Peak:
    """The most memory that a process has held since this object was made, over what it held then, in bytes."""

    def __init__(self, pid: int | str = "self") -> None:
        self._folder = Path(f"/proc/{pid}")
        (self._folder / "clear_refs").write_text("5")
        self._before = self._read("VmRSS")

    @property
    def grown(self) -> int:
        return self._read("VmHWM") - self._before

    def _read(self, name: str) -> int:
        line = next(line for line in (self._folder / "status").read_text().splitlines() if line.startswith(name))
        return int(line.split()[1]) * 1024
