"""A certificate that only those can use, and check, who know the run's token.

Its key (Ed25519) follows from the token, and so does all the rest: every node makes the same one,
and trusts no other. It has no time of its own, for the nodes' clocks may differ: the end of a run
ends its token. A reader of the certificate can try tokens on it, as on any proof of knowing one; so
a token has to be random, and the run's id is none.
"""

import hmac
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime
from ipaddress import ip_address
from typing import NamedTuple

from cryptography import x509
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

NAME = "rankwise"
_BEGINS = datetime(2000, 1, 1)  # noqa: DTZ001  # certificates are in UTC, and this is long ago
_ENDS = datetime(9999, 12, 31, 23, 59, 59)  # noqa: DTZ001  # RFC 5280's "no end"


class TokenCertificate(NamedTuple):
    """A certificate and its key, as PEM."""

    certificate: bytes
    key: bytes


class CertificateFiles(NamedTuple):
    """The descriptors of both as files."""

    certificate: int
    key: int


def certificate_of(token: bytes, hosts: Sequence[str] = ()) -> TokenCertificate:
    """The certificate of a token, which is good for servers with these names or addresses too."""
    key = Ed25519PrivateKey.from_private_bytes(hmac.digest(token, b"rankwise tls key", "sha256"))
    public = key.public_key()
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, NAME)])
    usage = x509.KeyUsage(
        digital_signature=True, key_cert_sign=True, crl_sign=False, content_commitment=False,
        key_encipherment=False, data_encipherment=False, key_agreement=False,
        encipher_only=False, decipher_only=False,
    )  # fmt: skip
    purposes = [x509.ExtendedKeyUsageOID.SERVER_AUTH, x509.ExtendedKeyUsageOID.CLIENT_AUTH]
    extensions: list[tuple[x509.ExtensionType, bool]] = [
        (x509.BasicConstraints(ca=True, path_length=0), True),
        (usage, True),
        (x509.ExtendedKeyUsage(purposes), False),
        (x509.SubjectKeyIdentifier.from_public_key(public), False),
        (x509.SubjectAlternativeName([_alternative(host) for host in (NAME, *hosts)]), False),
    ]
    builder = x509.CertificateBuilder(name, name, public, 1, _BEGINS, _ENDS)
    for extension, is_critical in extensions:
        builder = builder.add_extension(extension, critical=is_critical)
    return TokenCertificate(
        builder.sign(key, None).public_bytes(serialization.Encoding.PEM),
        key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        ),
    )


@contextmanager
def certificate_files(token: bytes, hosts: Sequence[str]) -> Iterator[CertificateFiles]:
    """Files of the certificate and its key that are in memory, and end with their descriptors.

    Their names are good in this process, and in children that inherit the descriptors.
    """
    made = certificate_of(token, hosts)
    with _in_memory(made.certificate) as certificate, _in_memory(made.key) as key:
        yield CertificateFiles(certificate, key)


@contextmanager
def _in_memory(content: bytes) -> Iterator[int]:
    fd = os.memfd_create("rankwise-tls", os.MFD_CLOEXEC)
    try:
        os.write(fd, content)
        yield fd
    finally:
        os.close(fd)


def _alternative(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ip_address(host))
    except ValueError:
        return x509.DNSName(host)
