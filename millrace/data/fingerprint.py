"""Tells whether data files have the content that they had before, without reading all of large ones."""

import hashlib
import os
from collections.abc import Sequence

BLOCK = 1 << 16
BLOCKS = 16
"""Blocks that are read of a file, at even distances, from its first to its last byte."""


def fingerprint(paths: Sequence[str]) -> str:
    """The same for the same content, whatever the files' names and times are; 32 hexadecimal digits. It covers their
    sizes, all of a file up to 1 MiB, and 16 blocks of a larger one. Raises OSError."""
    digest = hashlib.blake2b(digest_size=16)
    for path in paths:
        with open(path, "rb") as file:
            size = file.seek(0, os.SEEK_END)
            digest.update(size.to_bytes(8, "little"))
            last = max(0, size - BLOCK)
            for start in sorted({last * block // (BLOCKS - 1) for block in range(BLOCKS)}):
                file.seek(start)
                digest.update(file.read(BLOCK))
    return digest.hexdigest()
