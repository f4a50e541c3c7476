"""Messages that no service sends, and what a service answers to them."""

import asyncio
import copy
import random
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import grpc
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import DecodeError, Message

from millrace.contracts import methods
from millrace.contracts.method import Streaming, Unary
from millrace.wire.status import CODES

Method = Unary[Any, Any] | Streaming[Any, Any]
AT_ONCE = 8
TYPED = {code.name for code in CODES.values()} - {"INTERNAL"}
"""Statuses of errors that a service means; INTERNAL is a bug."""
NUMBERS = (0, 1, -1, 2**31 - 1, 2**31, 2**32 - 1, -(2**63), 2**63 - 1, 2**64 - 1)
REALS = (0.0, -1.0, 1e-320, 1e308, float("inf"), float("nan"))
TEXTS = ("", "/", "../x", "a:b", "\0", "\u2028", "\U0001f600" * 50, "x" * 5000, "[" * 5000, "1" * 5000, "%s{}")
BYTES = (b"", b"\0", b"\xff" * 33, b"x" * 5000)


def methods_of(service: str) -> list[Method]:
    """Every method of a service, such as Trainer."""
    table = getattr(methods, f"{service}Rpc")
    return [value for value in vars(table).values() if isinstance(value, Unary | Streaming)]


def messages(method: Method, valid: Sequence[Message], seed: int) -> Iterator[bytes]:
    """Without end: random bytes, valid messages with a few bits or the end changed, messages of odd values."""
    draw = random.Random(f"{method.path} {seed}")
    while True:
        yield draw.randbytes(draw.choice((0, 1, 7, 60, 3000)))
        base = bytearray((draw.choice(valid) if valid else method.request()).SerializeToString())
        for _ in range(draw.randint(1, 3)):
            if base:
                base[draw.randrange(len(base))] ^= 1 << draw.randrange(8)
        yield bytes(base)
        yield bytes(base[: draw.randrange(len(base) + 1)])
        odd = copy.deepcopy(draw.choice(valid)) if valid and draw.random() < 0.7 else method.request()
        _fill(odd, draw, 0 if valid else 1.0)
        yield odd.SerializeToString()


def _fill(message: Message, draw: random.Random, share: float) -> None:
    """Gives fields odd values: one of them, or each with the probability `share`."""
    fields = list(message.DESCRIPTOR.fields)
    chosen = [field for field in fields if draw.random() < share] or (fields and [draw.choice(fields)])
    for field in chosen:
        if field.message_type is not None:
            whole = getattr(message, field.name)
            if not hasattr(whole, "DESCRIPTOR"):
                if field.message_type.GetOptions().map_entry:
                    continue
                whole = whole.add()
            _fill(whole, draw, share)
        elif field.is_repeated:
            getattr(message, field.name).extend(_odd(field, draw) for _ in range(draw.randint(0, 3)))
        else:
            setattr(message, field.name, _odd(field, draw))


def _odd(field: FieldDescriptor, draw: random.Random) -> Any:
    kinds = FieldDescriptor
    match field.type:
        case kinds.TYPE_STRING:
            return draw.choice(TEXTS)
        case kinds.TYPE_BYTES:
            return draw.choice(BYTES)
        case kinds.TYPE_DOUBLE:
            return draw.choice(REALS)
        case kinds.TYPE_BOOL:
            return draw.random() < 0.5
        case kinds.TYPE_ENUM:
            return draw.choice((0, 1, 2, 99))
    low = 0 if field.type in (kinds.TYPE_UINT32, kinds.TYPE_UINT64, kinds.TYPE_FIXED64) else None
    bits = 32 if field.type in (kinds.TYPE_UINT32, kinds.TYPE_INT32) else 64
    least, most = (0, 2**bits - 1) if low == 0 else (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1)
    return draw.choice([number for number in NUMBERS if least <= number <= most])


async def fuzz(
    address: str,
    tried: Sequence[Method],
    valid: Mapping[str, Sequence[Message]],
    *,
    each: int,
    seed: int = 0,
    harmless: Callable[[Message], bool] = lambda _: True,
) -> Counter[str]:
    """Sends `each` messages to each method. Returns how many calls ended with which status; a status that no service
    means is an error. `valid`: messages by name of the method that would be taken. Messages that can be read are sent
    only if they are `harmless`."""
    found: Counter[str] = Counter()
    async with grpc.aio.insecure_channel(address) as channel:
        for method in tried:
            drawn = messages(method, valid.get(method.name, ()), seed)
            chosen = [data for _, data in zip(range(each), drawn, strict=False) if _may_be_sent(method, data, harmless)]
            for begin in range(0, len(chosen), AT_ONCE):
                calls = (_ended(channel, method, data) for data in chosen[begin : begin + AT_ONCE])
                found.update(await asyncio.gather(*calls))
    return found


def _may_be_sent(method: Method, data: bytes, harmless: Callable[[Message], bool]) -> bool:
    try:
        return harmless(method.request.FromString(data))
    except DecodeError:
        return True


async def _ended(channel: grpc.aio.Channel, method: Method, data: bytes) -> str:
    """The status of one call. A call that waits, for work say, is not waited for."""
    try:
        if isinstance(method, Streaming):
            async for _ in channel.unary_stream(method.path)(data, timeout=5.0):
                pass
        else:
            await channel.unary_unary(method.path)(data, timeout=5.0)
    except grpc.aio.AioRpcError as error:
        name = str(error.code().name)
        assert name in TYPED | {"DEADLINE_EXCEEDED"}, f"{method.path} {data[:200]!r}: {name}: {error.details()}"
        return name
    return "OK"
