"""Kills `fedagrac run` with SIGKILL, at random moments and in the middle of writing, until it has finished.

A process of its own: it imports everything once and forks a child for every attempt, so that fifty deaths take
seconds. Each child is the real command, `fedagrac run EXPERIMENT --resume --out DIR`. At the end the survivor is
compared with a run that nobody killed.

    python tests/killed_runs.py DIR --kills 50
"""

import argparse
import json
import os
import random
import signal
import sys
import time
import traceback
from pathlib import Path

import torch

import fedagrac as fg
from fedagrac import files as folders
from fedagrac.callbacks import run_folder
from fedagrac.cli import app as cli
from fedagrac.storage import checkpoints
from fedagrac.storage.claims import LOCK, is_leftover

RUNS = ("fedavg", "scaffold", "fedagrac")
EXPERIMENT = """
name = "killed"
rounds = 120
lr = 0.1
checkpoint_every = 3
participation = 3
engine = "lanes"
compile = false
[data]
name = "digits"
clients = 6
batch_size = 5
partition = { kind = "dirichlet", alpha = 0.3 }
[steps]
kind = "gaussian"
mean = 4
variance = 4
mode = "random"
[[algorithm]]
name = "fedavg"
[[algorithm]]
name = "scaffold"
[[algorithm]]
name = "fedagrac"
"""


def import_everything():
    """Load what the children need: a round, a table and the report's libraries."""

    fed = fg.Federation.load("digits", clients=4, partition=fg.Dirichlet(0.3))
    model = fg.models.build("logistic", features=64, classes=10)
    fg.simulate(model, fed, fg.FedaGrac(lr=0.1), rounds=1, steps=fg.Constant(1), engine="lanes", compile=False)


def die():
    os.kill(os.getpid(), signal.SIGKILL)


def _nth(number):
    """Return a function that does the number-th of the actions that it is given."""
    left = iter(range(number, 0, -1))
    return lambda action: action() if next(left, 0) == 1 else None


def half_a_line(number):
    """Die with half of a round's line in history.jsonl."""
    append, strikes = run_folder.append_round, _nth(number)

    def torn(folder, record):
        def strike():
            text = run_folder.to_json(record)
            with open(folder / "history.jsonl", "a") as history:
                history.write(text[: len(text) // 2])
            die()

        strikes(strike)
        append(folder, record)

    run_folder.append_round = torn


def half_a_file(number, which):
    """Die with half of a temporary file on the disk: of a checkpoint, or of any file."""
    sync = folders.sync

    def torn(path):
        if path.name.startswith(".") and which in path.name:

            def strike():
                os.truncate(path, path.stat().st_size // 2)
                die()

            strikes(strike)
        sync(path)

    strikes = _nth(number)
    folders.sync = checkpoints.sync = torn


def around_the_rename(number, after):
    """Die right before, or right after, a finished file takes its name."""
    replace, strikes = Path.replace, _nth(number)

    def replaced(path, target):
        if not after:
            strikes(die)
        replace(path, target)
        if after:
            strikes(die)

    Path.replace = replaced


AIMS = {
    "half a line of history.jsonl": half_a_line,
    "half a checkpoint": lambda number: half_a_file(number, "round-"),
    "half a file": lambda number: half_a_file(number, ""),
    "before a rename": lambda number: around_the_rename(number, after=False),
    "after a rename": lambda number: around_the_rename(number, after=True),
}


def attempt(experiment, out, aim=None, number=1, after=None):
    """Run the command in a child, which dies as aimed or after some seconds; return its end and its number."""
    child = os.fork()
    if child == 0:
        try:
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, 1)
            log = os.open(out.parent / "log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            os.dup2(log, 2)
            if aim is not None:
                AIMS[aim](number)
            cli.main(["run", str(experiment), "--resume", "--out", str(out), "--json"])
            os._exit(0)
        except SystemExit as end:
            os._exit(end.code or 0)
        except BaseException:
            traceback.print_exc()
            os._exit(99)
    if after is not None:
        time.sleep(after)
        os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    return os.waitstatus_to_exitcode(status), child


def campaign(folder, kills, seed):
    """Kill so many times, letting each experiment finish in the end; return what was seen."""
    chance = random.Random(seed)
    experiment = folder / "killed.toml"
    experiment.write_text(EXPERIMENT)
    ends(attempt(experiment, folder / "whole")[0], folder, 0)
    seen = dict.fromkeys(["at a random moment", *AIMS], 0)
    writing = 0
    survivors = []
    while sum(seen.values()) < kills:
        out = folder / f"killed-{len(survivors)}"
        while sum(seen.values()) < kills and not finished(out):
            aim, options = "at a random moment", {"after": chance.uniform(0.05, 0.5)}
            if chance.random() < 0.5:
                aim = chance.choice(list(AIMS))
                options = {"aim": aim, "number": chance.randint(1, 8)}
            code, child = attempt(experiment, out, **options)
            if code == 0:  # it was done before the shot
                break
            ends(code, folder, -signal.SIGKILL)
            seen[aim] += 1
            writing += "aim" not in options and any(path.suffix == f".{child}" for path in out.rglob(".*"))
        ends(attempt(experiment, out)[0], folder, 0)
        left = [str(path) for path in out.rglob(".*") if is_temporary(path)]
        survivors.append({"runs": {run: compare(folder / "whole" / run, out / run) for run in RUNS}, "left": left})
    return {"kills": sum(seen.values()), "how": seen, "random and while writing": writing, "survivors": survivors}


def ends(code, folder, expected):
    """Check how an attempt ended."""
    if code != expected:
        raise SystemExit(f"an attempt ended with {code}, not {expected}: {(folder / 'log').read_text()}")


def finished(out):
    return all((out / run / "status.json").exists() for run in RUNS)


def is_temporary(path):
    return is_leftover(path) and path.name != LOCK


def compare(whole, killed):
    """Return whether the models are the same bytes and the histories the same rounds, each once."""

    def rounds(folder):
        lines = (folder / "history.jsonl").read_text().splitlines()
        return [{k: v for k, v in json.loads(line).items() if k != "wall_time"} for line in lines]

    model = "model.safetensors"
    return {
        "same model": (whole / model).read_bytes() == (killed / model).read_bytes(),
        "same rounds": rounds(whole) == rounds(killed),
        "each once": [r["round"] for r in rounds(killed)] == list(range(1, len(rounds(whole)) + 1)),
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    torch.set_num_threads(1)
    import_everything()
    given.folder.mkdir(parents=True, exist_ok=True)
    json.dump(campaign(given.folder, given.kills, given.seed), sys.stdout)
