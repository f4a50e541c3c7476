"""Remote methods as typed values: a call takes the method's request and answers its response, without a cast.

`millrace/contracts/methods.py`, made by `make proto`, holds one value for each method of the contracts.
"""

from typing import Generic, TypeVar

from google.protobuf.message import Message

Request = TypeVar("Request", bound=Message)
Response = TypeVar("Response", bound=Message)


PACKAGE = "millrace.v1"


class _Method(Generic[Request, Response]):
    """The class and the attribute that hold a method name its service and itself: `FleetRpc.Register`."""

    def __init__(self, request: type[Request], response: type[Response]) -> None:
        self.request, self.response = request, response

    def __set_name__(self, owner: type, name: str) -> None:
        self.service, self.name = f"{PACKAGE}.{owner.__name__.removesuffix('Rpc')}", name

    @property
    def key(self) -> str:
        """Name of the method in the table of deadlines and in messages, as `Fleet/Register`."""
        return f"{self.service.rpartition('.')[2]}/{self.name}"

    @property
    def path(self) -> str:
        """Name of the method on the wire, as `/millrace.v1.Fleet/Register`."""
        return f"/{self.service}/{self.name}"


class Unary(_Method[Request, Response]):
    """A method with one request and one response."""


class Streaming(_Method[Request, Response]):
    """A method with one request and a stream of responses."""
