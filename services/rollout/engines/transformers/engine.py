"""Hugging Face Transformers behind the engine protocol: small and portable, for machines where vLLM does not run.

One thread decodes, with continuous batching; weights are received beside it and written between two tokens.
"""

import asyncio
import functools
import importlib.metadata
import importlib.util
import os
import secrets
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ConfigDict, Field

from millrace.errors import InvalidJob, InvalidState, PublicationFailed, refused
from millrace.extras import how_to_install
from millrace.ids import Version
from millrace.spec import JobSpec
from millrace.spec.rollout import CachePolicy
from millrace.validation.mistakes import options as checked_options
from millrace.weights.plans.boxes import Boxes
from millrace.weights.plans.manifest import Manifest
from services.rollout.engine import (
    Dispatch,
    EngineDied,
    Load,
    Probe,
    Reception,
    Sample,
    Sampling,
    Swap,
    compute_threads,
    end_of_turn,
)
from services.rollout.weights.transfer_request import TransferRequest, mode_of, stages

if TYPE_CHECKING:
    from torch import Tensor

    from millrace.weights.plans.memory import Memory
    from services.rollout.engines.transformers.decoding import DecodeLoop, Pause
    from services.rollout.weights.sharded import Coming, Going, Shards
    from services.rollout.weights.staging import Shelf, Staging


class Options(BaseModel):
    """`rollout.engine_options` for this engine."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    max_num_seqs: int = Field(32, ge=1)
    """Samples decoded at once."""
    device: str = ""
    """cpu, cuda, cuda:1; empty takes the first GPU where there is one."""
    attn_implementation: str = "sdpa"


def probe() -> Probe:
    if importlib.util.find_spec("transformers") is None or importlib.util.find_spec("torch") is None:
        return Probe(False, "", f"transformers or torch is not installed: {how_to_install('transformers')}.")
    return Probe(True, importlib.metadata.version("transformers"), "")


class TransformersEngine:
    name = "transformers"

    def __init__(self) -> None:
        self.release = importlib.metadata.version("transformers")
        self.device = ""
        self.world_size = 1
        self.dtype = ""
        self.capacity = 0
        self._model: Any = None
        self._stored: dict[str, Tensor] = {}
        """Views of the model's tensors, named and cut as its folder stores them."""
        self._decode: DecodeLoop
        self._decoding: Future[None] | None = None
        self._shelf: Shelf
        self._staging: Staging | None = None
        self._shards: Shards
        self._coming: Coming | None = None
        self._source: Memory | None = None
        self._going: Going | None = None
        self._staged = True
        self._pause: Pause | None = None
        """Of a transfer that is put in place as it comes."""
        self._asked: set[asyncio.Future[Sample | None]] = set()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="decode")

    async def start(self, spec: JobSpec) -> None:
        await asyncio.to_thread(self._build, spec)
        loop = asyncio.get_running_loop()
        self._decoding = self._thread.submit(self._decode.run)
        self._decoding.add_done_callback(lambda _: loop.call_soon_threadsafe(self._loop_ended))

    def _build(self, spec: JobSpec) -> None:
        import torch
        from transformers import AutoTokenizer

        from millrace.weights.loader.stored import stored_tensors
        from services.rollout.engines.transformers.decoding import DecodeLoop, Endings
        from services.rollout.engines.transformers.routing import Routing
        from services.rollout.weights.sharded import Shards
        from services.rollout.weights.staging import Shelf

        options = _options(spec)
        self._model = _random_model(spec, options)
        tokenizer = AutoTokenizer.from_pretrained(spec.model.path, trust_remote_code=spec.model.trust_remote_code)
        endings = Endings(
            tokenizer=tokenizer,
            end_of_turn=frozenset(end_of_turn(getattr(self._model.generation_config, "eos_token_id", None), tokenizer)),
            context=spec.data.max_prompt_tokens + spec.rollout.max_response_tokens,
        )
        routing = Routing(self._model) if spec.algorithm.router_replay else None
        self._decode = DecodeLoop(self._model, endings, options.max_num_seqs, secrets.randbits(60), routing)
        self._stored = _stored(self._model, spec)
        held = dict(stored_tensors(self._model))
        self._shelf = Shelf(self._load, held, frozenset())
        self._shards = Shards(self._load, held, frozenset())
        device = self._model.device
        if device.type == "cpu" and "OMP_NUM_THREADS" not in os.environ:
            torch.set_num_threads(compute_threads())
        self.device = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
        self.dtype = spec.rollout.dtype
        self.capacity = options.max_num_seqs

    async def stop(self) -> None:
        if self._decoding is not None:
            self._decode.stop()
            await asyncio.wait([asyncio.wrap_future(self._decoding)])
            self._decoding = None
        await self.abort_receive()
        await self.end_send()
        if self._model is not None:
            await asyncio.to_thread(self._shards.leave)
        self._thread.shutdown(wait=False)
        self._model = None

    async def generate(self, prompt_tokens: Sequence[int], sampling: Sampling) -> Sample:
        from services.rollout.engines.transformers.decoding import Request

        loop = asyncio.get_running_loop()
        ended: asyncio.Future[Sample | None] = loop.create_future()

        def end(sample: Sample | None) -> None:
            loop.call_soon_threadsafe(_settle, ended, sample)

        request = Request(prompt_tokens, sampling, end)
        self._asked.add(ended)
        try:
            self.load()
            self._decode.submit(request)
            sample = await ended
        finally:
            self._asked.discard(ended)
            if not ended.done() or ended.cancelled():
                self._decode.abort(request)
        self.load()
        if sample is None:
            raise InvalidState("the sample was aborted: no version is in place.", "the prompt is issued again.")
        return sample

    def _loop_ended(self) -> None:
        for ended in self._asked:
            _settle(ended, None)

    def load(self) -> Load:
        """Raises EngineDied where the decode loop ended."""
        if self._decoding is None:
            return Load(0, 0)
        if self._decoding.done():
            raise EngineDied(f"the decode loop ended: {self._decoding.exception()}")
        return Load(*self._decode.counts())

    async def describe(self, manifest: Manifest) -> Sequence[Boxes]:
        self._check(manifest)
        return [await asyncio.to_thread(self._shards.boxes, manifest)]

    async def prepare(self, transfer_request: TransferRequest) -> None:
        from services.rollout.weights.staging import Staging

        await self.abort_receive()
        self._check(transfer_request.manifest)
        if transfer_request.sides is None:
            self._staging = Staging(transfer_request, transfer_request.first_rank)
            return
        fits = await asyncio.to_thread(self._shards.fits, transfer_request, transfer_request.first_rank)
        self._staged = stages(transfer_request, fits)
        prepare = functools.partial(
            self._shards.prepare, transfer_request, transfer_request.first_rank, staged=self._staged
        )
        self._coming = await asyncio.to_thread(prepare)

    def _check(self, manifest: Manifest) -> None:
        held = {name: (tuple(t.shape), str(t.dtype).removeprefix("torch.")) for name, t in self._stored.items()}
        coming = {t.name: (t.shape, t.dtype) for t in manifest.tensors}
        if differing := sorted(set(held.items()) ^ set(coming.items())):
            names = sorted({name for name, _ in differing})
            what = f"{len(names)} tensors differ in name, shape or dtype: {', '.join(names[:5])}."
            raise PublicationFailed(what, "see that trainer and engine load the same model folder in the same dtype.")

    async def begin_receive(self) -> None:
        if (coming := self._coming) is None:
            self._prepared().begin()
            return
        if not self._staged:
            pause = await self._stand_still()
            if self._coming is not coming:
                self._decode.release(pause)
                raise PublicationFailed("the publication was aborted.", "prepare it again.")
            self._pause = pause
        coming.begin()

    async def _stand_still(self) -> "Pause":
        pause = self._decode.pause()
        try:
            await asyncio.to_thread(self._decode.stands, pause)
        except BaseException:
            self._decode.release(pause)
            raise
        return pause

    @property
    def half_written(self) -> bool:
        return self._pause is not None

    async def received(self) -> Reception:
        if (coming := self._coming) is not None:
            await asyncio.to_thread(coming.wait)
            if coming.failure is not None or coming.result is None:
                raise PublicationFailed(coming.failure or "nothing was received.")
            times = coming.result.times
            return Reception((), times.wire_s, times.verify_s, tuple(coming.result.sums.items()))
        staging = self._prepared()
        await asyncio.to_thread(staging.wait)
        if staging.failure is not None:
            raise PublicationFailed(staging.failure)
        return Reception(tuple(staging.checksums), staging.wire_s, staging.checksum_s)

    async def commit(self, version: Version, cache_policy: CachePolicy) -> Swap:
        if self._coming is not None:
            return await self._place(self._coming, version, cache_policy)
        staging, self._staging = self._prepared(), None
        pause = await self._stand_still()
        in_place: Version | None = None
        try:
            applied = await asyncio.to_thread(self._shelf.apply, staging)
            if applied.unplaced:
                raise PublicationFailed(f"nothing of {', '.join(applied.unplaced[:5])} was placed.")
            in_place = version
        finally:
            staging.close()
            self._decode.resume(pause, in_place, recompute=cache_policy == "recompute")
        return Swap(
            apply_s=applied.apply_s,
            compare_s=applied.compare_s,
            pause_s=time.perf_counter() - pause.began,
            loader_tensors=len(staging.request.manifest.tensors),
        )

    async def _place(self, coming: "Coming", version: Version, cache_policy: CachePolicy) -> Swap:
        """Commits a sharded transfer: staged, the pause is a copy; otherwise it has lasted since the transfer began.
        From here on there is nothing to abort."""
        self._coming = None
        held, self._pause = self._pause, None
        pause = held or await self._stand_still()
        in_place: Version | None = None
        try:
            placed = await asyncio.to_thread(functools.partial(self._shards.place, coming, staged=self._staged))
            in_place = version
        finally:
            self._decode.resume(pause, in_place, recompute=cache_policy == "recompute")
        return Swap(
            apply_s=placed.apply_s,
            compare_s=placed.compare_s,
            pause_s=time.perf_counter() - pause.began,
            loader_tensors=placed.loader_tensors,
            loader_bytes=placed.loader_bytes,
            staging_bytes=placed.staging_bytes,
            mode=mode_of(self._staged),
            loader_names=placed.loader_names,
        )

    async def abort_receive(self) -> None:
        staging, self._staging = self._staging, None
        if staging is not None:
            staging.close()
        coming, self._coming = self._coming, None
        if coming is not None:
            await asyncio.to_thread(coming.close)
        pause, self._pause = self._pause, None
        if pause is not None:
            self._decode.resume(pause, None, recompute=True)

    async def prepare_send(self, transfer_request: TransferRequest, served: str) -> bytes:
        await self.end_send()
        from millrace.weights.transfer.channels.rendezvous import nccl_id

        self._source = await asyncio.to_thread(self._shards.source, transfer_request, 0, served)
        return nccl_id(self._source.device.type == "cuda")

    async def send(self, transfer_request: TransferRequest) -> Dispatch:
        from services.rollout.weights.sharded import Going

        source, self._source = self._source, None
        if source is None:
            raise PublicationFailed("the copy was ended.")
        going = self._going = Going(transfer_request, 0, source)
        going.begin()
        await asyncio.to_thread(going.wait)
        if going.failure is not None or going.result is None:
            raise PublicationFailed(going.failure or "nothing was sent.")
        sums, times = going.result
        return Dispatch(tuple(sums.items()), times.pack_s, times.verify_s, going.slot_bytes)

    async def end_send(self) -> None:
        going, self._going, self._source = self._going, None, None
        if going is not None:
            await asyncio.to_thread(going.close)

    def _prepared(self) -> "Staging":
        if self._staging is None:
            raise PublicationFailed("the publication was aborted.", "prepare it again.")
        return self._staging

    def _load(self, tensors: Any) -> None:
        for name, tensor in tensors:
            self._stored[name].copy_(tensor)


def _settle(ended: "asyncio.Future[Sample | None]", sample: Sample | None) -> None:
    if not ended.done():
        ended.set_result(sample)


def _options(spec: JobSpec) -> Options:
    return checked_options(Options, spec.rollout.options_of("transformers"), "rollout.engine_options")


def _random_model(spec: JobSpec, options: Options) -> Any:
    """The job's model with weights of no meaning. Raises InvalidJob where it cannot be built here."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    trust, device = spec.model.trust_remote_code, options.device or ("cuda" if torch.cuda.is_available() else "cpu")
    try:
        config = AutoConfig.from_pretrained(spec.model.path, trust_remote_code=trust)
        others = set(getattr(config, "layer_types", None) or []) - {"full_attention", "sliding_attention"}
        if others:
            reason = f"this engine cannot run layers of kind {', '.join(others)}"
            raise refused("model.path", spec.model.path, reason, "use vLLM.")
        model = AutoModelForCausalLM.from_config(
            config,
            dtype=getattr(torch, spec.rollout.dtype),
            attn_implementation=options.attn_implementation,
            trust_remote_code=trust,
        )
        return _kept(model).to(device).eval()
    except (OSError, ValueError, KeyError, ImportError, RuntimeError) as error:
        what = f"model.path: {spec.model.path} cannot be built by transformers on {device}: {error}."
        raise InvalidJob(what, "give a Hugging Face model folder of an architecture that it knows.") from error


def _kept(model: Any) -> Any:
    """Some tensors are float32 in any model; from_config does not see to it."""
    import torch

    from millrace.weights.loader.stored import dtype_of

    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if dtype_of(model, name, "") == "float32":
            tensor.data = tensor.data.to(torch.float32)
    return model


def _stored(model: Any, spec: JobSpec) -> "dict[str, Tensor]":
    from millrace.weights.loader.stored import stored_tensors, views

    held: dict[str, Tensor] = {}
    for name, tensor in stored_tensors(model):
        if (found := views(model, name, tensor)) is None:
            what = f"model.path: {spec.model.path} stores {name} otherwise than transformers keeps it in memory."
            raise InvalidJob(what, "use vLLM.")
        held |= found
    return held
