"""Locating the files of data sets: which folders hold them, and whether their content is right.

Only the standard library is imported, so that a machine without pooch, filelock or rich can still find and verify
files.
"""

from __future__ import annotations

import gzip
import hashlib
import os
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Literal, cast

from fedagrac.data.catalogue import DataFile, DataSet, data_set
from fedagrac.errors import FedagracError
from fedagrac.files import cache_folder

__all__ = ["DataError", "FileStatus", "data_roots", "folders", "found_in", "inspect_file", "locate", "verify"]

_CHUNK = 2**18


class DataError(FedagracError):
    """A data set is missing and could not be fetched. The message says which file to put where."""


@dataclass(frozen=True)
class FileStatus:
    """The state of one file, as `verify` found it.

    Attributes:
        file: the expected file.
        path: where it should be.
        state: ok, missing or differs.
        size: the bytes of the decompressed content; None if it could not be read to its end.
        sha256: the hash of the decompressed content; None if it could not be read to its end.
        note: why there is no hash.
    """

    file: DataFile
    path: Path
    state: Literal["ok", "missing", "differs"]
    size: int | None = None
    sha256: str | None = None
    note: str = ""

    @property
    def actual(self) -> str:
        """The actual content, in words."""
        if self.state == "missing":
            return "no file"
        return self.note or f"SHA-256 {self.sha256}, {self.size} bytes"

    @property
    def expected(self) -> str:
        """The expected content, in words."""
        packed = " after gzip -d" if self.file.compression else ""
        return f"SHA-256 {self.file.sha256}, {self.file.size} bytes{packed}"


def data_roots(data_dir: str | os.PathLike[str] | None = None) -> list[Path]:
    r"""Return the folders that hold data sets, in the order of search; fetched files go to the first.

    Args:
        data_dir: a folder to search before all others.

    Returns:
        `data_dir` if given, `$FEDAGRAC_DATA` if set, and the cache folder (Linux: `$XDG_CACHE_HOME/fedagrac` or
        `~/.cache/fedagrac`; macOS: `~/Library/Caches/fedagrac`; Windows: `%LOCALAPPDATA%\fedagrac`).

    Examples:
        >>> data_roots("/data")[0].as_posix()
        '/data'
    """
    chosen = [data_dir, os.environ.get("FEDAGRAC_DATA") or None]
    roots = [Path(os.path.abspath(os.path.expanduser(root))) for root in chosen if root is not None]
    cache = cache_folder()
    if cache is not None:
        roots.append(cache)
    if not roots:
        raise DataError("no folder for data sets, as there is no home folder: set $FEDAGRAC_DATA or data_dir")
    return list(dict.fromkeys(roots))


def folders(data: str | DataSet, data_dir: str | os.PathLike[str] | None = None) -> list[Path]:
    """Return the folders that are searched for the data set's files, in order."""
    data = data_set(data)
    return [root / data.name for root in data_roots(data_dir)] + [Path(folder) for folder in data.elsewhere]


def locate(data: str | DataSet, data_dir: str | os.PathLike[str] | None = None) -> Path | None:
    """Return the first folder that has all the data set's files, or None; contents are not read."""
    data = data_set(data)
    for folder in folders(data, data_dir):
        if all(os.path.isfile(folder / file.path) for file in data.files):
            return folder
    return None


def found_in(data: str | DataSet, data_dir: str | os.PathLike[str] | None = None) -> Path | None:
    """Return the first folder that has all the data set's files, or else the first that has some, or None."""
    data = data_set(data)
    complete = locate(data, data_dir)
    if complete is not None:
        return complete
    for folder in folders(data, data_dir):
        if any(os.path.exists(folder / file.path) for file in data.files):
            return folder
    return None


def verify(data: str | DataSet, folder: str | os.PathLike[str]) -> list[FileStatus]:
    """Compare every file of the data set with its known size and SHA-256 and return the states.

    Memory and time are bounded: a file that is larger than the expected one is not read, and decompression stops
    as soon as the expected size is exceeded.

    Args:
        data: a name in `DATA_FILES`, or a data set.
        folder: the folder that should hold the data set's files.

    Examples:
        >>> [status.state for status in verify("a9a", "/nowhere")]
        ['missing', 'missing']
    """
    return [inspect_file(file, Path(folder) / file.path) for file in data_set(data).files]


def inspect_file(file: DataFile, path: Path) -> FileStatus:
    """Compare the content at a path with the expected file and return its state."""
    if not os.path.exists(path):  # unlike Path.exists, this does not raise if a folder may not be read
        return FileStatus(file, path, "missing")
    stored = os.path.getsize(path)
    if not os.path.isfile(path) or stored > file.largest:
        note = f"{stored} bytes, more than {file.largest}" if os.path.isfile(path) else "not a file"
        return FileStatus(file, path, "differs", note=note)
    digest, size = hashlib.sha256(), 0
    try:
        with _content(file, path) as content:
            while chunk := content.read(_CHUNK):
                digest.update(chunk)
                size += len(chunk)
                if file.compression and size > file.size:
                    return FileStatus(
                        file, path, "differs", note=f"more than {file.size} bytes after decompression"
                    )
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        return FileStatus(file, path, "differs", note=f"damaged gzip data ({error})")
    except OSError as error:
        return FileStatus(file, path, "differs", note=f"cannot be read ({error.strerror or error})")
    state: Literal["ok", "differs"] = "ok" if digest.hexdigest() == file.sha256 else "differs"
    return FileStatus(file, path, state, size, digest.hexdigest())


def _content(file: DataFile, path: Path) -> IO[bytes]:
    return cast("IO[bytes]", gzip.open(path, "rb")) if file.compression else path.open("rb")
