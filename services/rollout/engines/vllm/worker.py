"""The part of a replica that runs inside each of vLLM's worker processes."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from millrace.weights.folder_tensors import TOWER
from services.rollout.engines.adapter import AdapterShape
from services.rollout.engines.vllm.adapter import AdapterSlot
from services.rollout.weights.in_worker.model import EngineModel, without_adapters
from services.rollout.weights.in_worker.receiver import WeightReceiver
from services.rollout.weights.worker_messages import Introduction, carry_out, decode_request, encode
from services.rollout.weights.worker_rpc import WorkerRpcServer


class WorkerExtension:
    """A base class that vLLM adds to its Worker (`worker_extension_cls`). It uses the Worker's `rank`, which counts the
    workers of one data-parallel rank, `parallel_config`, `model_config`, `model_runner` and `get_model`. The prefix of
    its names keeps them apart from the Worker's."""

    rank: int
    parallel_config: Any
    model_config: Any
    model_runner: Any
    get_model: Callable[[], Any]
    _millrace_receiver: WeightReceiver
    _millrace_server: WorkerRpcServer

    def millrace_connect(self, place: str, adapter: str, with_tower: bool) -> list[str]:
        """Connects this worker to the replica, which listens at `place`, and makes a place for an adapter of the shape
        `adapter` (`AdapterShape.encode`; empty for none). Answers the names of the layers that have no place here.
        `with_tower`: as in `EngineModel`."""
        rank = receiver_rank(self.rank, self.parallel_config)
        if self.parallel_config.data_parallel_size > 1:
            # Releases up to 0.26 give all data-parallel ranks one seed, whose samples would be drawn alike.
            torch.manual_seed(self.model_config.seed + self.parallel_config.data_parallel_rank)
        model = self._millrace_model(rank, AdapterShape.decode(adapter) if adapter else None, with_tower)
        receiver = self._millrace_receiver = WeightReceiver(model)
        introduction = Introduction(rank)
        self._millrace_server = WorkerRpcServer(place, introduction, lambda request: carry_out(receiver, request))
        return model.adapter.unplaced if isinstance(model.adapter, AdapterSlot) else []

    def _millrace_model(self, rank: int, shape: AdapterShape | None, with_tower: bool) -> EngineModel:
        if shape is None:
            return EngineModel(rank, self.get_model, self.model_config.dtype, with_tower=with_tower)
        from vllm.lora.layers import BaseLayerWithLoRA

        model = EngineModel(
            rank, lambda: without_adapters(self.get_model(), BaseLayerWithLoRA), self.model_config.dtype
        )
        model.adapter = AdapterSlot(self.model_runner.lora_manager, shape, self.model_config.dtype)
        return model

    def millrace_load_tower(self, folder: str) -> None:
        """Reads the tower of images of the model `folder` into the model. Raises FileNotFoundError if the folder lacks
        a tensor of it."""
        from vllm.model_executor.model_loader.weight_utils import safetensors_weights_iterator

        model = self.get_model()
        files = sorted(str(file) for file in Path(folder).glob("*.safetensors"))
        stored = safetensors_weights_iterator(files, use_tqdm_on_load=False)
        loaded = model.load_weights((name, tensor) for name, tensor in stored if TOWER in name)
        wanted = {name for name, _ in model.named_parameters() if TOWER in name}
        if missing := sorted(wanted - set(loaded)):
            raise FileNotFoundError(f"{folder} lacks {len(missing)} tensors of its tower, the first {missing[0]}")

    def millrace_call(self, request: bytes) -> bytes:
        """Carries out a request in the thread that generates."""
        return encode(carry_out(self._millrace_receiver, decode_request(request)))


def receiver_rank(rank: int, parallel: Any) -> int:
    """The number of a worker among those of all data-parallel ranks, in the order in which the replica asks them.
    `rank`: its number within its data-parallel rank; `parallel`: vLLM's ParallelConfig there, whose `world_size` counts
    those alone."""
    return int(parallel.data_parallel_rank * parallel.world_size + rank)


class ScoringExtension:
    """A base class that vLLM adds to the Worker of an engine that scores tokens for a pool."""

    get_model: Callable[[], Any]

    def millrace_score(self, temperature: float, tokens: int | None) -> None:
        """From now on log-probabilities are those at `temperature`, over the first `tokens` tokens of the vocabulary
        (None: over all). vLLM computes those of a prompt without either."""
        model = self.get_model()
        compute: Callable[..., Tensor | None] = model.compute_logits

        def scaled(*arguments: Any, **named: Any) -> Tensor | None:
            logits_nv = compute(*arguments, **named)
            if logits_nv is None:  # a rank without the whole vocabulary
                return None
            scaled_nv = logits_nv.float() / temperature
            if tokens is not None:
                scaled_nv[:, tokens:] = -float("inf")
            return scaled_nv

        model.compute_logits = scaled
