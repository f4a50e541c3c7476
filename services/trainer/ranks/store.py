"""A client of the store that rank 0 serves: commands, their answers and heartbeats are kept there."""

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

from torch.distributed import DistStoreError, TCPStore


class Store:
    """A connection for one thread: a client that waits blocks every other thread that uses it.

    Every method raises DistError where rank 0 cannot be reached.
    """

    def __init__(self, host: str, port: int, timeout_s: float) -> None:
        limit = timedelta(seconds=timeout_s)
        client: Any = TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=limit)
        self._client = client  # Any: torch's stubs do not know that values may be bytes

    def set(self, key: str, value: bytes) -> None:
        self._client.set(key, value)

    def get(self, key: str) -> bytes:
        """The value of a key that exists."""
        value: bytes = self._client.get(key)
        return value

    def has(self, key: str) -> bool:
        return bool(self._client.check([key]))

    def delete(self, key: str) -> None:
        self._client.delete_key(key)

    def wait(self, keys: Sequence[str], timeout_s: float) -> bool:
        """Waits until all keys exist. Returns False where one still does not after `timeout_s` seconds."""
        try:
            self._client.wait(list(keys), timedelta(seconds=timeout_s))
        except DistStoreError:
            return False
        return True

    def take(self, keys: Sequence[str]) -> dict[str, bytes]:
        """Removes those of the keys that exist and returns their values."""
        values = {key: self.get(key) for key in keys if self.has(key)}
        for key in values:
            self.delete(key)
        return values
