"""Remote methods as typed values: a call takes the method's request and answers its response, without a cast.

`millrace/contracts/methods.py`, made by `make proto`, holds one value for each method of the contracts.
"""

from dataclasses import dataclass
from typing import Generic, TypeVar

from google.protobuf.message import Message

Request = TypeVar("Request", bound=Message)
Response = TypeVar("Response", bound=Message)


@dataclass(frozen=True)
class _Method(Generic[Request, Response]):
    service: str
    """Full name of the service, as `millrace.v1.Fleet`."""
    name: str
    request: type[Request]
    response: type[Response]

    @property
    def key(self) -> str:
        """Name of the method in the table of deadlines and in messages, as `Fleet/Register`."""
        return f"{self.service.rpartition('.')[2]}/{self.name}"

    @property
    def path(self) -> str:
        """Name of the method on the wire, as `/millrace.v1.Fleet/Register`."""
        return f"/{self.service}/{self.name}"


@dataclass(frozen=True)
class Unary(_Method[Request, Response]):
    """A method with one request and one response."""


@dataclass(frozen=True)
class Streaming(_Method[Request, Response]):
    """A method with one request and a stream of responses."""
