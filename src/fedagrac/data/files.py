"""The files of the downloadable data sets: where they are looked for, how they are checked, how they are fetched.

Nothing here knows what the bytes mean; reading samples out of them is the loaders' work. Only the standard
library is imported up here, so that a machine without pooch, filelock or rich can still find and check files;
fetching imports them.

Sizes and hashes are those of the decompressed content: two gzip files of the same bytes differ in their headers
(Debian re-stamps them), and the content is what a run depends on.
"""

from __future__ import annotations

import gzip
import hashlib
import os
import re
import shutil
import stat
import sys
import tarfile
import tempfile
import zlib
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import IO, TYPE_CHECKING, Any, Literal, cast

from fedagrac.errors import FedagracError, InputError, one_of
from fedagrac.files import cache_folder, make_folder

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from rich.progress import Progress

__all__ = [
    "DATA_FILES",
    "DataError",
    "DataFile",
    "DataSet",
    "Download",
    "FileStatus",
    "data_roots",
    "fetch",
    "folders",
    "found_in",
    "locate",
    "ready",
    "verify",
]

RETRIES = 2
"""How often a broken download is started again; pooch waits 1 s, then 2 s."""

_CHUNK = 2**18
_SLACK = 2**20  # bytes that a download may hold besides the content: archive headers, a readme
_SPARE_MEMBERS = 100  # members that an archive may hold besides those wanted
_STAGING = ".fetch-"
_FINAL = (401, 403, 404, 410)  # answers that asking again does not change


class DataError(FedagracError):
    """A data set that is not here and could not be fetched; the message says which file to put where."""


@dataclass(frozen=True)
class DataFile:
    """One file of a data set.

    Attributes:
        path: where it lies in the data set's folder, with forward slashes.
        sha256: of the decompressed content.
        size: of the decompressed content, in bytes.
        compression: how the file is compressed on disk.
    """

    path: str
    sha256: str
    size: int
    compression: Literal["gzip"] | None = None


@dataclass(frozen=True)
class Download:
    """One official address and the files it gives.

    Attributes:
        url: the address.
        targets: paths of the data files it gives; inside an archive the members have these names.
        size: bytes to download, for display only.
        archive: how the files are packed; None: the address gives the one target as it lies on disk.
    """

    url: str
    targets: tuple[str, ...]
    size: int
    archive: Literal["tar.gz"] | None = None


@dataclass(frozen=True)
class DataSet:
    """A data set that is not shipped: its files, where they come from, under what terms.

    Attributes:
        name: also the name of its folder in a data root.
        title: what it is, in a line.
        files: every file that is needed.
        downloads: where the files are published.
        licence: the terms of use.
        homepage: where the data set is described.
        cites: keys of its papers in `fedagrac.citations.ENTRIES`.
        elsewhere: folders outside the data roots in which a distribution may have put exactly these files.

    Examples:
        >>> [file.path for file in DATA_FILES["a9a"].files]
        ['a9a', 'a9a.t']
    """

    name: str
    title: str
    files: tuple[DataFile, ...]
    downloads: tuple[Download, ...]
    licence: str
    homepage: str
    cites: tuple[str, ...]
    elsewhere: tuple[str, ...] = ()


@dataclass(frozen=True)
class FileStatus:
    """What `verify` found out about one file.

    Attributes:
        file: what was expected.
        path: where it was looked for.
        state: ok, missing or differs.
        size: of the decompressed content found; None where it could not be read to its end.
        sha256: of the decompressed content found; None where it could not be read to its end.
        note: why there is no hash.
    """

    file: DataFile
    path: Path
    state: Literal["ok", "missing", "differs"]
    size: int | None = None
    sha256: str | None = None
    note: str = ""

    @property
    def found(self) -> str:
        """What is there, in words."""
        if self.state == "missing":
            return "no file"
        return self.note or f"SHA-256 {self.sha256}, {self.size} bytes"

    @property
    def expected(self) -> str:
        """What should be there, in words."""
        packed = " after gzip -d" if self.file.compression else ""
        return f"SHA-256 {self.file.sha256}, {self.file.size} bytes{packed}"


def _a9a() -> DataSet:
    base = "https://www.csie.ntu.edu.tw/~cjlin/libsvmtools/datasets/binary/"
    files = (
        DataFile("a9a", "f5d5ffd8d865ff41328e7ee043e4b020816914ff6843ff15b98905ddbedce906", 2_329_875),
        DataFile("a9a.t", "1f448a153f0320399a7e40836eb207655b0bde0f21fc941cc472193daa9f5de9", 1_164_628),
    )
    return DataSet(
        name="a9a",
        title="census income (UCI Adult), 123 binary features, 2 classes; 32,561 + 16,281 samples",
        files=files,
        downloads=tuple(Download(base + file.path, (file.path,), file.size) for file in files),
        licence="CC BY 4.0 (UCI Adult, from which LIBSVM derived it)",
        homepage="https://www.csie.ntu.edu.tw/~cjlin/libsvmtools/datasets/binary.html#a9a",
        cites=("a9a",),
    )


def _fashion_mnist() -> DataSet:
    base = "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/"
    hashes = {
        "train-images-idx3-ubyte.gz": "c59f468a2f672dc815687fe0f83887768d799fd8a3f3276145d20f83aa44d888",
        "train-labels-idx1-ubyte.gz": "bad3541b69d912435c50bb6ba87bec294ff4f6a2e1246121d8633921760443d9",
        "t10k-images-idx3-ubyte.gz": "5b4141f0afbad91edebe8549f8fcffe087ea10ca49f1dbef5c9a5cd8815ce37b",
        "t10k-labels-idx1-ubyte.gz": "0402a96d92fd2663957122ceb108a494c5af83dab82d92729df917d7dec38c34",
    }
    sizes = (16 + 60_000 * 28 * 28, 8 + 60_000, 16 + 10_000 * 28 * 28, 8 + 10_000)  # idx headers and bytes
    packed = (26_421_880, 29_515, 4_422_102, 5_148)
    return DataSet(
        name="fashion-mnist",
        title="28x28 grey images of clothing, 10 classes; 60,000 + 10,000 samples",
        files=tuple(
            DataFile(name, sha256, size, "gzip")
            for (name, sha256), size in zip(hashes.items(), sizes, strict=True)
        ),
        downloads=tuple(Download(base + name, (name,), size) for name, size in zip(hashes, packed, strict=True)),
        licence="MIT (Zalando SE)",
        homepage="https://github.com/zalandoresearch/fashion-mnist",
        cites=("fashion-mnist",),
        elsewhere=("/usr/share/datasets/fashion-mnist",),
    )


def _cifar10() -> DataSet:
    hashes = {
        "data_batch_1": "cee916563c9f80d84e3cc88e17fdc0941787f1244f00a67874d45b261883ada5",
        "data_batch_2": "a591ca11fa1708a91ee40f54b3da4784ccd871ecf2137de63f51ada8b3fa57ed",
        "data_batch_3": "bbe8596564c0f86427f876058170b84dac6670ddf06d79402899d93ceea26f67",
        "data_batch_4": "014e562d6e23c72197cc727519169a60359f5eccd8945ad5a09d710285ff4e48",
        "data_batch_5": "755304fc0b379caeae8c14f0dac912fbc7d6cd469eb67a1029a08a39453a9add",
        "test_batch": "8e2eb146ae340b09e24670f29cabc6326dba54da8789dab6768acf480273f65b",
    }
    size = 10_000 * (1 + 3 * 32 * 32)  # a label byte and three colour planes
    files = tuple(DataFile(f"cifar-10-batches-bin/{name}.bin", sha256, size) for name, sha256 in hashes.items())
    # the binary release: the better known Python release is made of pickles, which can run code when read
    address = "https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz"
    return DataSet(
        name="cifar10",
        title="32x32 colour photographs, 10 classes; 50,000 + 10,000 samples",
        files=files,
        downloads=(Download(address, tuple(file.path for file in files), 170_052_171, "tar.gz"),),
        licence="none stated; research use, cite the report",
        homepage="https://www.cs.toronto.edu/~kriz/cifar.html",
        cites=("cifar10",),
    )


DATA_FILES: dict[str, DataSet] = {data.name: data for data in (_a9a(), _fashion_mnist(), _cifar10())}
"""The data sets that have files, by name."""


# where


def data_roots(data_dir: str | os.PathLike[str] | None = None) -> list[Path]:
    r"""Return the folders that hold data sets, in the order of search; fetched files go to the first.

    Args:
        data_dir: a folder to look in before all others.

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
        raise DataError("no folder for data sets, as there is no home folder: set $FEDAGRAC_DATA or --data-dir")
    return list(dict.fromkeys(roots))


def folders(data: str | DataSet, data_dir: str | os.PathLike[str] | None = None) -> list[Path]:
    """Return the folders in which the data set's files are looked for, in order."""
    data = _data_set(data)
    return [root / data.name for root in data_roots(data_dir)] + [Path(folder) for folder in data.elsewhere]


def locate(data: str | DataSet, data_dir: str | os.PathLike[str] | None = None) -> Path | None:
    """Return the first folder in which all the data set's files exist, or None; contents are not read."""
    data = _data_set(data)
    for folder in folders(data, data_dir):
        if all(os.path.isfile(folder / file.path) for file in data.files):
            return folder
    return None


def found_in(data: str | DataSet, data_dir: str | os.PathLike[str] | None = None) -> Path | None:
    """Return the folder that holds the data set: all of it, else the first that holds a part of it, else None."""
    data = _data_set(data)
    whole = locate(data, data_dir)
    if whole is not None:
        return whole
    for folder in folders(data, data_dir):
        if any(os.path.exists(folder / file.path) for file in data.files):
            return folder
    return None


def _data_set(data: str | DataSet) -> DataSet:
    return data if isinstance(data, DataSet) else DATA_FILES[one_of("data set", data, DATA_FILES)]


# whether it is right


def verify(data: str | DataSet, folder: str | os.PathLike[str]) -> list[FileStatus]:
    """Compare every file of the data set with its known size and SHA-256.

    Memory is bounded, and so is time for compressed files: decompression stops as soon as more than the expected
    size has come out.

    Args:
        data: a name in `DATA_FILES`, or a data set.
        folder: the folder that should hold the data set's files.

    Examples:
        >>> [status.state for status in verify("a9a", "/nowhere")]
        ['missing', 'missing']
    """
    return [_inspect(file, Path(folder) / file.path) for file in _data_set(data).files]


def _inspect(file: DataFile, path: Path) -> FileStatus:
    if not os.path.exists(path):  # not Path.exists, which raises where a folder may not be read
        return FileStatus(file, path, "missing")
    if not os.path.isfile(path):
        return FileStatus(file, path, "differs", note="not a file")
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


def ready(data: str | DataSet, data_dir: str | os.PathLike[str] | None = None, fetch_missing: bool = True) -> Path:
    """Return the folder with the data set's verified files, fetching them if need be: what loaders call.

    Args:
        data: a name in `DATA_FILES`, or a data set.
        data_dir: a folder to look in before the others, and to fetch to.
        fetch_missing: whether to go to the network.

    Raises:
        InputError: a file is there with other content than it should have.
        DataError: files are missing and could not be fetched.
    """
    data = _data_set(data)
    folder = locate(data, data_dir)
    if folder is None:
        if fetch_missing:
            return fetch(data, data_dir)
        raise DataError(_by_hand(data, data_dir, "it is not here and was not to be fetched"))
    for status in verify(data, folder):
        if status.state != "ok":
            raise InputError(
                f"data file {status.path}",
                status.found,
                f"{status.expected}. Delete the file, or run `{_command('fetch', data, data_dir)}`",
            )
    return folder


# getting it


class _RefusedError(Exception):
    """A download that would fail again in the same way, so it is not repeated."""


class _UnverifiedError(ValueError):
    """A download with the wrong content; pooch repeats what fails with a ValueError."""


def fetch(
    data: str | DataSet, data_dir: str | os.PathLike[str] | None = None, *, progress: bool | None = None
) -> Path:
    """Put the data set's files, verified, into the first data root and return their folder.

    Files that are there and verify are kept, the others are downloaded: into a temporary folder beside them,
    where they are unpacked and verified, and from which each is moved into place in one step. After a failure
    the temporary folder is gone, and files that had arrived whole need not be fetched again. Of several
    processes that fetch the same data set one downloads and the others wait for it.

    Args:
        data: a name in `DATA_FILES`, or a data set.
        data_dir: the data root to fetch to, before `$FEDAGRAC_DATA` and the cache folder.
        progress: whether to show progress bars on stderr; None: if stderr is a terminal.

    Raises:
        DataError: it did not work; the message says why, and which file to put where by hand.
    """
    data = _data_set(data)
    folder = data_roots(data_dir)[0] / data.name
    if not _wanted(data, folder):  # before the lock: a complete folder may be read-only
        return folder
    try:
        _fetch_into(data, folder, sys.stderr.isatty() if progress is None else progress)
    except ImportError as error:
        why = f"fetching needs {error.name}, which is not installed (pip install {error.name})"
        raise DataError(_by_hand(data, data_dir, why)) from error
    except OSError as error:
        why = f"{error.filename or folder}: {error.strerror or error}"
        raise DataError(_by_hand(data, data_dir, why)) from error
    except _RefusedError as error:
        raise DataError(_by_hand(data, data_dir, str(error))) from error
    return folder


def _wanted(data: DataSet, folder: Path) -> list[DataFile]:
    return [status.file for status in verify(data, folder) if status.state != "ok"]


def _fetch_into(data: DataSet, folder: Path, shown: bool) -> None:
    make_folder(folder.parent)
    with _alone(folder.parent / f".{data.name}.lock", data.name, shown):
        wanted = {file.path: file for file in _wanted(data, folder)}  # again: another process may have been here
        if not wanted:
            return
        make_folder(folder)
        for leftover in folder.glob(_STAGING + "*"):  # of a process that was killed: ours is the only one running
            shutil.rmtree(leftover, ignore_errors=True)
        # inside the folder, so that moves stay in one file system even where the folder is a link to another
        staging = Path(tempfile.mkdtemp(prefix=_STAGING, dir=folder))
        try:
            with _bars(shown) as bar:
                for download in data.downloads:
                    files = [wanted[path] for path in download.targets if path in wanted]
                    content = sum(file.size for file in data.files if file.path in download.targets)
                    if not files:
                        continue
                    arrived = _download(download, files, content + _SLACK, staging, bar(download.url))
                    for file in files:
                        target = folder / file.path
                        make_folder(target.parent)
                        (arrived / file.path).replace(target)
        finally:
            shutil.rmtree(staging, ignore_errors=True)
            with suppress(OSError):  # goes only if nothing is in it
                folder.rmdir()


@contextmanager
def _alone(lock_file: Path, name: str, shown: bool) -> Iterator[None]:
    """Keep other processes out until done; the operating system frees the lock of a process that dies."""
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
    """Return a folder with the wanted files of one address, verified; read `limit` bytes at most."""
    import pooch
    import requests

    arrived = staging / "files"

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
                raise _RefusedError(_in_words(error)) from error
            raise
        if download.archive:
            _unpack(Path(output_file), files, limit, arrived)
        for file in files:
            status = _inspect(file, arrived / file.path if download.archive else Path(output_file))
            if status.state != "ok":
                raise _UnverifiedError(
                    f"not the right content for {file.path}: {status.found}; {status.expected} wanted"
                )

    part = "part"
    pup = pooch.create(
        path=staging, base_url="", registry={part: None}, urls={part: download.url}, retry_if_failed=RETRIES
    )
    logger = pooch.get_logger()
    level = logger.level
    logger.setLevel("WARNING")  # it announces every file on stderr; the bar says it better
    try:
        got = Path(pup.fetch(part, downloader=attempt))
    except (_RefusedError, requests.RequestException, ValueError) as error:
        raise _RefusedError(f"{download.url}: {_in_words(error)}") from error
    finally:
        logger.setLevel(level)
    if download.archive:
        got.unlink()
    else:
        target = arrived / files[0].path
        make_folder(target.parent)
        got.replace(target)
    # pooch makes files that only their owner may read; a data folder is often shared
    usual = staging / "usual"
    usual.touch(0o664)
    for file in files:
        (arrived / file.path).chmod(stat.S_IMODE(usual.stat().st_mode))
    return arrived


def _in_words(error: Exception) -> str:
    """Say what went wrong on the network; requests answers with the names of its classes."""
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
    """A file that refuses to grow beyond a limit, so that no server fills the disk."""

    def __init__(self, file: IO[bytes], limit: int) -> None:
        self.file, self.left, self.limit = file, limit, limit

    def write(self, chunk: bytes) -> int:
        self.left -= len(chunk)
        if self.left < 0:
            raise _RefusedError(f"the server sent more than {self.limit} bytes, which cannot be the right file")
        return self.file.write(chunk)

    def flush(self) -> None:
        self.file.flush()


class _Limited:
    """A stream that ends in an error after `limit` bytes: however little the bytes were, compressed."""

    def __init__(self, stream: IO[bytes], limit: int) -> None:
        self.stream, self.left, self.limit = stream, limit, limit

    def read(self, size: int) -> bytes:
        chunk = self.stream.read(size)
        self.left -= len(chunk)
        if self.left < 0:
            raise _RefusedError(f"the archive unpacks to more than {self.limit} bytes, more than it should hold")
        return chunk


def _unpack(archive: Path, files: list[DataFile], limit: int, folder: Path) -> None:
    """Write the wanted members of a tar.gz archive to the folder, under names of our own.

    Stricter than tarfile's data filter, which strips the slash of an absolute name and admits links that stay
    inside: any member that is not a plain file or folder at a plain relative path condemns the whole archive.
    """
    wanted = {file.path: file for file in files}
    seen: set[str] = set()
    try:
        with gzip.open(archive, "rb") as plain:
            stream = _Limited(cast("IO[bytes]", plain), limit)
            # as a stream, front to back: nothing can make tarfile jump about
            with tarfile.open(fileobj=cast("IO[bytes]", stream), mode="r|") as tar:
                for number, member in enumerate(tar):
                    _check_member(member, limit)
                    if number >= len(wanted) + _SPARE_MEMBERS:
                        raise _RefusedError(
                            f"the archive has more than {number} members, more than it should hold"
                        )
                    name = PurePosixPath(member.name).as_posix()
                    content = tar.extractfile(member) if name in wanted and member.isreg() else None
                    if content is None:
                        continue
                    target = folder / name
                    make_folder(target.parent)
                    with target.open("wb") as output:
                        shutil.copyfileobj(content, output, _CHUNK)
                    seen.add(name)
    except (tarfile.TarError, EOFError, zlib.error, gzip.BadGzipFile, UnicodeError) as error:
        raise _UnverifiedError(f"the archive is damaged ({error})") from error
    missing = [path for path in wanted if path not in seen]
    if missing:
        raise _UnverifiedError(f"the archive lacks {', '.join(missing)}")


def _check_member(member: tarfile.TarInfo, limit: int) -> None:
    name = member.name
    if name.startswith(("/", "\\")) or PureWindowsPath(name).drive:
        raise _RefusedError(f"the archive is not safe to unpack: member {name!r} has an absolute path")
    if ".." in re.split(r"[/\\]", name):
        raise _RefusedError(f"the archive is not safe to unpack: member {name!r} leads out of the folder")
    if not member.isreg() and not member.isdir():
        kind = "a link" if member.issym() or member.islnk() else "a device or another special file"
        raise _RefusedError(f"the archive is not safe to unpack: member {name!r} is {kind}")
    if not 0 <= member.size <= limit:  # before tarfile skips so many bytes
        raise _RefusedError(f"the archive is not safe to unpack: member {name!r} claims {member.size} bytes")


class _Bar:
    """The progress bar that pooch asks for, drawn by rich."""

    def __init__(self, progress: Progress, description: str) -> None:
        self._progress, self._task = progress, progress.add_task(description, total=None)
        self._total: int | None = None

    @property
    def total(self) -> int | None:
        """Bytes to come."""
        return self._total

    @total.setter
    def total(self, value: int) -> None:
        self._total = value or None  # pooch says 0 where the server does not tell
        self._progress.update(self._task, total=self._total)

    def update(self, count: int) -> None:
        """Count bytes; pooch counts whole chunks, so the last one would overshoot."""
        done = self._progress.tasks[self._task].completed + count
        self._progress.update(self._task, completed=min(done, self._total or done))

    def reset(self) -> None:
        """Start again."""
        self._progress.update(self._task, completed=0)

    def close(self) -> None:
        """Leave the bar as it is; the display is shared."""


@contextmanager
def _bars(shown: bool) -> Iterator[Callable[[str], Any]]:
    """Yield what makes a bar for an address; False, which pooch takes for no bar, where none are shown."""
    if shown:
        with suppress(ImportError):
            from rich.console import Console
            from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

            columns = (TextColumn("{task.description}"), BarColumn(20), DownloadColumn(), TimeRemainingColumn())
            with Progress(*columns, console=Console(stderr=True)) as progress:
                yield lambda url: _Bar(progress, url.rsplit("/", 1)[-1])
            return
    yield lambda url: False


# words


def _command(verb: str, data: DataSet, data_dir: str | os.PathLike[str] | None) -> str:
    return f"fedagrac data {verb} {data.name}" + ("" if data_dir is None else f" --data-dir {os.fspath(data_dir)}")


def _by_hand(data: DataSet, data_dir: str | os.PathLike[str] | None, why: str) -> str:
    """Say which file to put where."""
    folder = data_roots(data_dir)[0] / data.name
    absent = {file.path for file in _wanted(data, folder)}
    lines = [f"{data.name} is not ready: {why}.", f"To do it by hand, put into {folder}"]
    for download in data.downloads:
        paths = [path for path in download.targets if path in absent]
        if paths:
            lines.append(f"  from {download.url}" + (" (unpack it there)" if download.archive else ""))
            lines += [f"    {path}" for path in paths]
    lines.append(f"and check with: {_command('verify', data, data_dir)}")
    lines.append(f"Or name a folder that holds {data.name}/ in $FEDAGRAC_DATA or --data-dir.")
    return "\n".join(lines)
