"""Arrays that stay on disk: rows are read when a batch needs them, and nothing stays in memory.

A memory map would work too, but the pages it has touched count as resident memory of the process. `DiskArray`
reads with `preadv` instead, so the operating system caches what it can and a run holds only its batches.
"""

from __future__ import annotations

import contextlib
import math
import mmap
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from fedagrac.errors import InputError, nearest
from fedagrac.parsing import ParseError, parse_json

if TYPE_CHECKING:
    import numpy.typing as npt
    from torch import Tensor

    Numbers = npt.NDArray[np.int64]

__all__ = ["DiskArray", "mapped_file"]

NEAR = 4096
"""Rows that are at most this many bytes apart are read together: the system reads whole pages of this size."""

LARGEST_READ = 2**22
"""The most bytes of one read, and of one page of `DiskArray.pages`."""

MOST_OPEN = 64
"""The most files that one array keeps open."""

LARGEST_HEADER = 100_000_000
"""The most bytes of a safetensors header, as in the safetensors library."""

SAFETENSORS = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I64": torch.int64,
    "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
    "U16": torch.uint16, "U32": torch.uint32, "U64": torch.uint64,
}  # fmt: skip
"""The types of numbers in safetensors files."""

WIDER = {torch.uint16: torch.int32, torch.uint32: torch.int64, torch.uint64: torch.int64}
"""Unsigned integers that torch stores but cannot compute with, and the types that replace them."""


@dataclass(frozen=True)
class Stretch:
    """Rows that follow each other in a file.

    Attributes:
        path: the file.
        offset: the first byte of the first row.
        rows: how many rows.
    """

    path: str
    offset: int
    rows: int


class DiskArray:
    """An array [n, ...] in one or more files, read row by row.

    Federations keep a `DiskArray`, or a `numpy.memmap`, which becomes one, on disk; engines read the rows of each
    batch. Arrays must be in C order.

    Attributes:
        shape: [n, ...].
        dtype: the torch type of the rows that `gather` returns.
        finite: whether the caller vouches that there is no NaN and no infinity. A federation reads every other
            array of floating-point numbers once to check it.

    Examples:
        >>> import tempfile
        >>> path = Path(tempfile.mkdtemp()) / "pictures.npy"
        >>> np.save(path, np.arange(6, dtype=np.uint8).reshape(3, 2))
        >>> pictures = DiskArray.open(path)
        >>> pictures.shape, pictures.gather(np.array([2, 0, 2])).tolist()
        (torch.Size([3, 2]), [[4, 5], [0, 1], [4, 5]])
    """

    def __init__(
        self,
        stretches: Sequence[Stretch],
        row: Sequence[int],
        stored: torch.dtype,
        dtype: torch.dtype | None = None,
        swapped: bool = False,
        finite: bool = False,
    ) -> None:
        self.stretches, self.stored, self.swapped, self.finite = tuple(stretches), stored, swapped, finite
        self.dtype = dtype or WIDER.get(stored, stored)
        self._starts = np.cumsum([0, *(stretch.rows for stretch in stretches)], dtype=np.int64)
        self._offsets = np.array([stretch.offset for stretch in stretches], np.int64)
        self.shape = torch.Size([int(self._starts[-1]), *row])
        self._row_bytes = math.prod(row) * stored.itemsize
        self._files = _Files()

    @classmethod
    def open(cls, path: str | Path, finite: bool = False) -> DiskArray:
        """Return the array of a .npy file."""
        try:
            array = np.lib.format.open_memmap(path, mode="r")
        except (OSError, ValueError, EOFError) as error:
            raise InputError("path", str(path), f"a .npy file of numbers ({error})") from None
        return cls.from_memmap(array, finite, field=str(path))

    @classmethod
    def from_memmap(cls, array: npt.NDArray[Any], finite: bool = False, field: str = "memory map") -> DiskArray:
        """Return the rows of a memory map, or of a part of one such as `pictures[100:200]`.

        Examples:
            >>> import tempfile
            >>> numbers = np.memmap(tempfile.mkdtemp() + "/numbers", np.int16, "w+", shape=(4, 3))
            >>> numbers[:] = np.arange(12).reshape(4, 3)
            >>> DiskArray.from_memmap(numbers[1:]).gather(np.array([0])).tolist()
            [[3, 4, 5]]
        """
        source = mapped_file(array)
        if source is None or source.filename is None:
            raise InputError(field, type(array).__name__, "a memory map of a named file, or DiskArray.open(path)")
        if source.mode == "c":
            raise InputError(
                field, "a memory map of mode 'c'", "mode 'r': changes of mode 'c' are not in the file"
            )
        if array.ndim == 0 or not array.flags.c_contiguous:
            raise InputError(
                field,
                f"shape {array.shape}, strides {array.strides}",
                "an array in C order whose rows follow each other in the file: write it with "
                "np.save(path, np.ascontiguousarray(array)) and use DiskArray.open(path)",
            )
        native = array.dtype.newbyteorder("=")
        try:
            stored = torch.from_numpy(np.empty(0, native)).dtype
        except TypeError:
            raise InputError(field, f"numbers of type {array.dtype}", "a type of numbers that torch has") from None
        stretch = Stretch(str(source.filename), _offset_in_file(array, source), len(array))
        return cls([stretch], array.shape[1:], stored, swapped=array.dtype != native, finite=finite)

    @classmethod
    def from_safetensors(cls, path: str | Path, name: str, finite: bool = False) -> DiskArray:
        """Return the tensor of that name in a safetensors file.

        Examples:
            >>> import tempfile
            >>> from safetensors.numpy import save_file
            >>> path = tempfile.mkdtemp() + "/data.safetensors"
            >>> save_file({"x": np.array([[1.0, 2.0], [3.0, 4.0]])}, path)
            >>> DiskArray.from_safetensors(path, "x")[1].tolist()
            [3.0, 4.0]
        """
        try:
            entries, first = _safetensors_header(Path(path))
        except OSError as error:
            raise InputError("path", str(path), f"a safetensors file ({error})") from None
        if name not in entries:
            accepted = f"one of {', '.join(map(repr, entries))}{nearest(name, entries)}"
            raise InputError(f"{path}: tensor", name, accepted)
        stored, shape, offset = _safetensors_entry(
            f"{path}: {name}", entries[name], Path(path).stat().st_size - first
        )
        return cls([Stretch(str(path), first + offset, shape[0])], shape[1:], stored, finite=finite)

    @classmethod
    def join(cls, field: str, arrays: Sequence[DiskArray]) -> DiskArray:
        """Return the rows of several arrays as one array; stretches that follow each other become one."""
        head = arrays[0]
        kinds = {(array.shape[1:], array.stored, array.swapped, array.dtype) for array in arrays}
        if len(kinds) > 1:
            raise InputError(field, f"{len(kinds)} kinds of rows on disk", "one shape and one type of numbers")
        stretches: list[Stretch] = []
        for stretch in (stretch for array in arrays for stretch in array.stretches):
            last = stretches[-1] if stretches else None
            if last and (last.path, last.offset + last.rows * head._row_bytes) == (stretch.path, stretch.offset):
                stretches[-1] = Stretch(last.path, last.offset, last.rows + stretch.rows)
            else:
                stretches.append(stretch)
        finite = all(array.finite for array in arrays)
        return cls(stretches, head.shape[1:], head.stored, head.dtype, head.swapped, finite)

    def as_type(self, dtype: torch.dtype) -> DiskArray:
        """Return the same rows, which become numbers of this type when they are read."""
        return DiskArray(self.stretches, self.shape[1:], self.stored, dtype, self.swapped, self.finite)

    @property
    def ndim(self) -> int:
        """The number of dimensions."""
        return len(self.shape)

    @property
    def nbytes(self) -> int:
        """The bytes on disk."""
        return len(self) * self._row_bytes

    def is_floating_point(self) -> bool:
        """Return whether the rows are floating-point numbers."""
        return self.dtype.is_floating_point

    def __len__(self) -> int:
        return self.shape[0]

    def __repr__(self) -> str:
        files = len({stretch.path for stretch in self.stretches})
        return f"DiskArray({tuple(self.shape)}, {self.dtype}, {self.nbytes:,} bytes in {files} file(s))"

    def __getitem__(self, rows: Any) -> Tensor:
        """Return one row, a slice of rows, or the rows of an array or tensor of row numbers."""
        if isinstance(rows, slice):
            return self.gather(np.arange(len(self))[rows])
        numbers = np.asarray(rows)
        if numbers.dtype == bool:
            numbers = np.flatnonzero(numbers)
        numbers = np.where(numbers < 0, numbers + len(self), numbers).astype(np.int64)
        return self.gather(numbers.reshape(-1)).reshape(*numbers.shape, *self.shape[1:])

    def gather(self, rows: Numbers) -> Tensor:
        """Return the rows of these numbers, [k, ...], in memory.

        Each row is read once, in the order of the file; neighbours are read together.
        """
        distinct, inverse = np.unique(self._checked(rows), return_inverse=True)
        found = self._read(distinct)
        in_order = len(distinct) == len(rows) and bool((inverse == np.arange(len(rows))).all())
        return found if in_order else found[torch.from_numpy(inverse.reshape(-1))]

    def ahead(self, rows: Numbers) -> None:
        """Let the operating system begin to read rows into its cache, where `gather` finds them.

        This returns at once and holds no memory of the process. A thread that reads would be slower: it and the
        step that runs meanwhile would wait for each other after every read.
        """
        self._announce(self._reads(np.unique(self._checked(rows))))

    def pages(self) -> Iterator[tuple[int, Tensor]]:
        """Yield all rows in pages of about 4 MB, each with the number of its first row."""
        size = max(1, LARGEST_READ // max(1, self._row_bytes))
        for first in range(0, len(self), size):
            yield first, self._read(np.arange(first, min(first + size, len(self))))

    def _checked(self, rows: Numbers) -> Numbers:
        if len(rows) and not (rows.min() >= 0 and rows.max() < len(self)):
            raise InputError("rows", f"{rows.min()} to {rows.max()}", f"row numbers from 0 to {len(self) - 1}")
        return np.asarray(rows, np.int64)

    def _read(self, rows: Numbers) -> Tensor:
        """Return sorted, distinct rows."""
        size, content = self._row_bytes, np.empty((len(rows), self._row_bytes), np.uint8)
        view, reads = content.reshape(-1).data, self._reads(rows)
        if len(reads) > 1:
            self._announce(reads)
        for path, position, span, i, j in reads:
            if span == j - i:
                self._files.read(path, position, view[i * size : j * size])
            else:
                whole = np.empty((span, size), np.uint8)
                self._files.read(path, position, whole.reshape(-1).data)
                np.take(whole, rows[i:j] - rows[i], axis=0, out=content[i:j])
        if self.swapped:
            content.reshape(-1).view(f"u{self.stored.itemsize}").byteswap(inplace=True)
        found = torch.from_numpy(content).reshape(-1).view(self.stored).reshape(len(rows), *self.shape[1:])
        return found.to(self.dtype)

    def _reads(self, rows: Numbers) -> list[tuple[str, int, int, int, int]]:
        """Return the reads of sorted, distinct rows: file, position, rows read, begin and end in `rows`."""
        if not len(rows) or not self._row_bytes:
            return []
        owner = np.searchsorted(self._starts, rows, side="right") - 1
        cuts = np.concatenate([[0], 1 + np.flatnonzero(_far(rows, owner, self._row_bytes)), [len(rows)]])
        begin, end = cuts[:-1], cuts[1:]
        positions = self._offsets[owner[begin]] + (rows[begin] - self._starts[owner[begin]]) * self._row_bytes
        spans = rows[end - 1] - rows[begin] + 1
        paths = [self.stretches[i].path for i in owner[begin].tolist()]
        columns = (positions.tolist(), spans.tolist(), begin.tolist(), end.tolist())
        return list(zip(paths, *columns, strict=True))

    def _announce(self, reads: list[tuple[str, int, int, int, int]]) -> None:
        """Tell the system what will be read, so that the disk has many reads to work on at a time."""
        if hasattr(os, "posix_fadvise"):
            for path, position, span, _, _ in reads:
                size = span * self._row_bytes
                os.posix_fadvise(self._files.opened(path), position, size, os.POSIX_FADV_WILLNEED)


def mapped_file(array: npt.NDArray[Any]) -> np.memmap[Any, Any] | None:
    """Return the memory map that an array is, or is a view of; None if it is in memory.

    Examples:
        >>> mapped_file(np.zeros(3)) is None
        True
    """
    source: Any = array
    while isinstance(source, np.ndarray):
        if isinstance(source, np.memmap) and getattr(source, "_mmap", None) is not None:
            return source
        source = source.base
    return None


def _offset_in_file(array: npt.NDArray[Any], source: np.memmap[Any, Any]) -> int:
    """Return where the array's first number is in the file; the `offset` of a part is that of the whole map."""
    mapped = np.frombuffer(source._mmap, np.uint8)  # type: ignore[attr-defined]
    begin = source.offset - source.offset % mmap.ALLOCATIONGRANULARITY
    return int(begin + array.__array_interface__["data"][0] - mapped.__array_interface__["data"][0])


def _far(rows: Numbers, owner: Numbers, row_bytes: int) -> npt.NDArray[np.bool_]:
    """Return for each of the sorted rows but the last whether the next row needs a read of its own."""
    apart: npt.NDArray[np.bool_] = (np.diff(rows) - 1) * row_bytes > (NEAR if row_bytes < NEAR else 0)
    block = max(1, LARGEST_READ // row_bytes)
    apart |= np.diff(owner) != 0
    apart |= np.diff(rows // block) != 0
    return apart


class _Files:
    """The open files of an array; at most `MOST_OPEN` stay open. A copy opens its own."""

    def __init__(self) -> None:
        self._open: dict[str, int] = {}

    def __reduce__(self) -> tuple[type[_Files], tuple[()]]:
        return _Files, ()

    def read(self, path: str, position: int, into: memoryview) -> None:
        """Fill `into` with the bytes at a position of a file."""
        file = self.opened(path)
        done = os.preadv(file, [into], position)
        while done < len(into):
            count = os.preadv(file, [into[done:]], position + done)
            if count == 0:
                accepted = f"at least {position + len(into):,} bytes: the file has become shorter"
                raise InputError(path, f"{os.fstat(file).st_size:,} bytes", accepted)
            done += count

    def opened(self, path: str) -> int:
        """Return the descriptor of a file."""
        file = self._open.get(path)
        if file is not None:
            return file
        if len(self._open) >= MOST_OPEN:
            os.close(self._open.pop(next(iter(self._open))))
        self._open[path] = os.open(path, os.O_RDONLY | getattr(os, "O_CLOEXEC", 0))
        return self._open[path]

    def __del__(self) -> None:
        for file in self._open.values():
            with contextlib.suppress(OSError):
                os.close(file)


def _safetensors_header(path: Path) -> tuple[dict[str, Any], int]:
    """Return the entries of a safetensors file and the position of its first number."""
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or length > min(size - 8, LARGEST_HEADER):
            raise InputError(str(path), "another content", "a safetensors file")
        text = file.read(length)
    try:
        entries = parse_json(text)
    except (ParseError, UnicodeDecodeError) as error:
        raise InputError(str(path), "a damaged header", f"a safetensors file ({error})") from None
    if not isinstance(entries, dict):
        raise InputError(str(path), "a damaged header", "a safetensors file")
    return {name: entry for name, entry in entries.items() if name != "__metadata__"}, 8 + length


def _safetensors_entry(field: str, entry: Any, available: int) -> tuple[torch.dtype, list[int], int]:
    """Check an entry of a header. Return the type, the shape and the offset of its numbers."""
    entry = entry if isinstance(entry, dict) else {}
    kind, shape, offsets = entry.get("dtype"), entry.get("shape"), entry.get("data_offsets")
    if not isinstance(kind, str) or kind not in SAFETENSORS:
        raise InputError(f"{field}: dtype", kind, f"one of {', '.join(SAFETENSORS)}")
    if not _are_counts(shape) or not shape:
        raise InputError(f"{field}: shape", shape, "at least one dimension, the samples")
    size = math.prod(shape) * SAFETENSORS[kind].itemsize
    if not _are_counts(offsets) or len(offsets) != 2 or offsets[0] + size != offsets[1] or offsets[1] > available:
        raise InputError(
            f"{field}: data_offsets", offsets, f"{size} bytes within the {available} bytes of numbers"
        )
    return SAFETENSORS[kind], shape, offsets[0]


def _are_counts(value: Any) -> bool:
    return isinstance(value, list) and all(type(number) is int and number >= 0 for number in value)
