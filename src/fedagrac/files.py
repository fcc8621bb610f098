"""The cache folder, reading files up to a size, and writing files and folders.

Nothing written here is writable for every user.
"""

from __future__ import annotations

import contextlib
import os
import stat
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from fedagrac.errors import InputError

__all__ = [
    "cache_folder",
    "make_folder",
    "naming",
    "open_bounded",
    "opener",
    "read_bounded",
    "sync",
    "whole_or_not_at_all",
    "write_atomically",
]


def cache_folder(platform: str = sys.platform) -> Path | None:
    """Return the user's cache folder for this package by the platform's conventions; None if there is no home."""
    try:
        if platform == "win32":
            base = Path(os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local")
        elif platform == "darwin":
            base = Path.home() / "Library" / "Caches"
        else:
            base = Path(os.environ.get("XDG_CACHE_HOME", ""))
            if not base.is_absolute():  # the XDG rules ignore unset, empty and relative values
                base = Path.home() / ".cache"
    except RuntimeError:
        return None
    return base / "fedagrac"


def make_folder(path: Path) -> None:
    """Make a folder and its missing parents, not writable for every user whatever the umask."""
    if not path.is_dir():
        make_folder(path.parent)
        path.mkdir(0o775, exist_ok=True)  # `parents=True` would make the parents with the umask's permissions


def opener(path: str, flags: int) -> int:
    """Open a file for `open(..., opener=opener)`, not writable for every user whatever the umask.

    Examples:
        >>> import tempfile
        >>> file = Path(tempfile.mkdtemp()) / "mine"
        >>> with open(file, "w", opener=opener) as mine:
        ...     print("text", file=mine)
        >>> file.stat().st_mode & 0o002
        0
    """
    return os.open(path, flags, 0o664)


def open_bounded(path: Path, most: int) -> BinaryIO:
    """Open a file for reading. A file of more than `most` bytes, and what is no regular file, raise InputError."""
    status = path.stat()
    if not stat.S_ISREG(status.st_mode):
        raise InputError(str(path), "not a file", "a regular file")
    if status.st_size > most:
        raise InputError(str(path), f"{status.st_size:,} bytes", f"at most {most:,} bytes")
    return path.open("rb")


def read_bounded(path: Path, most: int) -> bytes:
    """Return the content of a file of at most `most` bytes; a larger one is not read.

    Examples:
        >>> import tempfile
        >>> file = Path(tempfile.mkdtemp()) / "mine"
        >>> file.write_bytes(b"content")
        7
        >>> read_bounded(file, 7)
        b'content'
    """
    with open_bounded(path, most) as file:
        return file.read(min(os.fstat(file.fileno()).st_size, most))


@contextlib.contextmanager
def naming(path: Path) -> Iterator[None]:
    """Add the file's path to an OSError raised inside the block. A full disk is reported without a path."""
    try:
        yield
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error


@contextlib.contextmanager
def whole_or_not_at_all(path: Path) -> Iterator[Path]:
    """Yield a temporary file to write to. It replaces `path` at the end of the block, once it is on the disk."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with naming(path):
            os.close(opener(str(temporary), os.O_WRONLY | os.O_CREAT | os.O_TRUNC))
            yield temporary
            sync(temporary)
            temporary.replace(path)
            sync(path.parent)  # the new name must be on the disk, too
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)


def write_atomically(path: Path, content: bytes) -> None:
    """Write a file so that after a crash it is either complete or as it was before."""
    with whole_or_not_at_all(path) as temporary:
        temporary.write_bytes(content)


def sync(path: Path) -> None:
    """Wait until the content of a file, or the names in a folder, are on the disk."""
    try:
        descriptor = os.open(path, os.O_RDONLY if path.is_dir() else os.O_RDWR)
    except PermissionError:  # Windows does not open folders
        return
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
