"""Unpacking archives that come from the network, which may be damaged or hostile."""

from __future__ import annotations

import gzip
import re
import shutil
import tarfile
import zlib
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import IO, TYPE_CHECKING, cast

from fedagrac.files import make_folder

if TYPE_CHECKING:
    from collections.abc import Sequence

    from fedagrac.data.catalogue import DataFile

__all__ = ["RefusedError", "UnverifiedError", "unpack"]

_CHUNK = 2**18


class RefusedError(Exception):
    """A download would fail again in the same way, so it is not repeated."""


class UnverifiedError(ValueError):
    """A download has the wrong content; a ValueError, because pooch repeats those."""


class _Limited:
    """A stream that raises an error after `limit` bytes, which bounds what a small archive can unpack to."""

    def __init__(self, stream: IO[bytes], limit: int) -> None:
        self.stream, self.left, self.limit = stream, limit, limit

    def read(self, size: int) -> bytes:
        chunk = self.stream.read(size)
        self.left -= len(chunk)
        if self.left < 0:
            raise RefusedError(f"the archive unpacks to more than {self.limit} bytes, more than it should hold")
        return chunk


def unpack(
    archive: Path, files: Sequence[DataFile], limit: int, folder: Path, inside: str = "", spare: int = 100
) -> None:
    """Write the wanted members of a tar.gz archive to a folder, under the paths of the files.

    `inside` is the folder in the archive that holds the files; by default they are at the top. `spare` is how many
    members the archive may have besides the wanted ones.

    Any member that is not a plain file or folder at a plain relative path makes the whole archive invalid.
    Tarfile's data filter is less strict: it strips the slash of an absolute name and admits links that stay
    inside.

    Raises:
        RefusedError: the archive is not safe to unpack, or unpacks to more than `limit` bytes.
        UnverifiedError: the archive is damaged, or lacks a file.
    """
    wanted = {(PurePosixPath(inside) / file.path).as_posix(): file for file in files}
    written: set[str] = set()
    try:
        with gzip.open(archive, "rb") as plain:
            stream = _Limited(cast("IO[bytes]", plain), limit)
            # read as a stream, from front to back, so that tarfile never seeks
            with tarfile.open(fileobj=cast("IO[bytes]", stream), mode="r|") as tar:
                for number, member in enumerate(tar):
                    _check_member(member, limit)
                    if number >= len(wanted) + spare:
                        raise RefusedError(f"the archive has more than {number} members, more than it should hold")
                    name = PurePosixPath(member.name).as_posix()
                    content = tar.extractfile(member) if name in wanted and member.isreg() else None
                    if content is None:
                        continue
                    target = folder / wanted[name].path
                    make_folder(target.parent)
                    with target.open("wb") as output:
                        shutil.copyfileobj(content, output, _CHUNK)
                    written.add(name)
    except (tarfile.TarError, EOFError, zlib.error, gzip.BadGzipFile, UnicodeError) as error:
        raise UnverifiedError(f"the archive is damaged ({error})") from error
    missing = [path for path in wanted if path not in written]
    if missing:
        raise UnverifiedError(f"the archive lacks {', '.join(missing)}")


def _check_member(member: tarfile.TarInfo, limit: int) -> None:
    """Refuse a member that could write outside the folder, or that claims more bytes than the limit."""
    name = member.name
    if name.startswith(("/", "\\")) or PureWindowsPath(name).drive:
        raise RefusedError(f"the archive is not safe to unpack: member {name!r} has an absolute path")
    if ".." in re.split(r"[/\\]", name):
        raise RefusedError(f"the archive is not safe to unpack: member {name!r} leads out of the folder")
    if not member.isreg() and not member.isdir():
        kind = "a link" if member.issym() or member.islnk() else "a device or another special file"
        raise RefusedError(f"the archive is not safe to unpack: member {name!r} is {kind}")
    if not 0 <= member.size <= limit:  # checked before tarfile skips that many bytes
        raise RefusedError(f"the archive is not safe to unpack: member {name!r} claims {member.size} bytes")
