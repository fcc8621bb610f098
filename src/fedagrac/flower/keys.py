"""Keys for TLS and node authentication: a certificate authority, a server certificate, node keys.

They are for tests and private networks only: the authority's key is stored unprotected beside the others.
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
from fedagrac.flower.identity import key_fingerprint

if TYPE_CHECKING:
    from cryptography import x509
    from cryptography.hazmat.primitives.asymmetric import ec

__all__ = ["write_keys"]

DAYS = 365
"""How long certificates are valid."""

AUTHORITY = "fedagrac test authority"


def write_keys(folder: str | Path, nodes: int = 3, hosts: Sequence[str] = ("127.0.0.1", "localhost")) -> Path:
    """Write ca.crt, ca.key, server.crt, server.key, node-0, node-0.pub, ..., and keys.toml. Return the folder.

    `keys.toml` holds the setting that binds each partition to the key of its node.

    Args:
        folder: a new or empty folder.
        nodes: the number of nodes.
        hosts: names and addresses by which nodes reach the server; the server itself uses 127.0.0.1 and localhost,
            which are always added.
    """
    require_flower()  # Flower depends on the library that makes keys
    folder = Path(folder)
    count("nodes", nodes, least=0)
    if not hosts or not all(hosts):
        raise InputError("hosts", list(hosts), "at least one name or address of the SuperLink")
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise InputError("folder", str(folder), "a new or empty folder: keys are never overwritten")
    make_folder(folder)
    _write_certificates(folder, list(dict.fromkeys([*hosts, "127.0.0.1", "localhost"])))
    lines = ["[tool.flwr.app.config.keys]\n"]
    for i in range(nodes):
        _write_node_key(folder / f"node-{i}")
        lines.append(f'{i} = "{key_fingerprint((folder / f"node-{i}.pub").read_bytes())}"\n')
    if nodes:
        write_atomically(folder / "keys.toml", "".join(lines).encode())
    return folder


def _write_certificates(folder: Path, hosts: Sequence[str]) -> None:
    """Write the keys and certificates of the authority and of the server."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes
    from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
    from cryptography.x509.oid import ExtendedKeyUsageOID

    ca_key, server_key = _new_key(), _new_key()
    ca = _certificate(AUTHORITY, ca_key, ca_key, authority=True).sign(ca_key, hashes.SHA384())
    server = (
        _certificate(hosts[0], server_key, ca_key, authority=False)
        .add_extension(x509.SubjectAlternativeName([_host(host) for host in hosts]), critical=False)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .sign(ca_key, hashes.SHA384())
    )
    for stem, key, certificate in (("ca", ca_key, ca), ("server", server_key, server)):
        _write_secret(folder / f"{stem}.key", key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
        write_atomically(folder / f"{stem}.crt", certificate.public_bytes(Encoding.PEM))


def _write_node_key(path: Path) -> None:
    """Write a node's private key to `path` and its public key beside it."""
    from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, PublicFormat

    key = _new_key()
    _write_secret(path, key.private_bytes(Encoding.PEM, PrivateFormat.OpenSSH, NoEncryption()))
    public = key.public_key().public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH)
    write_atomically(path.with_name(f"{path.name}.pub"), public + b"\n")


def _new_key() -> ec.EllipticCurvePrivateKey:
    """Return a new private key."""
    from cryptography.hazmat.primitives.asymmetric import ec

    return ec.generate_private_key(ec.SECP384R1())


def _certificate(
    subject: str, key: ec.EllipticCurvePrivateKey, signer: ec.EllipticCurvePrivateKey, authority: bool
) -> x509.CertificateBuilder:
    """Return a certificate of the subject's key, issued by the test authority and not yet signed."""
    from cryptography import x509
    from cryptography.x509.oid import NameOID

    now = datetime.datetime.now(datetime.UTC)
    usage = x509.KeyUsage(
        digital_signature=True, key_cert_sign=authority, crl_sign=authority, content_commitment=False,
        key_encipherment=False, data_encipherment=False, key_agreement=False, encipher_only=False,
        decipher_only=False,
    )  # fmt: skip
    return (
        x509.CertificateBuilder()
        .subject_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, subject)]))
        .issuer_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, AUTHORITY)]))
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(minutes=5))
        .not_valid_after(now + datetime.timedelta(days=DAYS))
        .add_extension(x509.BasicConstraints(authority, 0 if authority else None), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(signer.public_key()), critical=False)
        .add_extension(usage, critical=True)
    )


def _host(name: str) -> x509.GeneralName:
    """Return a host as a certificate names it: an IP address, or else a DNS name."""
    from cryptography import x509

    try:
        return x509.IPAddress(ipaddress.ip_address(name))
    except ValueError:
        return x509.DNSName(name)


def _write_secret(path: Path, secret: bytes) -> None:
    """Write a private key that only its owner can read."""
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(secret)
