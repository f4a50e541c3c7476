"""Whether the certificate of a caller still holds: it may expire or be revoked while its connection stays open."""

import datetime
import functools
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

from millrace.errors import InvalidState, Untrusted
from millrace.wire.tls.files import CA, CRL

if TYPE_CHECKING:
    from cryptography import x509

_CRL_BLOCK = re.compile(rb"-----BEGIN X509 CRL-----.*?-----END X509 CRL-----", re.DOTALL)
RENEW = "give it a new certificate of the same CA: files that change are read again."


class Callers:
    """Looks up certificates in the lists of revoked ones. gRPC for Python takes no such lists."""

    def __init__(self, ca: bytes, crl: bytes) -> None:
        """PEM texts; `crl` may be empty. Raises InvalidState if they cannot be used."""
        from cryptography import x509

        try:
            signers = x509.load_pem_x509_certificates(ca)
        except ValueError as error:
            raise InvalidState(f"{CA}: holds no certificate in PEM: {error}.", "give a PEM file.") from error
        self._lists = [_list(block, signers) for block in _CRL_BLOCK.findall(crl)]
        if crl and not self._lists:
            raise InvalidState(f"{CRL}: holds no list of revoked certificates in PEM.", "give a PEM file.")
        self._known = functools.lru_cache(maxsize=1024)(self._look_up)

    def check(self, pem: bytes) -> None:
        """Raises Untrusted if the certificate has expired or was revoked, or a list of its issuer is too old."""
        name, expires, valid_until, revoked = self._known(pem)
        now = datetime.datetime.now(datetime.UTC)
        if revoked:
            raise Untrusted(f"the certificate of {name} was revoked.", RENEW)
        if now > expires:
            raise Untrusted(f"the certificate of {name} has expired on {expires:%Y-%m-%d %H:%M} UTC.", RENEW)
        if valid_until is not None and now > valid_until:
            what = f"{CRL}: the list of the issuer of {name} was to be renewed by {valid_until:%Y-%m-%d %H:%M} UTC."
            raise Untrusted(what, "put the new list into the file: it is read again when it changes.")

    def _look_up(self, pem: bytes) -> tuple[str, datetime.datetime, datetime.datetime | None, bool]:
        """Name, end, the end of its issuer's list, and whether that has it."""
        from cryptography import x509

        certificate = x509.load_pem_x509_certificate(pem)
        own = [each for each in self._lists if each.issuer == certificate.issuer]
        revoked = any(each.get_revoked_certificate_by_serial_number(certificate.serial_number) for each in own)
        valid_until = max((each.next_update_utc for each in own if each.next_update_utc is not None), default=None)
        return subject_of(certificate), certificate.not_valid_after_utc, valid_until, revoked


def subject_of(certificate: "x509.Certificate") -> str:
    return certificate.subject.rfc4514_string() or f"serial number {certificate.serial_number:x}"


def _list(block: bytes, signers: Sequence["x509.Certificate"]) -> "x509.CertificateRevocationList":
    from cryptography import x509

    found = x509.load_pem_x509_crl(block)
    for signer in signers:
        if signer.subject == found.issuer and found.is_signature_valid(signer.public_key()):  # type: ignore[arg-type]
            return found
    what = f"{CRL}: the list of {found.issuer.rfc4514_string()} is not signed by a certificate of {CA}."
    raise InvalidState(what, f"give the list of a CA of {CA}.")
