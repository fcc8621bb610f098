"""The content of messages: parcels of facts and vectors, and their conversion to and from Flower's records.

Everything that arrives is checked here before it is used. torch is imported only where there are vectors.
"""

from __future__ import annotations

import hashlib
import io
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.lib.format import read_array_header_1_0, read_array_header_2_0, read_magic

from fedagrac.errors import FedagracError, shown

if TYPE_CHECKING:
    import torch
    from flwr.app import RecordDict
    from torch import Tensor

    from fedagrac.models.vector import VectorModel

__all__ = ["PROTOCOL", "BadReplyError", "Expected", "Parcel", "fingerprint", "pack", "slot_names", "unpack"]

PROTOCOL = 1
"""The version of the messages, which must be the same on the server and on all clients."""

FACTS, VECTORS = "facts", "vectors"

MOST_FACTS = 16
"""The largest number of facts in a reply."""

SMALLEST_CHUNK = 2**18
"""Flower sends a vector in chunks of 5 MiB. A reply may not have more chunks than with this many bytes."""

HEAD = 1024
"""The bytes that a vector may have besides its numbers. The header of a .npy file has 128."""

STRUCTURE = 2**16
"""The bytes that a reply may have besides its vectors: facts, names and what Flower adds."""


class BadReplyError(FedagracError):
    """A reply that cannot be used."""


@dataclass(frozen=True, eq=False)
class Parcel:
    """Facts and vectors by name, in either direction.

    Attributes:
        facts: numbers and words.
        vectors: arrays, not yet checked.

    Examples:
        >>> import torch
        >>> Parcel({"round": 3}, {"x": torch.ones(2)}).vector("x", 2, torch.float32)
        tensor([1., 1.])
        >>> Parcel({"round": 3}, {"x": torch.ones(2)}).vector("x", 5, torch.float32)
        Traceback (most recent call last):
        ...
        fedagrac.flower.wire.BadReplyError: x has shape (2,), expected (5,)
    """

    facts: Mapping[str, Any]
    vectors: Mapping[str, Tensor] = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        """The bytes of the vectors. Facts are small and do not count."""
        return sum(vector.numel() * vector.element_size() for vector in self.vectors.values())

    def vector(self, name: str, size: int, dtype: torch.dtype) -> Tensor:
        """Return a vector; raise BadReplyError unless it has this length and type, and is finite.

        A vector whose squared norm overflows its own type counts as not finite, because nothing can be computed
        with it.
        """
        import torch

        if name not in self.vectors:
            raise BadReplyError(f"{name} is missing")
        vector = self.vectors[name]
        if tuple(vector.shape) != (size,):
            raise BadReplyError(f"{name} has shape {tuple(vector.shape)}, expected ({size},)")
        if vector.dtype != dtype:
            raise BadReplyError(f"{name} is {vector.dtype}, expected {dtype}")
        if not bool(torch.isfinite(vector).all()):
            raise BadReplyError(f"{name} holds NaN or infinity")
        if not bool(torch.isfinite(vector.dot(vector))):
            raise BadReplyError(f"{name} is too long: its squared norm overflows {dtype}")
        return vector

    def integer(self, name: str, least: int, most: int) -> int:
        """Return an integer; raise BadReplyError unless it is between two bounds."""
        value = self.facts.get(name)
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
            wanted = f"{least}" if least == most else f"an integer from {least} to {most}"
            raise BadReplyError(f"{name} = {shown(value)}, expected {wanted}")
        return value

    def number(self, name: str) -> float:
        """Return a number; raise BadReplyError unless it is finite."""
        value = self.facts.get(name)
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise BadReplyError(f"{name} = {shown(value)}, expected a finite number")
        return float(value)


@dataclass(frozen=True)
class Expected:
    """What a reply may hold. It is known before anything is received.

    Attributes:
        vectors: the bytes of the numbers of each vector that was asked for, by name.
        text: the longest text among the facts, in characters.

    Examples:
        >>> Expected({"model": 4_000_000}).check_names(["model", "total"], "vectors")
        Traceback (most recent call last):
        ...
        fedagrac.flower.wire.BadReplyError: 'total' among its vectors was not asked for
    """

    vectors: Mapping[str, int]
    text: int = 256

    @property
    def most_objects(self) -> int:
        """The largest number of Flower's objects in the reply."""
        # the message, its records, facts and vectors; each vector with its chunks
        return 4 + sum(3 + nbytes // SMALLEST_CHUNK for nbytes in self.vectors.values())

    @property
    def most_structure(self) -> int:
        """The largest number of bytes in an object that does not hold numbers."""
        return STRUCTURE + 4 * self.text + 128 * self.most_objects

    @property
    def most_bytes(self) -> int:
        """The largest number of bytes in the reply."""
        return sum(self.most_in(name) for name in self.vectors) + 2 * self.most_structure

    def most_in(self, name: str) -> int:
        """Return the largest number of bytes in a vector."""
        return HEAD + self.vectors[name]

    def check_names(self, names: Iterable[str], where: str) -> None:
        """Raise BadReplyError for a name that was not asked for: a record, or one of the vectors."""
        known = self.vectors if where == VECTORS else (FACTS, VECTORS)
        for name in names:
            if name not in known:
                raise BadReplyError(f"{shown(name)} among its {where} was not asked for")

    def check(self, content: RecordDict) -> None:
        """Raise BadReplyError if records hold more than was asked for."""
        self.check_names(content, "records")
        facts = content.config_records[FACTS]
        if len(facts) > MOST_FACTS:
            raise BadReplyError(f"it has {len(facts)} facts, expected at most {MOST_FACTS}")
        for name, value in facts.items():
            if not isinstance(value, bool | int | float | str):
                raise BadReplyError(
                    f"the fact {shown(name)} is a {type(value).__name__}, expected a number or text"
                )
            if max(len(name), len(value) if isinstance(value, str) else 0) > self.text:
                raise BadReplyError(f"the fact {shown(name)} is longer than {self.text} characters")
        arrays = content.array_records[VECTORS]
        self.check_names(arrays, VECTORS)
        for name, array in arrays.items():
            if len(array.data) > self.most_in(name):
                given, most = len(array.data), self.most_in(name)
                raise BadReplyError(f"{name} has {given} bytes, expected at most {most}")


def fingerprint(model: VectorModel) -> str:
    """Return a hash of the names, the shapes and the type of the parameters.

    It must be the same on the server and on every client.

    Examples:
        >>> import torch
        >>> from fedagrac.models.vector import VectorModel
        >>> fingerprint(VectorModel(torch.nn.Linear(2, 1))) == fingerprint(VectorModel(torch.nn.Linear(2, 1)))
        True
    """
    shapes = [f"{name} {tuple(p.shape)}" for name, p in zip(model.names, model.parameters, strict=True)]
    return hashlib.sha256("\n".join([str(model.dtype), *shapes]).encode()).hexdigest()[:16]


def slot_names(slots: Sequence[Any] | None) -> list[str]:
    """Return the names of the vectors of a local optimizer's state in messages.

    Examples:
        >>> slot_names([0.0, 0.0])
        ['slot0', 'slot1']
    """
    return [f"slot{i}" for i in range(len(slots or ()))]


def pack(parcel: Parcel) -> RecordDict:
    """Return the parcel as Flower's records."""
    from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict

    arrays = {name: Array(value.detach().cpu().numpy()) for name, value in parcel.vectors.items()}
    return RecordDict({FACTS: ConfigRecord(dict(parcel.facts)), VECTORS: ArrayRecord(arrays)})


def unpack(content: RecordDict, expected: Expected | None = None) -> Parcel:
    """Return Flower's records as a parcel; raise BadReplyError if they cannot be read.

    If it is given what to expect, more than that is an error, too.
    """
    try:
        if expected is not None:
            expected.check(content)
        facts = dict(content.config_records[FACTS])
        vectors = {name: _vector(array.data) for name, array in content.array_records[VECTORS].items()}
    except BadReplyError:
        raise
    except Exception as error:  # the content is untrusted, so any error is possible
        reason = shown(str(error))
        raise BadReplyError(f"its content cannot be read ({type(error).__name__}: {reason})") from error
    return Parcel(facts, vectors)


def _vector(data: bytes) -> Tensor:
    """Return the vector in the bytes of a .npy file.

    numpy.load allocates an array as large as the header says before it reads the numbers. Here the header must
    match the number of bytes. Pickled objects are refused by their type.
    """
    import torch

    file = io.BytesIO(data)
    header = {(1, 0): read_array_header_1_0, (2, 0): read_array_header_2_0}.get(read_magic(file))
    if header is None:
        raise ValueError("another version of .npy")
    shape, _, dtype = header(file)
    if dtype.kind not in "biuf":
        raise ValueError(f"{shown(dtype)} is not a type of numbers")
    received = len(data) - file.tell()
    if received != math.prod(shape) * dtype.itemsize:
        raise ValueError(f"{received} bytes for an array of shape {shown(shape)}")
    return torch.from_numpy(np.frombuffer(data, dtype, offset=file.tell()).reshape(shape).copy())
