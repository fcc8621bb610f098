"""The command `fedagrac data`: list, fetch and verify the data sets.

Only words and tables; what is found, checked and downloaded is decided in `fedagrac.data`.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from fedagrac.citations import bibtex
from fedagrac.data import catalogue, download, locating
from fedagrac.errors import one_of

__all__ = ["data_app"]

BUILT_IN = {
    "digits": ("8x8 handwritten digits, 10 classes; 1,437 + 360 samples", "CC BY 4.0 (UCI, in scikit-learn)"),
    "synthetic": ("Synthetic(alpha, beta) of the FedProx paper, 10 classes", "not needed (drawn when used)"),
}
"""What comes without files: title and licence by name."""

data_app = typer.Typer(
    help="List, fetch and verify the data sets.",
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
)

_DataDir = Annotated[
    Path | None,
    typer.Option("--data-dir", metavar="DIR", help="Look here before $FEDAGRAC_DATA and the cache folder."),
]
_Json = Annotated[bool, typer.Option("--json", help="Print the table as JSON.")]


@data_app.command("list")
def list_data(
    data_dir: _DataDir = None,
    cite: Annotated[bool, typer.Option("--cite", help="Print the BibTeX entries instead.")] = False,
    as_json: _Json = False,
) -> None:
    """Say what each data set is, how large, under which licence, and where it was found.

    [bold]Examples[/]

      fedagrac data list

      fedagrac data list --cite > data.bib

      fedagrac data list --data-dir /data --json
    """
    rows = [_built_in(name) for name in BUILT_IN]
    rows += [_description(data, data_dir) for data in catalogue.DATA_FILES.values()]
    if as_json:
        print(json.dumps(rows))
        return
    if cite:
        print("\n\n".join(dict.fromkeys(row["bibtex"] for row in rows)))
        return
    table = Table(box=None, pad_edge=False, padding=(0, 2, 1, 0))
    table.add_column("name", style="bold", no_wrap=True)
    table.add_column("size", justify="right", no_wrap=True)
    table.add_column("what, licence, where", overflow="fold")
    for row in rows:
        size, where = row["size_on_disk"], escape(_short(row["found"]))
        if row["built_in"]:
            where = "built in"
        elif row["found"] is None:
            size, where = row["download_size"], f"not here: fedagrac data fetch {row['name']}"
        lines = [escape(row["title"]), f"[dim]licence: {escape(row['licence'])}[/]", where]
        table.add_row(row["name"], "" if size is None else _bytes(size), "\n".join(lines))
    Console().print(table, highlight=False)


def _built_in(name: str) -> dict[str, Any]:
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


def _description(data: catalogue.DataSet, data_dir: Path | None) -> dict[str, Any]:
    found = locating.locate(data, data_dir)
    on_disk = None if found is None else sum((found / file.path).stat().st_size for file in data.files)
    return {
        "name": data.name,
        "title": data.title,
        "licence": data.licence,
        "built_in": False,
        "found": None if found is None else str(found),
        "size_on_disk": on_disk,
        "download_size": sum(download.size for download in data.downloads),
        "homepage": data.homepage,
        "urls": [download.url for download in data.downloads],
        "bibtex": bibtex(data.cites),
    }


@data_app.command()
def fetch(
    names: Annotated[list[str], typer.Argument(metavar="NAME...", help="The data sets to fetch.")],
    data_dir: Annotated[
        Path | None, typer.Option("--data-dir", metavar="DIR", help="Fetch to DIR/NAME, not to the cache folder.")
    ] = None,
    as_json: _Json = False,
) -> None:
    """Download data sets from their official addresses, and verify them.

    What is here and right is not downloaded again; files with other content are
    replaced. Without --data-dir they go to $FEDAGRAC_DATA, or else to the cache
    folder.

    [bold]Examples[/]

      fedagrac data fetch a9a

      fedagrac data fetch fashion-mnist cifar10 --data-dir /data
    """
    _known(names)
    notes, rows = Console(stderr=True), []
    for name in dict.fromkeys(names):
        row: dict[str, Any] = {"name": name, "status": "ok", "folder": None, "error": None}
        if name in BUILT_IN:
            row["status"] = "built in"
        else:
            try:
                row["folder"] = str(_fetched(name, data_dir))
            except locating.DataError as error:  # the other data sets may still be had
                row.update(status="failed", error=str(error))
                notes.print(f"[bold red]error[/] {escape(str(error))}", highlight=False, soft_wrap=True)
        rows.append(row)
    if as_json:
        print(json.dumps(rows))
    else:
        table = Table(box=None, pad_edge=False)
        table.add_column("name", style="bold", no_wrap=True)
        table.add_column("status", no_wrap=True)
        table.add_column("folder", overflow="fold")
        for row in rows:
            table.add_row(row["name"], _coloured(row["status"]), escape(_short(row["folder"])))
        Console().print(table, highlight=False)
    if any(row["status"] == "failed" for row in rows):
        raise typer.Exit(1)


def _fetched(name: str, data_dir: Path | None) -> Path:
    if data_dir is None:  # any verified copy will do; a folder that was asked for is filled
        folder = locating.locate(name)
        if folder is not None and all(status.state == "ok" for status in locating.verify(name, folder)):
            return folder
    return download.fetch(name, data_dir)


@data_app.command()
def verify(
    names: Annotated[
        list[str] | None, typer.Argument(metavar="[NAME...]", help="The data sets to verify; none: those here.")
    ] = None,
    data_dir: _DataDir = None,
    as_json: _Json = False,
) -> None:
    """Compare the files of data sets with their known SHA-256 (of the content, after decompression).

    Exit code 1 if a file is missing or differs. Without names, data sets that are
    not here at all are named and do not count.

    [bold]Examples[/]

      fedagrac data verify

      fedagrac data verify cifar10 --data-dir /data --json
    """
    _known(names or [])
    rows = [
        _verified(name, data_dir) for name in dict.fromkeys(names or catalogue.DATA_FILES) if name not in BUILT_IN
    ]
    if as_json:
        print(json.dumps(rows))
    else:
        for name in dict.fromkeys(names or []):
            if name in BUILT_IN:
                Console().print(f"[bold]{name}[/] is built in: nothing to verify", highlight=False)
        for row in rows:
            _print_verified(row, full=bool(names))
    if any(row["status"] == "differs" or (row["status"] == "absent" and names) for row in rows):
        raise typer.Exit(1)


def _verified(name: str, data_dir: Path | None) -> dict[str, Any]:
    folder = locating.found_in(name, data_dir)
    statuses = locating.verify(name, folder or locating.folders(name, data_dir)[0])
    status = "ok" if all(s.state == "ok" for s in statuses) else "absent" if folder is None else "differs"
    return {
        "name": name,
        "status": status,
        "folder": str(folder or locating.folders(name, data_dir)[0]),
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


def _print_verified(row: dict[str, Any], full: bool) -> None:
    console = Console()
    name, folder = row["name"], escape(_short(row["folder"]))
    if row["status"] == "absent" and not full:
        console.print(f"[bold]{name}[/] is not here: fedagrac data fetch {name}\n", highlight=False)
        return
    console.print(f"[bold]{name}[/] {folder}", highlight=False)
    table = Table(box=None, pad_edge=False)
    table.add_column("file", overflow="fold")
    table.add_column("status", no_wrap=True)
    table.add_column("size", justify="right", no_wrap=True)
    table.add_column("SHA-256", no_wrap=True)
    for file in row["files"]:
        size = "" if file["size"] is None else _bytes(file["size"])
        table.add_row(escape(file["path"]), _coloured(file["status"]), size, (file["sha256"] or "")[:16])
    console.print(table, highlight=False)
    for file in row["files"]:
        if file["status"] == "differs":
            found = file["note"] or file["sha256"]
            lines = [f"{file['path']}, SHA-256", f"  found     {found}", f"  expected  {file['expected_sha256']}"]
            console.print(escape("\n".join(lines)), highlight=False, soft_wrap=True)
    if row["status"] != "ok":
        console.print(f"to repair: fedagrac data fetch {name}", highlight=False)
    console.print()


def _known(names: list[str]) -> None:
    for name in names:
        one_of("data set", name, [*catalogue.DATA_FILES, *BUILT_IN])


def _coloured(status: str) -> str:
    colour = {"ok": "green", "built in": "green", "missing": "yellow"}.get(status, "red")
    return f"[{colour}]{status}[/]"


def _short(folder: str | None) -> str:
    """Return the folder with ~ for the home folder, so that it fits."""
    if folder is None:
        return ""
    path = Path(folder)
    try:
        return str(Path("~") / path.relative_to(Path.home()))
    except (ValueError, RuntimeError):  # elsewhere, or no home
        return folder


def _bytes(count: int) -> str:
    """Return a size in decimal units.

    Examples:
        >>> _bytes(740), _bytes(29_515), _bytes(170_052_171)
        ('740 B', '29.5 kB', '170.1 MB')
    """
    if count < 1000:
        return f"{count} B"
    return f"{count / 1e3:.1f} kB" if count < 1e6 else f"{count / 1e6:.1f} MB"
