"""A version that comes whole: every tensor is broadcast into CPU memory during generation, then loaded and compared.

An engine fuses tensors (q, k and v into one parameter), splits them over workers and pads them; its loaders know how.
Instead of keeping a second, hand-written map, the loader is run once while every copy it makes is recorded: which
slice of which manifest tensor went to which slice of which parameter. From then on the parameters can be read back in
manifest terms and compared bit for bit.
"""

import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from millrace.errors import PublicationFailed
from millrace.weights.loader.learn import strided
from millrace.weights.loader.misfits import loader_refused, parameters_unwritten
from millrace.weights.loader.patches import Concatenations, pools_run_inline
from millrace.weights.plans.manifest import Content
from millrace.weights.plans.memory import bits
from millrace.weights.plans.views import Strided, covered_elements
from millrace.weights.transfer.channels.gloo import GlooChannel
from millrace.weights.transfer.checksum import checksum
from services.rollout.weights.in_worker.model import LoadedPart, WorkerModel, part_of
from services.rollout.weights.transfer_request import TransferRequest
from services.rollout.weights.worker_methods import Placed, Prepared, Received


@dataclass(frozen=True)
class LoaderCopy:
    """One copy: a slice of tensor `name` was written to a slice of the storage of parameter `parameter`."""

    name: str
    source: Strided
    parameter: str
    target: Strided


@dataclass(frozen=True)
class LoaderCopies:
    """All copies of one run of the loader."""

    copies: tuple[LoaderCopy, ...]
    unknown: tuple[str, ...]
    """Tensors of which no copy was seen: not used by this worker, or changed on the way."""
    parameters: Mapping[str, torch.Tensor] = field(repr=False)

    def mismatches(self, tensors: Mapping[str, torch.Tensor]) -> list[str]:
        """Names of the tensors whose copies are not bit for bit as in `tensors`."""
        wrong = []
        for copy in self.copies:
            expected = torch.as_strided(tensors[copy.name], copy.source[1], copy.source[2], copy.source[0])
            held = self._held(copy)
            if not torch.equal(bits(held), bits(expected).to(held.device)):
                wrong.append(copy.name)
        return sorted(set(wrong))

    def read(self, name: str, like: torch.Tensor) -> torch.Tensor:
        """Tensor `name` as the parameters hold it now, shaped as `like`; NaN if this worker holds nothing of it."""
        whole = torch.full_like(like, float("nan"))
        for copy in self.copies:
            if copy.name == name:
                torch.as_strided(whole, copy.source[1], copy.source[2], copy.source[0]).copy_(self._held(copy))
        return whole

    def _held(self, copy: LoaderCopy) -> torch.Tensor:
        offset, shape, strides = copy.target
        return torch.as_strided(self.parameters[copy.parameter].detach(), shape, strides, offset)


def record_copies(
    load: Callable[[Iterable[tuple[str, torch.Tensor]]], Any],
    tensors: Mapping[str, torch.Tensor],
    parameters: Mapping[str, torch.Tensor],
) -> LoaderCopies:
    """Runs `load` once on `tensors` (contiguous, whole) and records every copy from them into `parameters`."""
    recorder = _Recorder(tensors, parameters)
    with torch.no_grad(), pools_run_inline(), recorder:
        load(iter(tensors.items()))
    seen = {copy.name for copy in recorder.copies}
    return LoaderCopies(tuple(recorder.copies), tuple(n for n in tensors if n not in seen), parameters)


class _Recorder(TorchDispatchMode):
    """Sees every `copy_` and recognises source and target by their storages."""

    def __init__(self, tensors: Mapping[str, torch.Tensor], parameters: Mapping[str, torch.Tensor]) -> None:
        TorchDispatchMode.__init__(self)
        self.copies: list[LoaderCopy] = []
        self._concatenations = Concatenations()
        self._sources = {t.untyped_storage().data_ptr(): name for name, t in tensors.items()}
        self._targets = {p.untyped_storage().data_ptr(): name for name, p in parameters.items()}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.copy_.default:
            for target, source in self._concatenations.split_copy(args[0], args[1]) or ():
                self._copied(target, source)
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.cat.default and (len(args) == 1 or args[1] == 0):
            self._concatenations.add(result, tuple(args[0]))
        return result

    def _copied(self, target: torch.Tensor, source: torch.Tensor) -> None:
        name = self._sources.get(source.untyped_storage().data_ptr())
        parameter = self._targets.get(target.untyped_storage().data_ptr())
        if name is not None and parameter is not None and source.dtype == target.dtype:
            source = source.expand_as(target)
            self.copies.append(LoaderCopy(name, strided(source), parameter, strided(target)))


class IncomingBroadcast:
    """See `IncomingTransfer`. Receives every tensor as one rank of the communicator, in a thread of its own."""

    def __init__(self, request: TransferRequest, rank: int, loader: "ComparingLoader") -> None:
        self.tensors: dict[str, torch.Tensor] = {}
        """Whole tensors by their names in the manifest, on the CPU."""
        self._request = request
        self._rank = rank
        self._loader = loader
        self._checksums: list[int] = []
        self._wire_s = self._checksum_s = 0.0
        self._failure: PublicationFailed | None = None
        self._channel: GlooChannel | None = None
        self._closed = threading.Event()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"receive {request.key}", daemon=True)

    def begin(self) -> None:
        self._thread.start()

    def wait(self, at_most_s: float | None = None) -> Received | None:
        if not self._over.wait(at_most_s):
            return None
        if self._failure is not None:
            raise self._failure.again()
        return Received(tuple(enumerate(self._checksums)), wire_s=self._wire_s, checksum_s=self._checksum_s)

    def place(self) -> Placed:
        """See `IncomingTransfer`. The tensors are freed, whether or not it succeeds."""
        try:
            return self._loader.place(self._request, self.tensors)
        finally:
            self.close()

    def close(self) -> None:
        """See `IncomingTransfer`. The tensors are freed. A thread inside a Gloo call may take until that call's timeout
        to end; it is not waited for."""
        if not self._over.is_set():
            self._failure = self._request.aborted()
        self._closed.set()
        self._over.set()
        if self._channel is not None:
            self._channel.abort()
        self.tensors = {}

    def _run(self) -> None:
        try:
            self._receive()
        except PublicationFailed as error:
            self._failure = self._failure or error.again()
        except RuntimeError as error:  # torch: out of memory, or the channel was aborted during a call
            what = f"receiving {self._request.key} failed: {error}"
            self._failure = self._failure or PublicationFailed(what, "publish again with a new attempt.")
        finally:
            self._over.set()

    def _receive(self) -> None:
        request, started = self._request, time.perf_counter()
        self._channel = GlooChannel.join(
            request.host,
            request.port,
            key=request.key,
            rank=self._rank,
            world_size=request.world_size,
            timeout_s=request.timeout_s,
        )
        self._wire_s += time.perf_counter() - started
        for info in request.manifest.tensors:
            if self._closed.is_set():
                raise request.aborted()
            tensor = torch.empty(info.shape, dtype=getattr(torch, info.dtype))
            started = time.perf_counter()
            self._channel.broadcast(tensor)
            received = time.perf_counter()
            self._checksums.append(checksum(tensor))
            self._wire_s += received - started
            self._checksum_s += time.perf_counter() - received
            self.tensors[info.name] = tensor


class ComparingLoader:
    """Writes whole tensors through the engine's own loader, and compares the parameters with them each time."""

    def __init__(self, model: LoadedPart) -> None:
        self._model = model
        self._copies: LoaderCopies | None = None
        self._manifest_hash = b""

    def place(self, request: TransferRequest, tensors: Mapping[str, torch.Tensor]) -> Placed:
        """Loads every tensor, then compares every copy that the loader made bit for bit. Raises PublicationFailed for
        any difference, and InvalidJob if a parameter would keep a value that was never published."""
        started = time.perf_counter()
        copies = self._load(request, tensors)
        written = time.perf_counter()
        if wrong := copies.mismatches(tensors):
            what = f"{len(wrong)} tensors differ in the engine from what was received: {', '.join(wrong[:5])}."
            raise PublicationFailed(what, "report it with the model's config: the engine changes weights as it loads.")
        return Placed(
            apply_s=written - started,
            compare_s=time.perf_counter() - written,
            loader_tensors=len(tensors),
            unplaced=copies.unknown,
        )

    def _load(self, request: TransferRequest, tensors: Mapping[str, torch.Tensor]) -> LoaderCopies:
        """The loader's copies are recorded with the first version of a manifest, and the same for later ones."""
        try:
            if self._copies is not None and request.manifest.hash == self._manifest_hash:
                with torch.no_grad():
                    self._model.load(iter(tensors.items()))
                return self._copies
            copies = record_copies(self._model.load, tensors, self._model.loaded)
        except torch.OutOfMemoryError as error:
            what = f"the engine's loader has no memory for {request.key}: {error}."
            raise PublicationFailed(what, "give the engine less.") from error
        except (RuntimeError, ValueError, KeyError, AssertionError) as error:
            raise loader_refused(error) from error
        if missing := self._unwritten(copies):
            raise parameters_unwritten(missing)
        self._copies, self._manifest_hash = copies, request.manifest.hash
        return copies

    def _unwritten(self, copies: LoaderCopies) -> list[str]:
        """Names of parameters that the copies do not cover."""
        written: dict[int, set[Strided]] = defaultdict(set)
        for copy in copies.copies:
            written[self._model.loaded[copy.parameter].untyped_storage().data_ptr()].add(copy.target)
        covered = {storage: covered_elements(views) for storage, views in written.items()}
        missing = []
        for name, parameter in self._model.loaded.items():
            held = covered.get(parameter.untyped_storage().data_ptr(), 0)
            if held == 0 or (held < parameter.numel() and name not in self._model.padded):
                missing.append(name)
        return missing


class GatherBroadcastPath:
    """See `IncomingPath`. Keeps what it has learned of the engine's loader."""

    def __init__(self, model: WorkerModel) -> None:
        self._model = model
        self._loaders: dict[Content, ComparingLoader] = {}

    def prepare(self, request: TransferRequest, rank: int) -> Prepared:
        """See `IncomingPath`. Tensors are always received into CPU memory first."""
        return Prepared(shadow_fits=True, inplace_possible=False)

    def transfer(self, request: TransferRequest, rank: int, *, shadow: bool) -> IncomingBroadcast:
        """See `IncomingPath`. Memory is taken tensor by tensor as they arrive."""
        content = request.manifest.content
        if content not in self._loaders:
            self._loaders[content] = ComparingLoader(part_of(self._model, content))
        return IncomingBroadcast(request, rank, self._loaders[content])
