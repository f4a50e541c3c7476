"""The identity of this process: its certificate and those it trusts, for gRPC and for HTTP.

The files are looked at once a second at most, and read again when they have changed: connections made from then on use
them. Files that do not fit together, as in the middle of a renewal, are left aside until they do.
"""

import functools
import os
import ssl
import threading
import time
from typing import Any
from urllib.parse import urlsplit

import structlog

from millrace.errors import InvalidState
from millrace.wire.tls.callers import Callers
from millrace.wire.tls.files import CERT, REQUIRED, Contents, Settings, Use

log = structlog.get_logger(__name__)
LOOK_EVERY_S = 1.0


class Identity:
    """Raises InvalidState if the files cannot be used."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self._lock = threading.Lock()
        self._looked = time.monotonic()
        self._stamp = settings.stamp()
        self.number = 1
        """Grows when other files are in use."""
        self.contents: Contents
        self._take(settings.read())

    def _take(self, contents: Contents) -> None:
        self._contexts = {use: self.settings.context(use) for use in Use if self.settings.cert or use is Use.CLIENT}
        self.callers = Callers(contents.ca, contents.crl)
        self.contents = contents

    def refresh(self) -> "Identity":
        """This identity, with the files as they are now."""
        with self._lock:
            if time.monotonic() - self._looked < LOOK_EVERY_S:
                return self
            self._looked = time.monotonic()
            try:
                if (stamp := self.settings.stamp()) == self._stamp:
                    return self
                self._take(self.settings.read())
            except InvalidState as error:
                log.warning(
                    "the files of TLS have changed and cannot be used; those from before hold", error=str(error)
                )
                return self
            self._stamp = stamp
            self.number += 1
            log.info("the files of TLS have changed and are in use")
        return self

    def context(self, use: Use) -> ssl.SSLContext:
        """The context of Python's ssl for the next connection. Raises InvalidState for a server without certificate."""
        if use not in self.refresh()._contexts:
            what = f"{CERT}: is not set: a service needs a certificate of its own."
            raise InvalidState(what, f"set {CERT} and MILLRACE_TLS_KEY, or unset MILLRACE_TLS_CA.")
        return self._contexts[use]

    def lasting_context(self, use: Use) -> ssl.SSLContext:
        """A context that makes each connection with the files as they are then. Raises as `context`."""
        self.context(use)
        return _Current(self, use)

    # gRPC.

    def server_credentials(self) -> Any:
        """Credentials of a gRPC server: callers need a certificate that MILLRACE_TLS_CA signed."""
        import grpc

        self.context(Use.MEMBERS)
        given = self.number

        def configuration() -> Any:
            held = self.contents
            return grpc.ssl_server_certificate_configuration([(held.key, held.cert)], root_certificates=held.ca)

        def fetch() -> Any:
            nonlocal given
            if self.refresh().number == given:
                return None
            given = self.number
            return configuration()

        return grpc.dynamic_ssl_server_credentials(configuration(), fetch, require_client_authentication=True)

    def channel_credentials(self) -> Any:
        """Credentials of a gRPC channel, with the files as they are now."""
        import grpc

        held = self.refresh().contents
        return grpc.ssl_channel_credentials(held.ca, held.key or None, held.cert or None)

    def channel_options(self) -> list[tuple[str, Any]]:
        return [("grpc.ssl_target_name_override", self.settings.name)] if self.settings.name else []

    @property
    def rest_clients_required(self) -> bool:
        return self.settings.rest_clients == REQUIRED


class _Current(ssl.SSLContext):
    """See `Identity.lasting_context`."""

    _identity: Identity
    _use: Use

    def __new__(cls, identity: Identity, use: Use) -> "_Current":
        return super().__new__(cls, ssl.PROTOCOL_TLS_CLIENT if use is Use.CLIENT else ssl.PROTOCOL_TLS_SERVER)

    def __init__(self, identity: Identity, use: Use) -> None:
        self._identity, self._use = identity, use

    def wrap_socket(self, *arguments: Any, **named: Any) -> ssl.SSLSocket:
        return self._identity.context(self._use).wrap_socket(*arguments, **self._renamed(named))

    def wrap_bio(self, *arguments: Any, **named: Any) -> ssl.SSLObject:
        return self._identity.context(self._use).wrap_bio(*arguments, **self._renamed(named))

    def _renamed(self, named: dict[str, Any]) -> dict[str, Any]:
        name = self._identity.settings.name
        return named | {"server_hostname": name} if name and named.get("server_hostname") else named


def identity() -> Identity | None:
    """The identity that MILLRACE_TLS_* name; None without them. Raises InvalidState if it cannot be used."""
    settings = Settings.of_environment()
    return None if settings is None else _identity(settings)


@functools.lru_cache(maxsize=32)
def _identity(settings: Settings) -> Identity:
    return Identity(settings)


def scheme() -> str:
    """The scheme of the URLs of this deployment's HTTP servers."""
    return "http" if identity() is None else "https"


def server_context(use: Use = Use.HTTP) -> ssl.SSLContext | None:
    """The context of a server; None if this process speaks plaintext. Raises InvalidState without a certificate."""
    found = identity()
    return None if found is None else found.lasting_context(use)


def verifying(url: str) -> ssl.SSLContext:
    """What an HTTP client of this deployment's server at `url` takes as `verify`."""
    found = identity()
    return trusted_by_host(url) if found is None else found.lasting_context(Use.CLIENT)


def trusted_by_host(url: str) -> ssl.SSLContext:
    """What an HTTP client of a place outside takes as `verify`: the authorities that this host trusts. To read these
    takes 30 ms of a core; a client of http:// trusts none."""
    if urlsplit(url).scheme != "https":
        return ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    return _authorities(os.environ.get("SSL_CERT_FILE"), os.environ.get("SSL_CERT_DIR"))


@functools.lru_cache(maxsize=4)
def _authorities(file: str | None, folder: str | None) -> ssl.SSLContext:
    """A context that trusts the authorities of the file; without one those of the folder, without both certifi's."""
    if file or folder:
        return ssl.create_default_context(cafile=file or None, capath=None if file else folder)
    import certifi

    return ssl.create_default_context(cafile=certifi.where())
