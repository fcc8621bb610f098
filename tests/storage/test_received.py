"""Files that were received: nothing is imported from them, obeyed by a terminal, or read without a bound."""

import io
import json
import logging
import os
import re
import subprocess
import sys
import time
import tracemalloc

import pytest
import tomli_w

import fedagrac as fg
from command_line import command
from fedagrac.callbacks.progress import Progress
from fedagrac.cli.printing import Terminal, print_error, showing_log
from fedagrac.data import locating, sources
from fedagrac.errors import InputError
from fedagrac.experiments.schema import Experiment
from fedagrac.files import read_bounded
from fedagrac.flower.operating import read_exclusions
from fedagrac.imports import Imports
from fedagrac.parsing import printable
from fedagrac.report import read_run, render_page
from fedagrac.storage import rounds
from fedagrac.storage.checkpoints import CheckpointError
from fedagrac.storage.run_folder import LARGEST, LONGEST_LINE, OUTPUT_NAMES, read_history
from run_folders import record, write_run

NASTY = "\x1b]0;pwned\x07 [red]x[/red] [/] \u202eevil\u2066 \x9b2J \r\n:skull: <b>bold</b>"
OBEYED = re.compile("[\x00-\x09\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")
HUGE = 200 * 2**30


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def sparse(path, size=HUGE):
    """Make a file of a size that takes no room on the disk."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("ab") as file:
        try:
            os.truncate(file.fileno(), size)
        except OSError as error:
            pytest.skip(f"no sparse files here: {error}")
    return path


# imports


def received(folder, **changes):
    """Write a folder of results whose experiment names a module beside it, which leaves a file when imported."""
    table = {
        "name": "small", "rounds": 1, "lr": 0.1, "data": {"name": "digits", "clients": 2},
        "steps": {"kind": "constant", "steps": 1}, "algorithm": [{"name": "fedavg"}], **changes,
    }  # fmt: skip
    folder.mkdir()
    (folder / "experiment.toml").write_text(tomli_w.dumps(table))
    (folder / "evil.py").write_text(f"open({str(folder / 'imported')!r}, 'w').close()\ndef make(**_): pass\n")
    return folder


EVIL = [{"model": {"name": "evil:make"}}, {"data": {"name": "evil:make"}}, {"algorithm": [{"name": "evil:make"}]}]


@pytest.mark.parametrize("changes", EVIL)
@pytest.mark.parametrize("place", ["beside", "inside", "module in the current folder"])
def test_resuming_a_received_folder_imports_nothing(changes, place, tmp_path, monkeypatch, capsys):
    folder = received(tmp_path / "received", **changes)
    out = "received"
    if place == "inside":
        monkeypatch.chdir(folder)
        out = "."
    elif place == "module in the current folder":
        (folder / "evil.py").rename(tmp_path / "evil.py")
    code, _, err = command("run", "--resume", "--out", out, capsys=capsys)
    assert code == 2
    assert "evil:make" in err
    assert "--trust-imports" in err
    assert not (folder / "imported").exists()
    assert "evil" not in sys.modules


def test_a_real_process_imports_only_what_is_trusted(tmp_path):
    folder = received(tmp_path / "received", model={"name": "evil:make"})
    words = [sys.executable, "-m", "fedagrac", "run", "--resume", "--out", "received"]
    refused = subprocess.run(words, capture_output=True, text=True, check=False)
    assert (refused.returncode, (folder / "imported").exists()) == (2, False), refused.stderr
    subprocess.run([*words, "--trust-imports"], capture_output=True, check=False)
    assert (folder / "imported").exists()


def test_an_own_experiment_resumes_with_its_file(tmp_path, monkeypatch, capsys):
    """The command that is printed names the file, because the folder alone may import nothing."""
    folder = received(tmp_path / "mine", model={"name": "evil:make"})
    (folder / "evil.py").write_text("from torch import nn\ndef make(): return nn.Linear(64, 10)\n")

    def full(prepared, out, *_, **__):
        out.mkdir()
        (out / "experiment.toml").write_text("")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("fedagrac.experiments.run.run_experiment", full)
    _, _, err = command("run", "mine/experiment.toml", "--set", "rounds=2", "--out", "out", capsys=capsys)
    resume = re.search("resume with: fedagrac (.*)", err)[1]
    assert resume == "run --resume --out out mine/experiment.toml --set rounds=2"
    monkeypatch.undo()
    monkeypatch.chdir(tmp_path)
    code, _, err = command(*resume.replace("--out out", "--out out2").split(), capsys=capsys)
    assert code == 0, err


def test_local_modules_are_for_experiment_files_only(tmp_path):
    (tmp_path / "evil.py").write_text("raise SystemExit\n")
    with pytest.raises(InputError, match="`trusted`"):
        Imports(tmp_path, local=False).check("evil:make")
    Imports(tmp_path).check("evil:make")


# terminals and pages


def test_printable_text_has_nothing_that_is_obeyed():
    assert printable("\x1b[2J\n\u202e\udc80\x9b") == "\\x1b[2J\\n\\u202e\\udc80\\x9b"
    assert printable("Zürich, 東京, \U0001f600 a\u200db") == "Zürich, 東京, \U0001f600 a\u200db"
    every = "".join(map(chr, range(0x110000)))
    assert not OBEYED.search(printable(every))
    assert "\n" not in printable(every)


def nasty_run(folder):
    """Write a run whose label, reason, names of clients and settings hold escape sequences."""
    write_run(folder, [record(1, 0.5, 1.0)], status="diverged", reason=NASTY, label=NASTY, note=NASTY)
    federation = {
        "name": NASTY, "clients": 2, "samples": 3, "sizes_range": [1, 2], "steps_range": [1, 1], "steps_mean": 1.0,
        "shown": [0, 1], "sizes": [1, 2], "steps": [1, 1], "labels": [[1, 0], [1, 1]], "names": [NASTY, "b"],
    }  # fmt: skip
    (folder / "federation.json").write_text(json.dumps(federation))
    (folder / "environment.json").write_text(json.dumps({"device": NASTY}))
    columns = {"client": [0, 1], "name": [NASTY, "b"], "samples": [1, 2], "steps": [1, 2], "accuracy": [0.5, 1.0]}
    (folder / "per_client.json").write_text(json.dumps({**columns, "loss": [1.0, 2.0]}))
    return folder


def test_a_report_on_received_runs_prints_no_escape_sequence(tmp_path, capsys):
    code, out, err = command("report", str(nasty_run(tmp_path / "run")), "--out", "page", capsys=capsys)
    assert code == 0, err
    assert not OBEYED.search(out + err)
    said = out.replace("\n", "").replace(" ", "")
    assert "[red]x[/red][/]" in said
    assert "\\x1b]0;pwned\\x07" in said
    assert ":skull:" in said
    assert (
        len([line for line in out.splitlines() if "pwned" in line]) <= 3
    )  # a label is one cell, a reason one line


def test_the_page_of_received_runs_obeys_nothing(tmp_path):
    page = render_page([read_run(nasty_run(tmp_path / "run"))])
    own, library = page.split('<script id="figures" type="application/json">')
    assert not OBEYED.search(own)
    assert "<b>bold</b>" not in own
    assert "\\x1b]0;pwned" in own
    figures = json.loads(library.split("</script>")[0])
    texts = [text for figure in figures for text in texts_in(figure)]
    assert not OBEYED.search("".join(texts))
    drawn = "".join(text for figure in figures for part in ("data", "layout") for text in texts_in(figure[part]))
    assert "pwned" in drawn
    assert "<b>bold</b>" not in drawn  # Plotly obeys tags


def texts_in(value):
    """Return every text in nested tables and lists."""
    if isinstance(value, str):
        return [value]
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return [text for one in inner for text in texts_in(one)]


def test_a_terminal_gets_the_styles_of_rich_and_nothing_else():
    written = io.StringIO()
    terminal = Terminal(file=written, force_terminal=True, width=200)
    with showing_log(terminal, quiet=False):
        logging.getLogger("fedagrac").info("client %s: %s", NASTY, 3)
    with Progress(1, 1, terminal) as progress:
        progress.stage("\x1b]0;pwned\x07")
    assert "client" in written.getvalue()
    rest = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]|\r", "", written.getvalue())
    assert not OBEYED.search(rest)
    assert "pwned" in rest
    assert "client \\x1b]0;pwned\\x07 [red]x[/red]" in re.sub("\n", "", rest)


def test_an_error_is_one_line(capsys):
    print_error(f"{NASTY}\nerror another")
    assert capsys.readouterr().err.count("\n") == 1


def test_labels_with_markup_run(tmp_path, capsys):
    """Markup in a label is text, also in the progress bar."""
    experiment = received(tmp_path / "mine", algorithm=[{"name": "fedavg", "label": "[red]x[/red] [/]"}])
    code, out, err = command("run", str(experiment / "experiment.toml"), "--out", "out", capsys=capsys)
    assert code == 0, err
    assert "[red]x[/red] [/]" in out


# labels


@pytest.mark.parametrize("label", ["\x1b]0;pwned\x07", "a\nb", "\u202egva", "x" * 20_000])
def test_labels_that_cannot_be_shown_are_refused_at_the_start(label, tmp_path, capsys):
    file = received(tmp_path / "mine", algorithm=[{"name": "fedavg", "label": label}]) / "experiment.toml"
    for words in (["run"], ["sweep", "--grid", "algorithm.lr=1,2"], ["theory"]):
        code, _, err = command(words[0], str(file), *words[1:], "--out", "out", capsys=capsys)
        assert code == 2
        assert "label" in err
        assert len(err) < 400
        assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "label", [*sorted(OUTPUT_NAMES), "Figures", "REPORT.html", "  checkpoint ", "summary.JSON"]
)
def test_labels_that_are_names_of_output_are_refused_at_the_start(label, tmp_path, capsys):
    table = {"name": "small", "lr": 0.1, "steps": {"kind": "constant", "steps": 1}}
    with pytest.raises(InputError, match=r"algorithm\[0\].label.*another label"):
        Experiment.of({**table, "algorithm": [{"name": "fedavg", "label": label}]})


def test_a_sweep_refuses_labels_that_are_names_of_output(tmp_path, capsys):
    file = received(tmp_path / "mine", algorithm=[{"name": "fedavg", "label": "figures"}]) / "experiment.toml"
    for words in (["run"], ["sweep", "--grid", "algorithm.lr=1,2"]):
        code, _, err = command(words[0], str(file), *words[1:], "--out", "out", capsys=capsys)
        assert (code, "figures" in err, (tmp_path / "out").exists()) == (2, True, False)


def test_every_file_beside_run_folders_is_a_name_of_output(tmp_path, capsys):
    experiment = received(tmp_path / "mine") / "experiment.toml"
    assert command("run", str(experiment), "--out", "out", capsys=capsys)[0] == 0
    assert command("sweep", str(experiment), "--grid", "algorithm.lr=1,2", "--out", "swept", capsys=capsys)[0] == 0
    names = {path.name for path in (tmp_path / "out").iterdir()} | {
        path.name for path in (tmp_path / "swept").iterdir() if not path.name.startswith("seed-")
    }
    names |= {path.name for path in (tmp_path / "out" / "fedavg").iterdir()}
    assert {name for name in names if not name.startswith(".")} - {"fedavg"} <= OUTPUT_NAMES


# sizes


def test_a_long_label_in_a_received_run_is_refused_by_name(tmp_path, capsys):
    """Its 20,000 characters were set in every legend: matplotlib drew glyph by glyph for 40 s."""
    write_run(tmp_path / "run", [record(1, 0.5)], label="x" * 20_000)
    began = time.monotonic()
    code, _, err = command("report", "run", capsys=capsys)
    assert (code, "label" in err, "at most 200 characters" in err) == (2, True, True)
    assert time.monotonic() - began < 10


OTHERS = ("sweep.json", "exclude.json")
"""Files that are not read with a run: of a sweep, and of a server that runs."""


@pytest.mark.parametrize("name", [name for name in LARGEST if name not in OTHERS])
def test_a_file_of_a_run_that_is_too_large_is_not_read(name, tmp_path, capsys):
    run = write_run(tmp_path / "run", [record(1, 0.5)])
    sparse(run / name)
    words = ("flower", "status") if name == "failure.json" else ("report",)
    code, _, err = command(*words, "run", capsys=capsys)
    assert (code, name in err, "at most" in err) == (2, True, True), err


def test_a_list_of_excluded_clients_that_is_too_large_is_not_read(tmp_path):
    sparse(tmp_path / "exclude.json")
    with pytest.raises(fg.InputError, match="214,748,364,800 bytes"):
        read_exclusions(tmp_path / "exclude.json", 3)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no FIFOs here")
@pytest.mark.parametrize("name", ["history.jsonl", "status.json"])
def test_a_fifo_in_place_of_a_file_is_not_waited_for(name, tmp_path, capsys):
    run = write_run(tmp_path / "run", [record(1, 0.5)])
    (run / name).unlink()
    os.mkfifo(run / name)
    code, _, err = command("report", "run", capsys=capsys)
    assert (code, "a regular file" in err) == (2, True), err


def test_a_bounded_file_is_read_to_its_bound(tmp_path):
    (tmp_path / "file").write_bytes(b"1234")
    assert read_bounded(tmp_path / "file", 4) == b"1234"
    with pytest.raises(InputError, match="file = '4 bytes': expected at most 3 bytes"):
        read_bounded(tmp_path / "file", 3)


def test_a_history_has_a_longest_line_and_a_largest_number_of_rounds(tmp_path, monkeypatch):
    run = write_run(tmp_path / "run", [record(n, 0.5) for n in range(1, 5)])
    sparse(run / "history.jsonl", LARGEST["history.jsonl"])  # after four rounds, one line of zeros
    with pytest.raises(InputError, match=f"a line of more than {LONGEST_LINE:,} bytes"):
        read_run(run)
    with pytest.raises(CheckpointError, match="a line of more than"):
        read_history(run / "history.jsonl", 5)
    assert len(read_history(run / "history.jsonl", 4)) == 4
    write_run(run, [record(n, 0.5) for n in range(1, 5)])
    monkeypatch.setattr(rounds, "MOST_ROUNDS", 3)
    with pytest.raises(InputError, match="more than 3 rounds"):
        read_run(run)


def test_the_rounds_of_a_history_increase(tmp_path):
    run = write_run(tmp_path / "run", [record(1, 0.5), record(1, 0.6)])
    with pytest.raises(InputError, match="line 2: round = 1: expected a number above 1"):
        read_run(run)


def test_a_long_history_takes_little_memory_and_its_records_stay_in_the_file(tmp_path):
    number, more = 20_000, {"dropped": list(range(50))}
    run = write_run(tmp_path / "run", [record(n, 0.5, **more) for n in range(1, number + 1)])
    read_run(run)  # imports what it needs
    tracemalloc.start()
    history = read_run(run).history
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 200 * number  # 64 bytes a round, and room to grow; records of 500 bytes are not kept
    assert len(history) == number
    assert history[-1] == record(number, 0.5, **more)
    assert [r["round"] for r in history[3:5]] == [4, 5]
    assert sum(r["bytes_total"] for r in history) == 1000 * number * (number + 1) // 2
    assert history.column("bytes_total").tolist() == [1000 * n for n in range(1, number + 1)]


def test_a_data_file_that_is_too_large_is_not_read(tmp_path, capsys):
    for path in ("a9a/a9a", "a9a/a9a.t", "fashion-mnist/train-images-idx3-ubyte.gz"):
        sparse(tmp_path / "data" / path)
    began = time.monotonic()
    with pytest.raises(InputError, match=r"a9a/a9a = '214748364800 bytes, more than"):
        fg.Federation.load("a9a", clients=2, data_dir=tmp_path / "data")
    code, out, _ = command("data", "verify", "a9a", "--data-dir", str(tmp_path / "data"), capsys=capsys)
    assert (code, "214748364800 bytes" in out) == (1, True)
    with pytest.raises(InputError, match="214748364800 bytes"):
        sources.read_libsvm(tmp_path / "data/a9a/a9a", 32_561, 123)
    with pytest.raises(InputError, match="214748364800 bytes"):
        sources.read_idx(tmp_path / "data/fashion-mnist/train-images-idx3-ubyte.gz", (60_000, 28, 28))
    assert time.monotonic() - began < 20


@pytest.mark.parametrize("name", ["a9a", "fashion-mnist", "cifar10", "shakespeare"])
def test_every_data_file_is_refused_by_its_size(name, tmp_path):
    first, *_ = locating.data_set(name).files
    status = locating.inspect_file(first, sparse(tmp_path / first.path))
    assert status.state == "differs"
    assert status.note.startswith(f"{HUGE} bytes, more than")
