"""Software of others that a part of Millrace runs on: how it is installed, whether it is there, which releases were
tested. Nothing here imports it."""

import importlib.metadata
import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass, field

TESTED_TORCH = ("2.11.0", "2.13.0")
TESTED_TRANSFORMERS = ("5.12", "5.16", "5.17", "5.18", "5.19")


@dataclass(frozen=True)
class Probe:
    """Whether something can run on this machine."""

    ok: bool
    release: str
    """The installed release; empty if none is installed."""
    why: str
    """Why it cannot run, with the fix; or a warning; or empty."""


@dataclass(frozen=True)
class Software:
    """What has to be installed for one part of Millrace."""

    title: str
    """The name that people use, `vLLM`."""
    distributions: tuple[str, ...]
    """Packages of which any one provides it: builds for GPUs and for CPUs, say."""
    imports: tuple[str, ...]
    """Modules that it needs; all of them have to be importable in one process."""
    extras: tuple[str, ...]
    """Extras of Millrace, each of which installs it."""
    also_shown: tuple[str, ...] = ()
    """Further packages whose releases matter."""
    tested: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """The releases that were run, by package; `5.12` stands for every 5.12.x."""

    @property
    def release(self) -> str:
        """The installed release; empty if it is not installed."""
        return next(iter(self._installed(self.distributions).values()), "")

    @property
    def releases(self) -> dict[str, str]:
        """The installed releases of all its packages, by package."""
        return self._installed((*self.distributions, *self.also_shown))

    def probe(self) -> Probe:
        """Whether it is installed. Looks for packages and modules without importing them."""
        release = self.release
        tops = {name.partition(".")[0] for name in self.imports}
        if not release or any(importlib.util.find_spec(name) is None for name in tops):
            return Probe(False, "", f"{self.title} is not installed: {self.how_to_install()}.")
        return Probe(True, release, self.release_warning(release))

    def how_to_install(self, *, reinstall: bool = False) -> str:
        """The command that installs it."""
        return how_to_install(*self.extras, reinstall=reinstall)

    def was_tested(self, package: str, release: str) -> bool:
        """Whether this release of one of its packages was run; true for a package of which any release is accepted."""
        public = release.partition("+")[0] + "."
        tested = self.tested.get(package)
        return tested is None or any(public.startswith(f"{each}.") for each in tested)

    def release_warning(self, release: str) -> str:
        """Why `release` may not work; empty if it lies between the oldest and the newest that were run."""
        tested = self._tested_in_order()
        first, last = self.oldest_tested, tested[-1] if tested else ""
        if not tested or _numbers(first) <= _numbers(release)[: len(_numbers(first))] <= _numbers(last):
            return ""
        tried = f"{first} was" if first == last else f"{first} to {last} were"
        return f"{self.title} {release} was not tried; {tried}. Watch the log-probability mismatch of the first steps."

    @property
    def oldest_tested(self) -> str:
        """The oldest release that was run; empty if any release is accepted."""
        return next(iter(self._tested_in_order()), "")

    def _tested_in_order(self) -> list[str]:
        return sorted((each for name in self.distributions for each in self.tested.get(name, ())), key=_numbers)

    @staticmethod
    def _installed(packages: tuple[str, ...]) -> dict[str, str]:
        return {name: release for name in packages if (release := installed_release(name))}


def installed_release(package: str) -> str:
    """The release of an installed package; empty if it is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _numbers(release: str) -> tuple[int, ...]:
    """The leading numbers of a release: (0, 26, 1) of `0.26.1.post1`."""
    numbers: list[int] = []
    for part in release.split("."):
        if not part.isdigit():
            break
        numbers.append(int(part))
    return tuple(numbers)


OVERRIDES = {"cpu-vllm": " --override deploy/cpu-overrides.txt"}
"""What an extra is installed with."""


def how_to_install(*extras: str, reinstall: bool = False) -> str:
    """`uv pip install -e '.[gpu-vllm]' in the checkout`; of several extras one is enough."""
    named = " or ".join(f"'.[{extra}]'{OVERRIDES.get(extra, '')}" for extra in extras)
    return f"uv pip install {'--reinstall ' if reinstall else ''}-e {named} in the checkout"
