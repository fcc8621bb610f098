"""What travels: a parcel of a few facts and a few vectors, as Flower records and back.

Everything that arrives is checked here before anything is computed with it.
"""

from __future__ import annotations

import hashlib
import io
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.lib.format import read_array_header_1_0, read_array_header_2_0, read_magic

from fedagrac.errors import FedagracError, shown

if TYPE_CHECKING:
    from flwr.app import RecordDict
    from torch import Tensor

    from fedagrac.models.vector import VectorModel

__all__ = ["PROTOCOL", "BadReplyError", "Parcel", "fingerprint", "pack", "unpack"]

PROTOCOL = 1
"""The version of what travels; server and clients must agree."""

FACTS, VECTORS = "facts", "vectors"


class BadReplyError(FedagracError):
    """A reply that cannot be used, and why."""


@dataclass(frozen=True, eq=False)
class Parcel:
    """Facts and vectors by name, in either direction.

    Attributes:
        facts: numbers and words.
        vectors: arrays, not yet checked.

    Examples:
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
        """The size of the vectors; facts weigh nothing beside them."""
        return sum(vector.numel() * vector.element_size() for vector in self.vectors.values())

    def vector(self, name: str, size: int, dtype: torch.dtype) -> Tensor:
        """Return a vector of this length and type, all of it finite."""
        if name not in self.vectors:
            raise BadReplyError(f"{name} is missing")
        vector = self.vectors[name]
        if tuple(vector.shape) != (size,):
            raise BadReplyError(f"{name} has shape {tuple(vector.shape)}, expected ({size},)")
        if vector.dtype != dtype:
            raise BadReplyError(f"{name} is {vector.dtype}, expected {dtype}")
        if not bool(torch.isfinite(vector).all()):
            raise BadReplyError(f"{name} holds NaN or infinity")
        return vector

    def integer(self, name: str, least: int, most: int) -> int:
        """Return a whole number between two bounds."""
        value = self.facts.get(name)
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
            wanted = f"{least}" if least == most else f"an integer from {least} to {most}"
            raise BadReplyError(f"{name} = {shown(value)}, expected {wanted}")
        return value

    def number(self, name: str) -> float:
        """Return a finite number."""
        value = self.facts.get(name)
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise BadReplyError(f"{name} = {shown(value)}, expected a finite number")
        return float(value)


def fingerprint(model: VectorModel) -> str:
    """Return what must be equal on the server and on every client: names, shapes and type of the parameters.

    Examples:
        >>> from fedagrac.models.vector import VectorModel
        >>> fingerprint(VectorModel(torch.nn.Linear(2, 1))) == fingerprint(VectorModel(torch.nn.Linear(2, 1)))
        True
    """
    shapes = [f"{name} {tuple(p.shape)}" for name, p in zip(model.names, model.parameters, strict=True)]
    return hashlib.sha256("\n".join([str(model.dtype), *shapes]).encode()).hexdigest()[:16]


def pack(parcel: Parcel) -> RecordDict:
    """Return the parcel as Flower's records."""
    from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict

    arrays = {name: Array(value.detach().cpu().numpy()) for name, value in parcel.vectors.items()}
    return RecordDict({FACTS: ConfigRecord(dict(parcel.facts)), VECTORS: ArrayRecord(arrays)})


def unpack(content: RecordDict) -> Parcel:
    """Return Flower's records as a parcel; what cannot be read is a bad reply."""
    try:
        facts = dict(content.config_records[FACTS])
        vectors = {name: _vector(array.data) for name, array in content.array_records[VECTORS].items()}
    except Exception as error:  # the sender decides what is in there
        said = shown(str(error))
        raise BadReplyError(f"its content cannot be read ({type(error).__name__}: {said})") from error
    return Parcel(facts, vectors)


def _vector(data: bytes) -> Tensor:
    """Return the vector in the bytes of a .npy file.

    numpy.load makes an array as large as the header says before it looks for the numbers; here the header must fit
    the bytes that came. Pickled objects are not numbers and are refused by their type.
    """
    file = io.BytesIO(data)
    header = {(1, 0): read_array_header_1_0, (2, 0): read_array_header_2_0}.get(read_magic(file))
    if header is None:
        raise ValueError("another version of .npy")
    shape, _, dtype = header(file)
    if dtype.kind not in "biuf":
        raise ValueError(f"{shown(dtype)} is no type of numbers")
    came = len(data) - file.tell()
    if came != math.prod(shape) * dtype.itemsize:
        raise ValueError(f"{came} bytes for an array of shape {shown(shape)}")
    return torch.from_numpy(np.frombuffer(data, dtype, offset=file.tell()).reshape(shape).copy())
