"""Keys for trying out TLS and node authentication: a certificate authority, a server certificate, node keys.

For tests and private networks: the authority's key lies beside the others, unprotected.
"""

from __future__ import annotations

import datetime
import ipaddress
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from fedagrac.errors import InputError, count
from fedagrac.files import make_folder, write_atomically
from fedagrac.flower.extra import require_flower

if TYPE_CHECKING:
    from cryptography import x509

__all__ = ["write_keys"]

DAYS = 365


def write_keys(folder: str | Path, nodes: int = 3, hosts: Sequence[str] = ("127.0.0.1", "localhost")) -> Path:
    """Write ca.crt, ca.key, server.crt, server.key, and node-0, node-0.pub, ... into a new or empty folder.

    Args:
        folder: where.
        nodes: for how many nodes.
        hosts: names and addresses by which nodes and users reach the SuperLink.
    """
    require_flower()  # which brings the library that makes keys
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

    folder = Path(folder)
    count("nodes", nodes, least=0)
    if not hosts or not all(hosts):
        raise InputError("hosts", list(hosts), "at least one name or address of the SuperLink")
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise InputError("folder", str(folder), "a new or empty folder: keys are never overwritten")
    make_folder(folder)
    private = serialization.PrivateFormat
    plain = serialization.NoEncryption()

    def key() -> ec.EllipticCurvePrivateKey:
        return ec.generate_private_key(ec.SECP384R1())

    def certificate(
        common_name: str,
        issuer: str,
        own: ec.EllipticCurvePrivateKey,
        signer: ec.EllipticCurvePrivateKey,
        authority: bool,
    ) -> x509.CertificateBuilder:
        now = datetime.datetime.now(datetime.UTC)
        return (
            x509.CertificateBuilder()
            .subject_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common_name)]))
            .issuer_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, issuer)]))
            .public_key(own.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - datetime.timedelta(minutes=5))
            .not_valid_after(now + datetime.timedelta(days=DAYS))
            .add_extension(x509.BasicConstraints(authority, 0 if authority else None), critical=True)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(own.public_key()), critical=False)
            .add_extension(
                x509.AuthorityKeyIdentifier.from_issuer_public_key(signer.public_key()), critical=False
            )
            .add_extension(
                x509.KeyUsage(
                    digital_signature=True, key_cert_sign=authority, crl_sign=authority, content_commitment=False,
                    key_encipherment=False, data_encipherment=False, key_agreement=False, encipher_only=False,
                    decipher_only=False,
                ),
                critical=True,
            )
        )  # fmt: skip

    ca_key, server_key = key(), key()
    name = "fedagrac test authority"
    ca = certificate(name, name, ca_key, ca_key, authority=True).sign(ca_key, hashes.SHA384())
    server = (
        certificate(hosts[0], name, server_key, ca_key, authority=False)
        .add_extension(x509.SubjectAlternativeName([_host(host) for host in hosts]), critical=False)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .sign(ca_key, hashes.SHA384())
    )
    pem = serialization.Encoding.PEM
    for made, secret, signed in (("ca", ca_key, ca), ("server", server_key, server)):
        _write(folder / f"{made}.key", secret.private_bytes(pem, private.PKCS8, plain))
        write_atomically(folder / f"{made}.crt", signed.public_bytes(pem))
    for i in range(nodes):
        node = key()
        _write(folder / f"node-{i}", node.private_bytes(pem, private.OpenSSH, plain))
        public = node.public_key().public_bytes(serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH)
        write_atomically(folder / f"node-{i}.pub", public + b"\n")
    return folder


def _host(name: str) -> x509.GeneralName:
    from cryptography import x509

    try:
        return x509.IPAddress(ipaddress.ip_address(name))
    except ValueError:
        return x509.DNSName(name)


def _write(path: Path, secret: bytes) -> None:
    """Write a private key that only its owner can read."""
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(secret)
