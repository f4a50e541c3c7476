"""The settings of TLS, which are environment variables that name files, and what the files hold."""

import json
import os
import ssl
from dataclasses import dataclass, fields
from enum import Enum, auto
from typing import Self

from millrace.errors import InvalidState

CERT, KEY, CA, CRL, NAME, REST = (
    f"MILLRACE_TLS_{part}" for part in ("CERT", "KEY", "CA", "CRL", "NAME", "REST_CLIENTS")
)
REQUIRED, OPTIONAL = "required", "optional"
Stamp = tuple[tuple[int, int, int], ...]
"""Identifies the contents of the files: of each its inode, size and time of modification."""


@dataclass(frozen=True)
class Settings:
    """Paths of PEM files; empty: not set."""

    cert: str
    """The certificate of this process, then its intermediates."""
    key: str
    ca: str
    """The certificates that sign those of others."""
    crl: str
    """Lists of revoked certificates."""
    name: str
    """The name that the certificates of all services hold; empty: each holds the address at which it is called."""
    rest_clients: str
    """Whether callers of REST need a certificate too: `required` or `optional`."""

    @classmethod
    def of_environment(cls) -> Self | None:
        """What MILLRACE_TLS_* say; None if no file is named. Raises InvalidState if one is missing."""
        found = {field.name: os.environ.get(f"MILLRACE_TLS_{field.name.upper()}", "") for field in fields(cls)}
        settings = cls(**found | {"rest_clients": found["rest_clients"] or OPTIONAL})
        if not (settings.cert or settings.key or settings.ca or settings.crl):
            return None
        if not settings.ca:
            raise InvalidState(f"{CA}: is not set, and other variables of TLS are.", _FILES)
        if bool(settings.cert) != bool(settings.key):
            missing = KEY if settings.cert else CERT
            raise InvalidState(f"{missing}: is not set: a certificate and its private key go together.", _FILES)
        if settings.rest_clients not in (REQUIRED, OPTIONAL):
            fix = f"set it to {REQUIRED} or {OPTIONAL}."
            raise InvalidState(f"{REST}: {json.dumps(settings.rest_clients)}: is no such choice.", fix)
        return settings

    def stamp(self) -> Stamp:
        """Raises InvalidState if a file cannot be read."""
        found = []
        for variable, path in self._named():
            try:
                status = os.stat(path)
            except OSError as error:
                raise _unreadable(variable, path, error) from error
            found.append((status.st_ino, status.st_size, status.st_mtime_ns))
        return tuple(found)

    def read(self) -> "Contents":
        """Raises InvalidState if a file cannot be read."""
        found = dict.fromkeys((CERT, KEY, CA, CRL), b"")
        for variable, path in self._named():
            try:
                with open(path, "rb") as file:
                    found[variable] = file.read()
            except OSError as error:
                raise _unreadable(variable, path, error) from error
        return Contents(*found.values())

    def context(self, use: "Use") -> ssl.SSLContext:
        """A context of Python's ssl with the files as they are now. Raises InvalidState if they do not fit
        together."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT if use is Use.CLIENT else ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        if use is not Use.CLIENT:
            context.verify_mode = ssl.CERT_OPTIONAL if use is Use.HTTP else ssl.CERT_REQUIRED
        try:
            variable, path = CA, self.ca
            context.load_verify_locations(cafile=path)
            if self.crl and use in (Use.CLIENT, Use.MEMBERS):
                variable, path = CRL, self.crl
                context.load_verify_locations(cafile=path)
                context.verify_flags |= ssl.VerifyFlags.VERIFY_CRL_CHECK_LEAF
            if self.cert:
                variable, path = CERT, self.cert
                context.load_cert_chain(self.cert, self.key, password=_no_password)
        except ssl.SSLError as error:
            what = f"{variable}: {json.dumps(path)}: cannot be used: {error.reason or error}."
            fix = f"give PEM files: a certificate in {CERT}, its private key without a password in {KEY}."
            raise InvalidState(what, fix) from error
        except OSError as error:
            raise _unreadable(variable, path, error) from error
        return context

    def _named(self) -> list[tuple[str, str]]:
        each = ((CERT, self.cert), (KEY, self.key), (CA, self.ca), (CRL, self.crl))
        return [(variable, path) for variable, path in each if path]


class Use(Enum):
    """What a context of Python's ssl is for. Servers of HTTP look up the certificate of each request themselves: a
    handshake that a list of revoked certificates ends would not show the caller why."""

    CLIENT = auto()
    MEMBERS = auto()
    """A server for members: callers need a certificate."""
    HTTP = auto()
    """A server of HTTP: callers may show a certificate."""
    HTTP_MEMBERS = auto()
    """A server of HTTP whose callers need one."""


@dataclass(frozen=True)
class Contents:
    """What the files hold; empty for a file that is not named."""

    cert: bytes
    key: bytes
    ca: bytes
    crl: bytes


_FILES = f"set {CERT}, {KEY} and {CA} to PEM files; a client may go without the first two."


def _no_password() -> str:
    """Without it OpenSSL would ask the terminal for the password of an encrypted key."""
    return ""


def _unreadable(variable: str, path: str, error: OSError) -> InvalidState:
    fix = "give a PEM file that exists and that this process may read."
    return InvalidState(f"{variable}: {json.dumps(path)}: {error.strerror or error}.", fix)
