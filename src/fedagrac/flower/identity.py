"""Proof that a node holds the key of its partition.

The settings name the key of every partition. In every greeting the server sends a new random text, and the node
signs it together with the run, the node and the partition. A signature therefore counts once, for one node.
"""

from __future__ import annotations

import base64
import hashlib
import re
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedagrac.errors import InputError, shown
from fedagrac.files import read_bounded
from fedagrac.flower.wire import PROTOCOL, BadReplyError, Parcel

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric import ec

__all__ = ["FINGERPRINT", "Greeting", "KeyHolders", "key_fingerprint", "sign"]

FINGERPRINT = re.compile(r"SHA256:[A-Za-z0-9+/]{43}")
"""The SHA-256 of a public key as `ssh-keygen -l` prints it."""

NONCE = re.compile(r"[0-9a-f]{64}")

MOST_KEY_BYTES = 2**14


@dataclass(frozen=True)
class Greeting:
    """What a node signs.

    Attributes:
        run: Flower's number of the run.
        node: Flower's number of the node.
        partition: the partition that the node claims.
        nonce: 64 hexadecimal digits that the server drew for this greeting.

    Examples:
        >>> Greeting(7, 12, 0, "ab" * 32).message[:45]
        b'fedagrac greeting protocol=1 run=7 node=12 pa'
    """

    run: int
    node: int
    partition: int
    nonce: str

    @property
    def message(self) -> bytes:
        """The bytes that are signed. No other message that these keys sign begins like them."""
        facts = f"run={self.run} node={self.node} partition={self.partition} nonce={self.nonce}"
        return f"fedagrac greeting protocol={PROTOCOL} {facts}".encode()


def key_fingerprint(public: bytes) -> str:
    """Return the SHA-256 of a public key in OpenSSH format; raise ValueError if it is no ECDSA key.

    Examples:
        >>> key_fingerprint(b"ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIHt2")
        Traceback (most recent call last):
        ...
        ValueError: not an ECDSA public key in OpenSSH format
    """
    return _fingerprint_of(_public_key(public))


def sign(path: object, greeting: Greeting) -> dict[str, str]:
    """Sign a greeting with the private key in a file. Return the public key and the signature as facts."""
    from cryptography.hazmat.primitives import hashes
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat, load_ssh_private_key

    accepted = "the file with this node's private key, as for --auth-supernode-private-key: "
    accepted += "the settings name a key for every partition"
    if not isinstance(path, str):
        raise InputError("node config key", path, accepted)
    if not NONCE.fullmatch(greeting.nonce):
        raise InputError("nonce of the greeting", greeting.nonce, "64 hexadecimal digits")
    try:
        key = load_ssh_private_key(read_bounded(Path(path), MOST_KEY_BYTES), None)
    except (OSError, ValueError, TypeError) as error:
        raise InputError("node config key", path, f"{accepted} ({error})") from error
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise InputError("node config key", path, f"{accepted}; an ECDSA key")
    signature = key.sign(greeting.message, ec.ECDSA(hashes.SHA256()))
    public = key.public_key().public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH)
    return {"key": public.decode(), "signature": base64.b64encode(signature).decode()}


class KeyHolders:
    """The keys of the partitions, and the greetings that wait for a signature.

    Attributes:
        keys: the fingerprint of the key of each partition, by its number.
        run: Flower's number of the run.
    """

    def __init__(self, keys: Mapping[str, str], run: int) -> None:
        self.keys, self.run = dict(keys), run
        self._nonces: dict[int, str] = {}

    def challenge(self, node: int) -> dict[str, str]:
        """Draw a nonce for a greeting of this node. Return it as a fact of the greeting."""
        self._nonces[node] = secrets.token_hex(32)
        return {"nonce": self._nonces[node]}

    def check(self, node: int, partition: int, reply: Parcel) -> None:
        """Raise BadReplyError unless the node signed its greeting with the key of the partition."""
        from cryptography.exceptions import InvalidSignature
        from cryptography.hazmat.primitives import hashes
        from cryptography.hazmat.primitives.asymmetric import ec

        nonce = self._nonces.pop(node, None)  # a signature counts once
        if nonce is None:
            raise BadReplyError("it answers no greeting")
        try:
            public = _public_key(_text(reply, "key").encode())
            signature = base64.b64decode(_text(reply, "signature"), validate=True)
        except ValueError as error:
            raise BadReplyError(f"it does not prove who it is ({error})") from error
        wanted, given = self.keys[str(partition)], _fingerprint_of(public)
        if given != wanted:
            raise BadReplyError(f"its key is {given}, partition {partition} belongs to {wanted}")
        try:
            public.verify(signature, Greeting(self.run, node, partition, nonce).message, ec.ECDSA(hashes.SHA256()))
        except InvalidSignature as error:
            raise BadReplyError(f"its signature is not one of this greeting of node {node}") from error


def _text(reply: Parcel, name: str) -> str:
    """Return a fact that is text; raise ValueError if it is none."""
    value: Any = reply.facts.get(name)
    if not isinstance(value, str):
        raise ValueError(f"{name} = {shown(value)}")
    return value


def _public_key(public: bytes) -> ec.EllipticCurvePublicKey:
    """Return a public key from OpenSSH format; raise ValueError if it is no ECDSA key."""
    from cryptography.exceptions import UnsupportedAlgorithm
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.hazmat.primitives.serialization import load_ssh_public_key

    try:
        key = load_ssh_public_key(public)
    except (ValueError, UnsupportedAlgorithm):
        key = None
    if not isinstance(key, ec.EllipticCurvePublicKey):
        raise ValueError("not an ECDSA public key in OpenSSH format")
    return key


def _fingerprint_of(key: ec.EllipticCurvePublicKey) -> str:
    """Return the SHA-256 of a public key as `ssh-keygen -l` prints it."""
    from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

    blob = base64.b64decode(key.public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH).split()[1])
    return "SHA256:" + base64.b64encode(hashlib.sha256(blob).digest()).decode().rstrip("=")
