"""The manifest: what a version consists of, and its tensors in order, under their Hugging Face names. Torch-free."""

import hashlib
import math
from dataclasses import dataclass
from enum import Enum
from functools import cached_property, lru_cache

from millrace.contracts.v1 import weights_pb2
from millrace.errors import InvalidState

ITEM_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2, "float8_e4m3fn": 1, "int64": 8, "int32": 4, "uint8": 1}


@dataclass(frozen=True)
class TensorInfo:
    """One tensor: its Hugging Face name, its shape, and its dtype by torch's name without "torch."."""

    name: str
    shape: tuple[int, ...]
    dtype: str

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]


class Content(Enum):
    """What a version consists of. The values are those of the protocol buffers."""

    MODEL = weights_pb2.CONTENT_MODEL
    """The whole model as it is trained; an adapter is merged with its weights."""
    BASE = weights_pb2.CONTENT_BASE
    """The model that an adapter belongs to, without the adapter. It never changes, and is not served alone."""
    ADAPTER = weights_pb2.CONTENT_ADAPTER
    """The adapter alone, for replicas that hold the base. B is multiplied by the adapter's scale."""

    @classmethod
    def of(cls, value: "weights_pb2.Content") -> "Content":
        """The content that a message names. Raises InvalidState for one that this release does not know."""
        try:
            return cls(value or weights_pb2.CONTENT_MODEL)
        except ValueError:
            what = f"this release publishes no content {value}."
            raise InvalidState(what, "run the same release of millrace everywhere.") from None


@dataclass(frozen=True)
class Manifest:
    """The tensors of a version, in order. The same hash means the same tensors of the same content."""

    tensors: tuple[TensorInfo, ...]
    content: Content = Content.MODEL

    @cached_property
    def hash(self) -> bytes:
        digest = hashlib.sha256()
        if self.content is not Content.MODEL:
            digest.update(self.content.name.encode())
        for tensor in self.tensors:
            digest.update(repr((tensor.name, tensor.shape, tensor.dtype)).encode())
        return digest.digest()

    @property
    def bytes(self) -> int:
        return sum(tensor.bytes for tensor in self.tensors)

    def to_proto(self) -> weights_pb2.Manifest:
        proto = weights_pb2.Manifest()
        proto.CopyFrom(self._proto)
        return proto

    @cached_property
    def _proto(self) -> weights_pb2.Manifest:
        """Cached: for a model with experts, making it takes 50 ms and copying it 2 ms."""
        tensors = [weights_pb2.TensorSpec(name=t.name, shape=t.shape, dtype=t.dtype) for t in self.tensors]
        return weights_pb2.Manifest(tensors=tensors, hash=self.hash, content=self.content.value)

    @classmethod
    def from_proto(cls, proto: weights_pb2.Manifest) -> "Manifest":
        """Raises ValueError if the hash is not that of the tensors: another release computes it differently.
        Raises InvalidState for an unknown content."""
        return _read(proto.SerializeToString(deterministic=True))


@lru_cache(maxsize=4)
def _read(data: bytes) -> Manifest:
    """Cached: the same manifest comes with every version of a job, and for a model with experts this takes 0.1 s."""
    proto = weights_pb2.Manifest.FromString(data)
    for tensor in proto.tensors:
        if tensor.dtype not in ITEM_BYTES or any(size < 0 for size in tensor.shape):
            raise ValueError(f"the manifest has a tensor of dtype {tensor.dtype!r} and shape {list(tensor.shape)}")
    tensors = tuple(TensorInfo(t.name, tuple(t.shape), t.dtype) for t in proto.tensors)
    manifest = Manifest(tensors, Content.of(proto.content))
    if manifest.hash != proto.hash:
        raise ValueError(f"the manifest's hash is {proto.hash.hex()[:12]}, its tensors give {manifest.hash.hex()[:12]}")
    return manifest
