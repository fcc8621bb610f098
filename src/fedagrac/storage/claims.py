"""Folders for one process alone: making a new one, claiming one, and cleaning up after a killed process."""

from __future__ import annotations

import contextlib
import itertools
import re
from collections.abc import Iterator
from pathlib import Path

from fedagrac.errors import InputError
from fedagrac.files import make_folder

__all__ = [
    "LOCK",
    "claimed",
    "first_missing",
    "is_claimed",
    "is_leftover",
    "make_unused_folder",
    "new_folder",
    "remove_leftovers",
]

LOCK = ".lock"
"""The file by which a process claims a folder."""


def is_leftover(path: Path) -> bool:
    """Return whether a file is what a killed process leaves behind: a lock or a temporary file.

    Examples:
        >>> is_leftover(Path(".lock")), is_leftover(Path(".status.json.4711")), is_leftover(Path("status.json"))
        (True, True, False)
    """
    ours, of_safetensors = r"\..+\.(toml|jsonl?|safetensors)\.\d+", r"\.tmp[A-Za-z0-9]{6}"
    return path.name == LOCK or re.fullmatch(f"{ours}|{of_safetensors}", path.name) is not None


def remove_leftovers(folder: Path) -> None:
    """Remove the temporary files of killed processes. Only the process that claimed the folder may do this."""
    for path in folder.rglob(".*"):
        if is_leftover(path) and path.name != LOCK:
            path.unlink(missing_ok=True)


def first_missing(folder: Path) -> Path | None:
    """Return the outermost of a folder and its parents that does not exist, or None if all of them exist.

    Examples:
        >>> first_missing(Path("/no/such/place")), first_missing(Path("/"))
        (PosixPath('/no'), None)
    """
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    return missing[-1] if missing else None


@contextlib.contextmanager
def claimed(folder: Path) -> Iterator[None]:
    """Hold a folder for this process alone. The claim ends with the process, however the process ends.

    Folders that did not exist before are removed again if nothing was written to them.
    """
    from filelock import FileLock, Timeout

    if folder.exists() and not folder.is_dir():
        raise InputError("out", str(folder), "a new or empty folder: this one is a file")
    outermost = first_missing(folder)
    make_folder(folder)
    lock = FileLock(folder / LOCK, timeout=0, mode=0o644)
    try:
        lock.acquire()
    except Timeout:
        accepted = "a folder that no other process writes to: wait until the other one ends, or name a new folder"
        raise InputError("out", str(folder), accepted) from None
    (folder / LOCK).touch()  # its time says since when the folder is held
    try:
        yield
    finally:
        if outermost is not None:
            _remove_if_unused(folder, outermost)
        lock.release()


def is_claimed(folder: Path) -> bool:
    """Return whether a process holds a folder.

    Examples:
        >>> import tempfile
        >>> folder = Path(tempfile.mkdtemp())
        >>> with claimed(folder):
        ...     print(is_claimed(folder))
        True
        >>> is_claimed(folder)
        False
    """
    import fcntl  # FileLock would need the right to write

    try:
        lock = (folder / LOCK).open("rb")
    except FileNotFoundError:
        return False
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)  # it ends when the file is closed
        except BlockingIOError:
            return True
    return False


@contextlib.contextmanager
def new_folder(stem: Path) -> Iterator[Path]:
    """Make a folder that no other process has, as `make_unused_folder` does, and yield it.

    The folder, and parents that did not exist before, are removed again if nothing was written to them.
    """
    outermost = first_missing(stem.parent)
    folder = make_unused_folder(stem)
    try:
        yield folder
    finally:
        _remove_if_unused(folder, outermost or folder)


def make_unused_folder(stem: Path) -> Path:
    """Make the folder `stem`, or `stem-2`, `stem-3`, ... if it exists. Return the folder.

    Two processes never get the same folder.

    Examples:
        >>> import tempfile
        >>> stem = Path(tempfile.mkdtemp()) / "mine"
        >>> [make_unused_folder(stem).name for _ in range(3)]
        ['mine', 'mine-2', 'mine-3']
    """
    make_folder(stem.parent)
    for number in itertools.count(1):
        folder = stem if number == 1 else stem.with_name(f"{stem.name}-{number}")
        with contextlib.suppress(FileExistsError):
            folder.mkdir(0o775)
            break
    return folder


def _remove_if_unused(folder: Path, outermost: Path) -> None:
    """Remove a folder and its parents up to `outermost` if it holds nothing but a lock."""
    if not folder.is_dir() or any(path.name != LOCK for path in folder.iterdir()):
        return
    (folder / LOCK).unlink(missing_ok=True)
    for path in (folder, *folder.parents):
        with contextlib.suppress(OSError):  # another process has begun to use it
            path.rmdir()
        if path == outermost:
            break
