"""How a replica talks with the scheduler processes of its SGLang: frames of JSON on a Unix socket of its own.

SGLang's own remote call answers one rank's success and no data. Here every rank is asked and answers.
"""

import base64
import json
import struct
from typing import Any

HEADER = struct.Struct("!I")
MARK = "millrace_version"
"""Key under which SGLang hands our marks back, one for each token."""
SOCKET = "MILLRACE_SGLANG_SOCKET"
"""Environment variable with the socket's path."""


def encode(message: dict[str, Any]) -> bytes:
    """A frame: its length, then JSON; bytes as base64 under `bytes`."""
    body = json.dumps(message, default=_plain, separators=(",", ":")).encode()
    return HEADER.pack(len(body)) + body


def decode(body: bytes) -> dict[str, Any]:
    message: dict[str, Any] = json.loads(body, object_hook=_whole)
    return message


def _plain(value: Any) -> Any:
    if isinstance(value, bytes | bytearray | memoryview):
        return {"bytes": base64.b64encode(value).decode()}
    return int(value)


def _whole(found: dict[str, Any]) -> Any:
    return base64.b64decode(found["bytes"]) if found.keys() == {"bytes"} else found
