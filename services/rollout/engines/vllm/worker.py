"""The part of a replica that runs inside each of vLLM's worker processes."""

from collections.abc import Callable
from typing import Any

from services.rollout.weights.in_worker.model import EngineModel
from services.rollout.weights.in_worker.receiver import WeightReceiver
from services.rollout.weights.worker_messages import Introduction, carry_out, decode_request, encode
from services.rollout.weights.worker_rpc import WorkerRpcServer


class WorkerExtension:
    """A base class that vLLM adds to its Worker (`worker_extension_cls`). It uses the Worker's `rank`, `model_config`
    and `get_model`. The prefix of its names keeps them apart from the Worker's."""

    rank: int
    model_config: Any
    get_model: Callable[[], Any]
    _millrace_receiver: WeightReceiver
    _millrace_server: WorkerRpcServer

    def millrace_connect(self, path: str) -> None:
        """Connects this worker to the replica, whose socket is at `path`."""
        model = EngineModel(self.rank, self.get_model, self.model_config.dtype)
        receiver = self._millrace_receiver = WeightReceiver(model)
        introduction = Introduction(self.rank)
        self._millrace_server = WorkerRpcServer(path, introduction, lambda request: carry_out(receiver, request))

    def millrace_call(self, request: bytes) -> bytes:
        """Carries out a request in the thread that generates."""
        return encode(carry_out(self._millrace_receiver, decode_request(request)))
