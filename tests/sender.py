"""The sending side of a publication, as small as it can be: rank 0 of the communicator in a thread."""

import threading
from collections.abc import Mapping

import torch

from millrace.contracts.v1 import weights_pb2
from millrace.errors import PublicationFailed
from millrace.ids import Version
from millrace.weights.plans.manifest import Content, Manifest, TensorInfo
from millrace.weights.transfer.channels.gloo import GlooChannel
from millrace.weights.transfer.checksum import checksum
from millrace.weights.transfer.store import serve_store
from services.rollout.weights.transfer_request import TransferRequest

TIMEOUT_S = 30.0


def export(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """The model's tensors by Hugging Face name; a tied output layer is left out."""
    tensors = {name: p.detach().contiguous() for name, p in model.named_parameters()}
    return {
        name: t for name, t in tensors.items() if not (name == "lm_head.weight" and model.config.tie_word_embeddings)
    }


class Sender:
    """Publishes `tensors` as one version to `receivers` workers. `hold_after` pauses between two tensors until
    `release()`, to show what happens meanwhile."""

    def __init__(
        self,
        tensors: Mapping[str, torch.Tensor],
        *,
        version: int,
        job: str = "job-test",
        epoch: int = 1,
        attempt: int = 0,
        receivers: int = 1,
        hold_after: int | None = None,
        content: Content = Content.MODEL,
    ) -> None:
        self.tensors = tensors
        self.manifest = Manifest(
            tuple(TensorInfo(n, tuple(t.shape), str(t.dtype).removeprefix("torch.")) for n, t in tensors.items()),
            content,
        )
        self.checksums = tuple(checksum(t) for t in tensors.values())
        self.world_size = receivers + 1
        self._store, self.port = serve_store("127.0.0.1", self.world_size, TIMEOUT_S)
        self._gate = threading.Event()
        self._hold_after = hold_after
        self.request = TransferRequest(
            key=f"{job}/{version}/{epoch}/{attempt}",
            version=Version(version),
            manifest=self.manifest,
            host="127.0.0.1",
            port=self.port,
            world_size=self.world_size,
            first_rank=1,
            timeout_s=TIMEOUT_S,
            path=weights_pb2.PATH_GATHER_BROADCAST,
        )
        self.failure: PublicationFailed | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def release(self) -> None:
        self._gate.set()

    def join(self) -> None:
        """Waits until everything is out; raises what stopped it."""
        self.release()
        self._thread.join(TIMEOUT_S)
        assert not self._thread.is_alive()
        if self.failure is not None:
            raise self.failure

    def _run(self) -> None:
        try:
            self._send()
        except PublicationFailed as error:
            self.failure = error

    def _send(self) -> None:
        channel = GlooChannel.join(
            "127.0.0.1",
            self.port,
            key=self.request.key,
            rank=0,
            world_size=self.world_size,
            timeout_s=TIMEOUT_S,
            store=self._store,
        )
        for i, tensor in enumerate(self.tensors.values()):
            if i == self._hold_after:
                self._gate.wait(TIMEOUT_S)
            channel.broadcast(tensor)
