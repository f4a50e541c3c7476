"""HTTP/2 by hand: calls that gRPC's own clients refuse to make."""

import asyncio
import struct

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
HEADERS, SETTINGS, RST_STREAM, GOAWAY = 1, 4, 3, 7
END_HEADERS = 4


def frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    return struct.pack(">I", len(payload))[1:] + bytes([kind, flags]) + struct.pack(">I", stream) + payload


def header(name: bytes, value: bytes) -> bytes:
    """A literal header field that is not indexed (RFC 7541, 6.2.2), both shorter than 127 bytes."""
    return b"\0" + bytes([len(name)]) + name + bytes([len(value)]) + value


async def call(port: int, method: bytes, authorization: bytes) -> set[int]:
    """Begins a call whose token may be any bytes; the kinds of the frames that come back until the call has ended."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    fields = {b":method": b"POST", b":scheme": b"http", b":path": method, b":authority": b"x", b"te": b"trailers"}
    fields |= {b"content-type": b"application/grpc", b"authorization": authorization}
    block = b"".join(header(name, value) for name, value in fields.items())
    writer.write(PREFACE + frame(SETTINGS, 0, 0) + frame(HEADERS, END_HEADERS, 1, block))
    kinds: set[int] = set()
    try:
        async with asyncio.timeout(60):
            while not kinds & {HEADERS, RST_STREAM, GOAWAY}:
                head = await reader.readexactly(9)
                await reader.readexactly(int.from_bytes(head[:3]))
                kinds.add(head[3])
    finally:
        writer.close()
    return kinds
