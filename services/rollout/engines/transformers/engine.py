"""Hugging Face Transformers behind the engine protocol: small and portable, for machines where vLLM does not run.

One thread decodes, with continuous batching. The engine's only worker is the replica's own process: it receives weights
in threads during decoding and writes them between two tokens.
"""

import asyncio
import os
import secrets
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ConfigDict, Field

from millrace.engines import ENGINES, FIELD
from millrace.errors import InvalidState
from millrace.ids import Version
from millrace.spec import JobSpec
from millrace.spec.rollout import CachePolicy
from millrace.validation.mistakes import options as checked_options
from services.rollout.engine import Completion, EngineStats, Load, Response, Sampling, compute_threads, end_of_turn
from services.rollout.engines.endings import Endings
from services.rollout.engines.options import with_whole_paths
from services.rollout.engines.transformers.decode_thread import DecodeThread
from services.rollout.engines.versioned import VersionedEngine
from services.rollout.weights.worker_rpc import InProcessWorker

if TYPE_CHECKING:
    from services.rollout.engines.transformers.decoding import DecodeLoop, Pause
    from services.rollout.weights.in_worker.receiver import WeightReceiver


class Options(BaseModel):
    """`rollout.engine_options` for this engine."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    max_num_seqs: int = Field(32, ge=1, le=65_536)
    """Samples decoded at once."""
    device: str = ""
    """cpu, cuda, cuda:1; empty takes the first GPU if there is one."""
    attn_implementation: str = "sdpa"


class TransformersEngine(VersionedEngine):
    """A Hugging Face model in this process. See `Engine`."""

    name = "transformers"

    def __init__(self) -> None:
        super().__init__()
        self.release = ENGINES["transformers"].software.release
        self.device = ""
        self.world_size = 1
        self.dtype = ""
        self._model: Any = None
        self._receiver: WeightReceiver
        self._decode_loop: DecodeLoop
        self._paused: Pause | None = None
        self._recompute = False
        """The pause ends with requests in flight prefilled again."""
        self._thread = DecodeThread()

    async def start(self, spec: JobSpec) -> None:
        await asyncio.to_thread(self._build, spec)
        self._thread.start(self._decode_loop)

    def _build(self, spec: JobSpec) -> None:
        import torch
        from transformers import AutoTokenizer

        from services.rollout.engines.transformers.decode_batch import Routing
        from services.rollout.engines.transformers.decoding import DecodeLoop
        from services.rollout.engines.transformers.model import StoredModel, random_model
        from services.rollout.weights.in_worker.receiver import WeightReceiver

        options = _options(spec)
        self._model = random_model(spec, options.device, options.attn_implementation)
        trust = spec.model.trust_remote_code
        tokenizer = AutoTokenizer.from_pretrained(spec.model.path, trust_remote_code=trust)
        self._endings = Endings(
            tokenizer=tokenizer,
            end_of_turn=frozenset(end_of_turn(spec.model.path, tokenizer, trust_remote_code=trust)),
            context=spec.data.max_prompt_tokens + spec.rollout.max_response_tokens,
        )
        self._replays = spec.algorithm.router_replay
        routing = Routing(self._model) if self._replays else None
        self._decode_loop = DecodeLoop(self._model, self._endings, options.max_num_seqs, secrets.randbits(60), routing)
        self._receiver = WeightReceiver(StoredModel(self._model, spec))
        self._workers = InProcessWorker(self._receiver)
        device = self._model.device
        if device.type == "cpu" and "OMP_NUM_THREADS" not in os.environ:
            torch.set_num_threads(compute_threads())
        self.device = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
        self.dtype = spec.rollout.dtype
        self.capacity = options.max_num_seqs

    async def stop(self) -> None:
        await self._thread.stop()
        if self._model is not None:
            await asyncio.to_thread(self._receiver.close)
            self._model = None

    async def _generate(self, prompt_tokens: Sequence[int], sampling: Sampling, response: Response) -> Completion:
        completion = await self._thread.complete(prompt_tokens, sampling, response)
        if completion is None:
            raise InvalidState("the sample was aborted: no version is in place.", "the prompt is issued again.")
        return completion

    def load(self) -> Load:
        return Load(*self._thread.counts())

    def stats(self) -> EngineStats | None:
        """See `Engine`. The cache grows with the batch; what is limited is the number of its rows."""
        if not self._thread.started:
            return None
        running, waiting = self._decode_loop.counts()
        return EngineStats(running, waiting, running / self.capacity)

    async def finish_batch(self) -> None:
        """See `Engine`. The loop pauses for a moment: between two tokens."""
        pause = self._decode_loop.pause()
        try:
            await asyncio.to_thread(self._decode_loop.wait_paused, pause)
        finally:
            self._decode_loop.resume(pause)

    # What VersionedEngine asks of its subclasses.

    def _started(self) -> bool:
        return self._model is not None

    async def _pause(self, cache_policy: CachePolicy) -> None:
        if self._paused is None:
            pause = self._decode_loop.pause()
            try:
                await asyncio.to_thread(self._decode_loop.wait_paused, pause)
            except BaseException:
                self._decode_loop.resume(pause)
                raise
            self._paused = pause
        self._recompute = cache_policy == "recompute"

    async def _resume(self) -> None:
        pause, self._paused = self._paused, None
        if pause is not None:
            self._decode_loop.resume(pause, recompute=self._recompute)

    async def _label(self, version: Version, cache_key: str) -> None:
        self._decode_loop.set_version(version)

    async def _end_requests(self) -> None:
        self._decode_loop.drop_version()


def _options(spec: JobSpec) -> Options:
    return with_whole_paths(spec, "transformers", lambda given: checked_options(Options, given, FIELD))
