"""The command as a whole: start-up, help, wrong usage, errors."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import fedagrac as fg
from command_line import command, process
from fedagrac.cli.app import main
from fedagrac.cli.computing import advising
from fedagrac.engines.ranks import LostRankError
from fedagrac.errors import InputError

COMMANDS = [
    "run", "report", "sweep", "theory", "reproduce", "bench", "doctor",
    "data list", "data fetch", "data verify", "flower new", "flower keys", "flower gate", "flower status",
]  # fmt: skip
WRONG = {
    "rum": "Did you mean 'run'?",
    "run --sett a=b": "Did you mean --set?",
    "run no.toml": "experiment file = 'no.toml': expected a file that exists",
    "run --resume": "--out DIR",
    "run --resume --out no": "--out = 'no': expected the folder of an experiment",
    "report": "Missing argument 'DIR...'",
    "report runs --out file": "--out = 'file': expected a folder: this is a file",
    "sweep": "Missing argument 'EXPERIMENT.toml'",
    "sweep a.toml": "Missing option '--grid'",
    "sweep no.toml --grid algorithm.lr=1,2": "expected a file that exists",
    "sweep no.toml --grid algorithm.lr=1,2 --seeds 0": "--seeds = 0: expected an integer of at least 1",
    "sweep no.toml --grid algorithm.lr=1,2 --by luck": "--by = 'luck': expected one of accuracy, rounds, loss",
    "sweep no.toml --grid algorithm.lr=1,2 --resume": "--out DIR",
    "theory no.toml": "expected a file that exists",
    "theory no.toml --seeds 0": "--seeds = 0: expected an integer of at least 1",
    "reproduce": "Missing argument 'NAME'",
    "reproduce table1 --scale large": "--scale = 'large': expected one of quick, medium, paper",
    "reproduce table1 --time-budget 0": "--time-budget = 0.0: expected a number above 0",
    "bench --parts speed": "--parts = 'speed': expected one of engines, clients, spread, size",
    "bench --budget 0": "--budget = 0.0: expected a number above 0",
    "doctor --jsno": "Did you mean --json?",
    "data fetsh": "Did you mean 'fetch'?",
    "flower keys": "Missing argument 'DIR'",
    "flower gate": "Missing argument 'KEYS'",
}
"""Wrong usage, and what the answer holds."""

SCRIPT = """
import contextlib, io, json, sys
from fedagrac.cli.app import main
answers = {}
for line in sys.argv[1:]:
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            main(line.split())
        except SystemExit as end:
            code = end.code or 0
    loaded = sorted({"torch", "numpy"} & set(sys.modules))
    answers[line] = {"code": code, "out": out.getvalue(), "err": err.getvalue(), "loaded": loaded}
print(json.dumps(answers))
"""


@pytest.fixture(scope="module")
def answers(tmp_path_factory):
    """What the command answers, and which large libraries it has loaded by then, in one new process."""
    lines = [
        "--version",
        "--help",
        "data --help",
        "flower --help",
        *[f"{name} --help" for name in COMMANDS],
        *WRONG,
    ]
    folder = tmp_path_factory.mktemp("answers")
    (folder / "file").touch()
    environment = {**os.environ, "COLUMNS": "80", "NO_COLOR": "1"}
    options = {"cwd": folder, "env": environment, "capture_output": True, "text": True}
    return json.loads(subprocess.run([sys.executable, "-c", SCRIPT, *lines], check=True, **options).stdout)


def test_help_version_and_wrong_usage_answer_without_torch(answers):
    assert {line: answer["loaded"] for line, answer in answers.items() if answer["loaded"]} == {}


def test_help_shows_examples_of_every_command_within_80_columns(answers):
    assert all(name.split()[0] in answers["--help"]["out"] for name in COMMANDS)
    for name in COMMANDS:
        answer = answers[f"{name} --help"]
        assert answer["code"] == 0
        examples = answer["out"].split("Example")[1]
        assert f"   fedagrac {name}" in examples
        assert max(map(len, answer["out"].splitlines())) <= 80
        lines = examples.split("╭")[0].splitlines()[1:]
        assert all(line.split()[0] in ("fedagrac", "torchrun") for line in lines if line.strip()), (
            name
        )  # none wraps


@pytest.mark.parametrize("line", WRONG)
def test_wrong_usage_exits_with_2_and_says_what_to_do(line, answers):
    answer = answers[line]
    assert answer["code"] == 2
    assert answer["out"] == ""
    assert WRONG[line] in " ".join(answer["err"].replace("│", " ").split())
    assert "Traceback" not in answer["err"]


def test_the_version(answers):
    assert answers["--version"]["out"].strip() == f"fedagrac {fg.__version__}"
    assert process("--version").stdout.strip() == f"fedagrac {fg.__version__}"


def test_a_real_process_exits_with_2_and_one_line():
    done = process("run", "--set", "lr=-1")
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.startswith("error")
    assert "Traceback" not in done.stderr
    assert process("rum").returncode == 2
    assert process("run", "--sett", "a=b").returncode == 2


def test_square_brackets_in_messages_survive(capsys):
    _, out, _ = command("doctor", capsys=capsys)
    assert "fedagrac[mlflow]" in out or "mlflow" in out.split("not installed")[0]
    _, _, err = command("run", "--set", "name=[bold]", capsys=capsys)
    assert "[bold]" in err


def test_errors_name_the_option_that_was_typed_and_the_key_of_a_file(capsys):
    algorithm = '[[algorithm]]\nname = "fedavg"\nlr = 1\n'
    Path("a.toml").write_text(f'name = "a"\nout = 3\n[steps]\nkind = "constant"\nsteps = 3\n{algorithm}')
    Path("b.toml").write_text(Path("a.toml").read_text().replace("out = 3\n", ""))
    Path("taken").mkdir()
    Path("taken/mine.txt").touch()
    for arguments, message in (
        (("run", "--out", "taken"), "--out = 'taken': expected a new or empty folder: this one holds other files"),
        (("run", "--set", "rounds"), "--set = 'rounds': expected key=value"),
        (("run", "a.toml"), "error out = 3: expected a known setting"),
        (("sweep", "a.toml", "--grid", "algorithm.lr=1,2"), "error out = 3: expected a known setting"),
        (("sweep", "b.toml", "--grid", "lr=1,2"), "--grid = 'lr=1,2': expected algorithm.KEY=VALUE,VALUE"),
        (("sweep", "b.toml", "--grid", "steps.steps=1,2"), "(--set changes what all runs share)"),
        (("run", "--set", "model.name=os:system"), "a module from elsewhere needs --trust-imports"),
        (("flower", "keys", "taken"), "DIR = 'taken': expected a new or empty folder"),
        (("flower", "keys", "new", "--nodes", "-1"), "--nodes = -1: expected an integer of at least 0"),
        (("flower", "keys", "new", "--host", ""), "--host = ['']: expected at least one name"),
    ):
        code, _, err = command(*arguments, capsys=capsys)
        assert code == 2
        assert message in " ".join(err.split())
    assert sorted(path.name for path in Path().iterdir()) == ["a.toml", "b.toml", "taken"]


@pytest.mark.parametrize(
    ("error", "advice"), [(LostRankError("gone"), True), (OSError("full"), True), (InputError("a", 1, "b"), False)]
)
def test_an_error_inside_an_experiment_that_has_begun_shows_how_to_resume(error, advice):
    def fail():
        with advising(Path(), ["fedagrac", "run", "--out", "a folder"]):
            raise error

    with pytest.raises(type(error)):
        fail()
    assert not hasattr(error, "__notes__")  # nothing has begun
    Path("experiment.toml").touch()
    with pytest.raises(type(error)):
        fail()
    assert getattr(error, "__notes__", []) == (["resume with: fedagrac run --out 'a folder'"] if advice else [])


def test_notes_of_every_error_are_printed(capsys, monkeypatch):
    error = LostRankError("another process is gone")
    error.add_note("resume with: fedagrac run")

    def fail(*_):
        raise error

    monkeypatch.setattr("fedagrac.cli.app.app", fail)
    with pytest.raises(SystemExit) as end:
        main([])
    assert end.value.code == 1
    assert capsys.readouterr().err == "error another process is gone\nresume with: fedagrac run\n"
