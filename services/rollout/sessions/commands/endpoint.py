"""What the sessions need of the server that answers for them."""

import asyncio
import socket
from typing import Protocol


class Endpoint(Protocol):
    """The server of the sessions."""

    url: str
    """The endpoint's address, `http://host:port`."""

    async def serve_also(self, listener: socket.socket) -> asyncio.Server:
        """Answers requests at another listening socket too, until the server that is returned is closed."""
