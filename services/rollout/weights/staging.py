"""Staging memory: one engine worker's copy of a version that is on its way, filled beside generation.

The same code runs inside vLLM's worker processes and inside the `transformers` engine.
"""

import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from millrace.errors import PublicationFailed
from millrace.weights.loader.copies import Landings, record_landings
from millrace.weights.plans.coverage import covered_elements
from millrace.weights.plans.views import Strided
from millrace.weights.transfer.channels.gloo import GlooChannel
from millrace.weights.transfer.checksum import checksum
from services.rollout.weights.transfer_request import TransferRequest

Load = Callable[[Iterable[tuple[str, torch.Tensor]]], Any]


class Staging:
    """Receives every tensor of `transfer_request` as rank `rank` of its communicator, in a thread of its own."""

    def __init__(self, transfer_request: TransferRequest, rank: int) -> None:
        self.request = transfer_request
        self.tensors: dict[str, torch.Tensor] = {}
        """By manifest name, whole, on CPU."""
        self.checksums: list[int] = []
        """Of each tensor, taken when it landed."""
        self.wire_s = 0.0
        self.checksum_s = 0.0
        self.failure: str | None = None
        self._rank = rank
        self._channel: GlooChannel | None = None
        self._closed = threading.Event()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._receive, name=f"receive {transfer_request.key}", daemon=True)

    def begin(self) -> None:
        self._thread.start()

    def wait(self, at_most_s: float | None = None) -> None:
        """Blocks until `done`."""
        self._over.wait(at_most_s)

    @property
    def done(self) -> bool:
        """Whether the last byte is here, or never will be: see `failure`."""
        return self._over.is_set()

    def close(self) -> None:
        """Ends what is under way and gives the memory back. A thread inside a Gloo call may take until that call's
        timeout to notice; nobody waits for it."""
        if not self._over.is_set():
            self.failure = f"publication {self.request.key} was aborted."
        self._closed.set()
        self._over.set()
        if self._channel is not None:
            self._channel.abort()
        self.tensors = {}

    def _receive(self) -> None:
        try:
            self._receive_all()
        except PublicationFailed as error:
            self.failure = self.failure or str(error)
        except RuntimeError as error:  # torch: out of memory, or a channel that was aborted under us
            self.failure = self.failure or f"receiving {self.request.key} failed: {error}"
        finally:
            self._over.set()

    def _receive_all(self) -> None:
        transfer_request, started = self.request, time.perf_counter()
        self._channel = GlooChannel.join(
            transfer_request.host,
            transfer_request.port,
            key=transfer_request.key,
            rank=self._rank,
            world_size=transfer_request.world_size,
            timeout_s=transfer_request.timeout_s,
        )
        self.wire_s += time.perf_counter() - started
        for info in transfer_request.manifest.tensors:
            if self._closed.is_set():
                raise PublicationFailed(f"publication {transfer_request.key} was aborted.")
            tensor = torch.empty(info.shape, dtype=getattr(torch, info.dtype))
            started = time.perf_counter()
            self._channel.broadcast(tensor)
            landed = time.perf_counter()
            self.checksums.append(checksum(tensor))
            self.wire_s += landed - started
            self.checksum_s += time.perf_counter() - landed
            self.tensors[info.name] = tensor


@dataclass(frozen=True)
class Applied:
    """One worker's part of a swap."""

    apply_s: float
    compare_s: float
    unplaced: tuple[str, ...]
    """Manifest tensors of which this worker's loader took nothing."""


class Shelf:
    """An engine worker's parameters, written through the engine's own loader and compared after every write.

    `parameters` are all tensors of the model's state by name; tied ones may appear under several. `padded` names those
    that are larger than what is published (a vocabulary padded for the kernels).
    """

    def __init__(self, load: Load, parameters: Mapping[str, torch.Tensor], padded: frozenset[str]) -> None:
        self._load = load
        self._parameters = parameters
        self._padded = padded
        self._landings: Landings | None = None
        self._manifest_hash = b""

    def apply(self, staging: Staging) -> Applied:
        """Writes every tensor, then compares every landing bit for bit. Raises PublicationFailed for any difference,
        and where a parameter would keep a value that was never published."""
        started = time.perf_counter()
        landings = self._write(staging)
        written = time.perf_counter()
        if wrong := landings.mismatches(staging.tensors):
            what = f"{len(wrong)} tensors differ in the engine from what was received: {', '.join(wrong[:5])}."
            raise PublicationFailed(what, "report it with the model's config: the engine changes weights as it loads.")
        return Applied(written - started, time.perf_counter() - written, landings.unknown)

    def _write(self, staging: Staging) -> Landings:
        manifest_hash = staging.request.manifest.hash
        try:
            if self._landings is not None and manifest_hash == self._manifest_hash:
                with torch.no_grad():
                    self._load(iter(staging.tensors.items()))
                return self._landings
            landings = record_landings(self._load, staging.tensors, self._parameters)
        except (RuntimeError, ValueError, KeyError, AssertionError) as error:
            what = f"the engine's loader refused {staging.request.key}: {type(error).__name__}: {error}."
            raise PublicationFailed(what, "see that trainer and engine load the same model folder.") from error
        if missing := self._unwritten(landings):
            what = f"the publication writes nothing to, or only a part of, {', '.join(missing[:5])}."
            raise PublicationFailed(what, "see that trainer and engine load the same model folder.")
        self._landings, self._manifest_hash = landings, manifest_hash
        return landings

    def _unwritten(self, landings: Landings) -> list[str]:
        """Names of parameters that the landings do not cover."""
        landed: dict[int, set[Strided]] = defaultdict(set)
        for copy in landings.copies:
            landed[self._parameters[copy.parameter].untyped_storage().data_ptr()].add(copy.target)
        covered = {storage: covered_elements(views) for storage, views in landed.items()}
        missing = []
        for name, parameter in self._parameters.items():
            held = covered.get(parameter.untyped_storage().data_ptr(), 0)
            if held == 0 or (held < parameter.numel() and name not in self._padded):
                missing.append(name)
        return missing
