"""Where things are kept on disk, and how files are written there: never so that everybody may write to them."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path

__all__ = [
    "cache_folder",
    "make_folder",
    "naming",
    "opener",
    "sync",
    "whole_or_not_at_all",
    "write_atomically",
]


def cache_folder(platform: str = sys.platform) -> Path | None:
    """Return the user's cache folder for this package, by the platform's conventions; None without a home."""
    try:
        if platform == "win32":
            base = Path(os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local")
        elif platform == "darwin":
            base = Path.home() / "Library" / "Caches"
        else:
            base = Path(os.environ.get("XDG_CACHE_HOME", ""))
            if not base.is_absolute():  # the XDG rules: unset, empty and relative values do not count
                base = Path.home() / ".cache"
    except RuntimeError:
        return None
    return base / "fedagrac"


def make_folder(path: Path) -> None:
    """Make a folder and those above it that are missing; whatever the umask, not everybody may write to them."""
    if not path.is_dir():
        make_folder(path.parent)
        path.mkdir(0o775, exist_ok=True)  # its option `parents` would make those with the umask's rights


def opener(path: str, flags: int) -> int:
    """Open a file for `open(..., opener=opener)`; whatever the umask, not everybody may write to it.

    Examples:
        >>> import tempfile
        >>> file = Path(tempfile.mkdtemp()) / "mine"
        >>> with open(file, "w", opener=opener) as mine:
        ...     print("text", file=mine)
        >>> file.stat().st_mode & 0o002
        0
    """
    return os.open(path, flags, 0o664)


@contextlib.contextmanager
def naming(path: Path) -> Iterator[None]:
    """Say which file it was: a full disk is reported without a name."""
    try:
        yield
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error


@contextlib.contextmanager
def whole_or_not_at_all(path: Path) -> Iterator[Path]:
    """Give a temporary file to write, which takes the place of `path` once it is safely on the disk."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with naming(path):
            os.close(opener(str(temporary), os.O_WRONLY | os.O_CREAT | os.O_TRUNC))
            yield temporary
            sync(temporary)
            temporary.replace(path)
            sync(path.parent)  # the new name is on the disk, too
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)


def write_atomically(path: Path, content: bytes) -> None:
    """Write a file so that it is either whole or not there."""
    with whole_or_not_at_all(path) as temporary:
        temporary.write_bytes(content)


def sync(path: Path) -> None:
    """Wait until a file, or the names in a folder, are on the disk."""
    try:
        descriptor = os.open(path, os.O_RDONLY if path.is_dir() else os.O_RDWR)
    except PermissionError:  # a folder, on Windows
        return
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
