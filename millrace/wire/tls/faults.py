"""Why two sides do not agree on a connection: gRPC says only that there is none.

`diagnose` makes a connection of its own, with Python's ssl, whose errors have numbers.
"""

import datetime
import socket
import ssl
from enum import StrEnum

from millrace.errors import Untrusted
from millrace.wire.tls.callers import RENEW, subject_of
from millrace.wire.tls.files import CA, CERT, CRL, KEY, NAME, Use
from millrace.wire.tls.own import Identity, identity

CONNECT_S = 1.0
"""Limit of the time to connect, and of each wait for an answer."""


class TlsFault(StrEnum):
    """What is wrong with a connection."""

    PLAINTEXT = "plaintext"
    """The other side expects TLS, and this process has none."""
    NO_TLS = "no_tls"
    """This process speaks TLS, and the other side does not."""
    WRONG_CA = "wrong_ca"
    EXPIRED = "expired"
    NOT_YET_VALID = "not_yet_valid"
    REVOKED = "revoked"
    OLD_CRL = "old_crl"
    """There is no list of revoked certificates of the issuer, or it was to be renewed."""
    WRONG_NAME = "wrong_name"
    NO_CERTIFICATE = "no_certificate"
    """The other side asks for a certificate, and this process shows none."""
    REFUSED = "refused"
    """The other side refuses the certificate of this process for a reason that only its log has."""


OF_VERIFICATION = {
    **dict.fromkeys((2, 18, 19, 20, 21), TlsFault.WRONG_CA),
    9: TlsFault.NOT_YET_VALID,
    10: TlsFault.EXPIRED,
    23: TlsFault.REVOKED,
    **dict.fromkeys((3, 11, 12), TlsFault.OLD_CRL),
    **dict.fromkeys((62, 64), TlsFault.WRONG_NAME),
}
"""The fault for each number of OpenSSL's X509_V_ERR_…, about the certificate of the other side."""
OF_ALERT = {
    "TLSV13_ALERT_CERTIFICATE_REQUIRED": TlsFault.NO_CERTIFICATE,
    "TLSV1_ALERT_UNKNOWN_CA": TlsFault.WRONG_CA,
    "SSLV3_ALERT_CERTIFICATE_EXPIRED": TlsFault.EXPIRED,
    "SSLV3_ALERT_CERTIFICATE_REVOKED": TlsFault.REVOKED,
}
"""The fault for each alert with which the other side refuses the certificate of this process."""
_SAME = f"give both sides certificates of one CA, and name that in {CA}."
THEIRS: dict[TlsFault, tuple[str, str]] = {
    TlsFault.WRONG_CA: (f"its certificate is not signed by a CA of {CA}", _SAME),
    TlsFault.NOT_YET_VALID: ("its certificate is not valid yet", "set the clocks of both hosts."),
    TlsFault.EXPIRED: ("its certificate has expired", RENEW),
    TlsFault.REVOKED: ("its certificate was revoked", RENEW),
    TlsFault.OLD_CRL: (f"{CRL} has no current list of its issuer", "put the new list into the file."),
    TlsFault.WRONG_NAME: (
        "its certificate is for other names",
        f"call it by a name of its certificate, or set {NAME} to a name that all certificates hold.",
    ),
}
"""What is wrong with the certificate of the other side, and its fix."""
OURS: dict[TlsFault, tuple[str, str]] = {
    TlsFault.NO_CERTIFICATE: ("it asks for a certificate, and none was shown", f"set {CERT} and {KEY}."),
    TlsFault.WRONG_CA: (f"the certificate in {CERT} is not signed by a CA that it trusts", _SAME),
    TlsFault.NOT_YET_VALID: (f"the certificate in {CERT} is not valid yet", "set the clocks of both hosts."),
    TlsFault.EXPIRED: (f"the certificate in {CERT} has expired", RENEW),
    TlsFault.REVOKED: (f"the certificate in {CERT} was revoked", RENEW),
    TlsFault.REFUSED: (
        f"it refuses the certificate in {CERT}",
        f"see its log; both sides need the same {CA}, and a current {CRL} where they have one.",
    ),
}
"""Why the other side refuses this process, and the fix."""


def untrusted(address: str, fault: TlsFault, name: str = "") -> Untrusted:
    """The error for a fault of the connection to `address`. `name`: of the certificate of this process."""
    if fault is TlsFault.PLAINTEXT:
        fix = f"set {CERT}, {KEY} and {CA} (for REST also an https:// address)."
        return Untrusted(f"{address} speaks TLS, and this process speaks plaintext.", fix, fault)
    if fault is TlsFault.NO_TLS:
        fix = f"set {CERT}, {KEY} and {CA} for the process there, or unset {CA} here."
        return Untrusted(f"{address} speaks plaintext, and this process speaks TLS.", fix, fault)
    table = OURS if name or fault is TlsFault.NO_CERTIFICATE else THEIRS
    why, fix = table[fault]
    return Untrusted(f"the connection to {address} is not trusted: {why}{f' ({name})' if name else ''}.", fix, fault)


def diagnose(host: str, port: int, *, encrypted: bool | None = None) -> Untrusted | None:
    """What keeps this process from a connection to a server; None if nothing does, or the server cannot be reached.
    `encrypted`: whether the process speaks TLS there; None: if it has an identity. Blocks for a few seconds at
    most."""
    own, address = identity(), f"{host}:{port}"
    if encrypted is None:
        encrypted = own is not None
    context = _unverified()
    if encrypted:
        context = ssl.create_default_context() if own is None else own.lasting_context(Use.CLIENT)
    try:
        with (
            socket.create_connection((host.strip("[]"), port), CONNECT_S) as plain,
            context.wrap_socket(plain, server_hostname=host.strip("[]")) as connection,
        ):
            if not encrypted:
                return untrusted(address, TlsFault.PLAINTEXT)
            return _after_handshake(connection, own, address)
    except ssl.SSLCertVerificationError as error:
        fault = OF_VERIFICATION.get(error.verify_code)
        if fault is not None:
            return untrusted(address, fault)
        return Untrusted(f"the certificate of {address} is refused: {error.verify_message}.", _SAME)
    except ssl.SSLEOFError:
        return None
    except ssl.SSLError as error:
        speaks = error.reason not in ("WRONG_VERSION_NUMBER", "RECORD_LAYER_FAILURE", "HTTP_REQUEST")
        if not encrypted:
            return untrusted(address, TlsFault.PLAINTEXT) if speaks else None
        return _refusal(own, address, error.reason) if speaks else untrusted(address, TlsFault.NO_TLS)
    except OSError:
        return None


def _after_handshake(connection: ssl.SSLSocket, own: Identity | None, address: str) -> Untrusted | None:
    """With TLS 1.3 a server looks at the certificate of its caller when the caller's handshake is over already. A gRPC
    server then says something if it is content, and closes if it is not; one of HTTP sends an alert if it is not."""
    try:
        return None if connection.recv(1) else _refusal(own, address, "")
    except TimeoutError:
        return None
    except ssl.SSLError as error:
        return _refusal(own, address, error.reason)


def _refusal(own: Identity | None, address: str, alert: str) -> Untrusted:
    """The error if the other side refuses the certificate of this process."""
    from cryptography import x509

    if own is None or not own.contents.cert:
        return untrusted(address, TlsFault.NO_CERTIFICATE)
    chain = x509.load_pem_x509_certificates(own.contents.cert)
    name, now = subject_of(chain[0]), datetime.datetime.now(datetime.UTC)
    if fault := OF_ALERT.get(alert):
        return untrusted(address, fault, name)
    if now > chain[0].not_valid_after_utc:
        return untrusted(address, TlsFault.EXPIRED, name)
    if now < chain[0].not_valid_before_utc:
        return untrusted(address, TlsFault.NOT_YET_VALID, name)
    if chain[-1].issuer not in {each.subject for each in x509.load_pem_x509_certificates(own.contents.ca)}:
        return untrusted(address, TlsFault.WRONG_CA, name)
    return untrusted(address, TlsFault.REFUSED, name)


def _unverified() -> ssl.SSLContext:
    """Finds out whether a server speaks TLS. Nothing is sent over its connection."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    return context
