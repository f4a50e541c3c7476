"""What a rank answers to a command, as bytes: a reply, a MillraceError, or an exception that nobody expected."""

import json
from dataclasses import dataclass

from google.protobuf.any_pb2 import Any as Packed
from google.protobuf.message import Message
from google.protobuf.wrappers_pb2 import BytesValue

from millrace import errors
from millrace.errors import MillraceError, PublicationFailed

KINDS = {
    name: kind for name, kind in vars(errors).items() if isinstance(kind, type) and issubclass(kind, MillraceError)
}


@dataclass(frozen=True)
class Crash:
    """An exception that is no MillraceError: the rank cannot continue."""

    text: str


Answer = Packed | MillraceError | Crash
"""A reply is still packed: who asked knows its type."""


def encode_answer(answer: Message | MillraceError | Crash) -> bytes:
    packed = Packed()
    match answer:
        case MillraceError():
            packed.Pack(BytesValue(value=encode_error(answer)))
        case Crash(text):
            packed.Pack(BytesValue(value=json.dumps({"crash": text}).encode()))
        case _:
            packed.Pack(answer)
    return packed.SerializeToString()


def decode_answer(data: bytes) -> Answer:
    """The answer that `encode_answer` was given."""
    packed, failure = Packed(), BytesValue()
    packed.ParseFromString(data)
    if not packed.Unpack(failure):
        return packed
    fields = json.loads(failure.value)
    return Crash(fields["crash"]) if "crash" in fields else decode_error(failure.value)


def encode_error(error: MillraceError) -> bytes:
    """The error as JSON. One of a class that millrace.errors does not have is encoded as its nearest class there."""
    kind = next(kind.__name__ for kind in type(error).__mro__ if KINDS.get(kind.__name__) is kind)
    culprits = list(error.culprits) if isinstance(error, PublicationFailed) else []
    return json.dumps({"kind": kind, "what": error.what, "fix": error.fix, "culprits": culprits}).encode()


def decode_error(data: bytes) -> MillraceError:
    """The error that `encode_error` was given."""
    fields = json.loads(data)
    kind = KINDS[fields["kind"]]
    if kind is PublicationFailed:
        return PublicationFailed(fields["what"], fields["fix"], tuple(fields["culprits"]))
    return kind(fields["what"], fields["fix"])
