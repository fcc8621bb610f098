"""Where things are kept on disk, and how files are written there."""

from __future__ import annotations

import contextlib
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path

from fedagrac.errors import InputError

__all__ = [
    "LOCK",
    "cache_folder",
    "claimed",
    "is_leftover",
    "naming",
    "remove_leftovers",
    "sync",
    "whole_or_not_at_all",
    "write_atomically",
]

LOCK = ".lock"
"""The file by which a process claims a folder."""


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
        descriptor = os.open(path, os.O_RDONLY)
    except PermissionError:  # a folder, on Windows
        return
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def is_leftover(path: Path) -> bool:
    """Say whether this is what a killed process leaves behind beside its files: a lock or a temporary file.

    Examples:
        >>> is_leftover(Path(".lock")), is_leftover(Path(".status.json.4711")), is_leftover(Path("status.json"))
        (True, True, False)
    """
    return path.name == LOCK or re.fullmatch(r"\..+\.(toml|jsonl?|safetensors)\.\d+", path.name) is not None


def remove_leftovers(folder: Path) -> None:
    """Remove the temporary files of killed processes; for whoever has claimed the folder."""
    for path in folder.rglob(".*"):
        if is_leftover(path) and path.name != LOCK:
            path.unlink(missing_ok=True)


@contextlib.contextmanager
def claimed(folder: Path, made: bool = False, field: str = "--out") -> Iterator[None]:
    """Hold a folder for this process alone; the claim ends with the process, however that ends.

    A folder that did not exist, or that was `made` for this purpose, is gone afterwards if nothing was written.
    """
    from filelock import FileLock, Timeout

    made = made or not folder.exists()
    if folder.exists() and not folder.is_dir():
        raise InputError(field, str(folder), "a new or empty folder: this one is a file")
    with naming(folder):
        folder.mkdir(parents=True, exist_ok=True)
    lock = FileLock(folder / LOCK, timeout=0, mode=0o644)
    try:
        lock.acquire()
    except Timeout:
        accepted = "a folder that no other process writes to: one does now, wait for its end or take a new one"
        raise InputError(field, str(folder), accepted) from None
    try:
        yield
    finally:
        if made and [path.name for path in folder.iterdir()] == [LOCK]:
            (folder / LOCK).unlink()
            folder.rmdir()
        lock.release()
