"""Certificates made on the spot: an authority, and members that it vouches for."""

import datetime
import ipaddress
import ssl
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import NameOID

DAY = datetime.timedelta(days=1)
HERE = ("127.0.0.1", "localhost")


@dataclass(frozen=True)
class Files:
    """A member's certificate and key, the CA that it trusts, and that CA's list of revoked certificates."""

    cert: Path
    key: Path
    ca: Path
    crl: Path | None = None

    def variables(self, **others: str) -> dict[str, str]:
        named = {"CERT": self.cert, "KEY": self.key, "CA": self.ca, "CRL": self.crl or ""}
        return {f"MILLRACE_TLS_{name}": str(path) for name, path in named.items()} | others


class Authority:
    """A CA in a folder of its own."""

    def __init__(self, folder: Path, name: str = "fleet") -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder, self._key = folder, ec.generate_private_key(ec.SECP256R1())
        self._name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        use = x509.KeyUsage(True, False, False, False, False, True, True, False, False)
        builder = self._builder(self._name, self._key.public_key(), 30)
        builder = builder.add_extension(x509.BasicConstraints(True, None), True).add_extension(use, True)
        self._serials: dict[str, int] = {}
        self._revoked: list[int] = []
        self.ca = folder / "ca.crt"
        self.ca.write_bytes(builder.sign(self._key, hashes.SHA256()).public_bytes(Encoding.PEM))

    def context(self) -> ssl.SSLContext:
        """Of a client that trusts this CA and shows no certificate."""
        return ssl.create_default_context(cafile=str(self.ca))

    def member(self, name: str, *, days: float = 10, names: Sequence[str] = HERE, crl: Path | None = None) -> Files:
        """A certificate that ends in `days`, for `names`; a second one with this `name` replaces the files."""
        key = ec.generate_private_key(ec.SECP256R1())
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        builder = self._builder(subject, key.public_key(), days)
        builder = builder.add_extension(x509.SubjectAlternativeName([_general(each) for each in names]), False)
        certificate = builder.sign(self._key, hashes.SHA256())
        self._serials[name] = certificate.serial_number
        found = Files(self._folder / f"{name}.crt", self._folder / f"{name}.key", self.ca, crl)
        found.key.write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
        found.cert.write_bytes(certificate.public_bytes(Encoding.PEM))
        return found

    def revoke(self, *names: str) -> Path:
        """The list of all certificates revoked so far, with the newest ones of `names`."""
        self._revoked += [self._serials[name] for name in names]
        now = datetime.datetime.now(datetime.UTC)
        builder = x509.CertificateRevocationListBuilder().issuer_name(self._name)
        builder = builder.last_update(now - DAY).next_update(now + DAY)
        for serial in self._revoked:
            one = x509.RevokedCertificateBuilder().serial_number(serial).revocation_date(now - DAY)
            builder = builder.add_revoked_certificate(one.build())
        path = self._folder / "ca.crl"
        path.write_bytes(builder.sign(self._key, hashes.SHA256()).public_bytes(Encoding.PEM))
        return path

    def _builder(self, subject: x509.Name, key: ec.EllipticCurvePublicKey, days: float) -> x509.CertificateBuilder:
        now = datetime.datetime.now(datetime.UTC)
        builder = x509.CertificateBuilder().subject_name(subject).issuer_name(self._name).public_key(key)
        builder = builder.serial_number(x509.random_serial_number())
        return builder.not_valid_before(now - 40 * DAY).not_valid_after(now + days * DAY)


def _general(name: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(name))
    except ValueError:
        return x509.DNSName(name)
