"""Kill `fedagrac run` with SIGKILL at random moments and in the middle of writing, until it has finished.

This process imports everything once and forks a child for every attempt, so that fifty kills take seconds. Each
child is the real command, `fedagrac run EXPERIMENT --resume --out DIR`. At the end its results are compared with
those of a run that was not killed.

    python tests/killed_runs.py DIR --kills 50
"""

import argparse
import builtins
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
from fedagrac.cli.app import main

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
    """Run a round, so that the children find every library imported."""
    fed = fg.Federation.load("digits", clients=4, partition=fg.Dirichlet(0.3))
    model = fg.models.build("logistic", features=64, classes=10)
    fg.simulate(model, fed, fg.FedaGrac(lr=0.1), rounds=1, steps=fg.Constant(1), engine="lanes", compile=False)


def die():
    os.kill(os.getpid(), signal.SIGKILL)


class Countdown:
    """Counts down with every call of `due`, which is true once."""

    def __init__(self, number):
        self.left = number

    def due(self):
        self.left -= 1
        return self.left == 0


def half_a_line(number):
    """Die with half of a round's line in history.jsonl."""
    original, countdown = builtins.open, Countdown(number)

    def torn(file, mode="r", *arguments, **options):
        opened = original(file, mode, *arguments, **options)
        if mode == "a" and Path(file).name == "history.jsonl" and countdown.due():
            opened.write('{"round": 7, "test_accu')
            opened.flush()
            die()
        return opened

    builtins.open = torn


def half_a_file(number, part_of_name):
    """Die with half of a temporary file on the disk whose name contains a text."""
    original_open, original_fsync = os.open, os.fsync
    countdown, paths = Countdown(number), {}

    def remembering(path, *arguments, **options):
        descriptor = original_open(path, *arguments, **options)
        paths[descriptor] = Path(path)
        return descriptor

    def torn(descriptor):
        path = paths.get(descriptor, Path())
        if path.name.startswith(".") and part_of_name in path.name and countdown.due():
            os.truncate(path, path.stat().st_size // 2)
            die()
        original_fsync(descriptor)

    os.open, os.fsync = remembering, torn


def around_the_rename(number, after):
    """Die right before or right after a complete file takes its name."""
    original, countdown = Path.replace, Countdown(number)

    def replaced(path, target):
        due = countdown.due()
        if due and not after:
            die()
        original(path, target)
        if due:
            die()

    Path.replace = replaced


AIMS = {
    "half a line of history.jsonl": half_a_line,
    "half a checkpoint": lambda number: half_a_file(number, "round-"),
    "half a file": lambda number: half_a_file(number, ""),
    "before a rename": lambda number: around_the_rename(number, after=False),
    "after a rename": lambda number: around_the_rename(number, after=True),
}


def run_command(experiment, out, aim, number):
    """Run the command in this process, which is a forked child, and end the process with its exit code."""
    try:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, 1)
        log = os.open(out.parent / "log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(log, 2)
        if aim is not None:
            AIMS[aim](number)
        main(["run", str(experiment), "--resume", "--out", str(out), "--json"])
        os._exit(0)
    except SystemExit as end:
        os._exit(end.code or 0)
    except BaseException:
        traceback.print_exc()
        os._exit(99)


def attempt(experiment, out, aim=None, number=1, after=None):
    """Run the command in a child that dies as aimed or after some seconds; return its exit code and process id."""
    child = os.fork()
    if child == 0:
        run_command(experiment, out, aim, number)
    if after is not None:
        time.sleep(after)
        os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    return os.waitstatus_to_exitcode(status), child


def campaign(folder, kills, seed):
    """Kill the command until it has died often enough; return the numbers of kills and how every run ended."""
    chance = random.Random(seed)
    experiment = folder / "killed.toml"
    experiment.write_text(EXPERIMENT)
    check_end(attempt(experiment, folder / "whole")[0], folder, 0)
    done = dict.fromkeys(["at a random moment", *AIMS], 0)
    writing = 0
    survivors = []
    while sum(done.values()) < kills:
        out = folder / f"killed-{len(survivors)}"
        while sum(done.values()) < kills and not finished(out):
            aim, options = "at a random moment", {"after": chance.uniform(0.05, 0.5)}
            if chance.random() < 0.5:
                aim = chance.choice(list(AIMS))
                options = {"aim": aim, "number": chance.randint(1, 8)}
            code, child = attempt(experiment, out, **options)
            if code == 0:  # it finished before the kill
                break
            check_end(code, folder, -signal.SIGKILL)
            done[aim] += 1
            writing += "aim" not in options and any(path.suffix == f".{child}" for path in out.rglob(".*"))
        check_end(attempt(experiment, out)[0], folder, 0)
        left = [str(path) for path in out.rglob(".*") if path.name != ".lock"]
        survivors.append({"runs": {run: compare(folder / "whole" / run, out / run) for run in RUNS}, "left": left})
    return {"kills": sum(done.values()), "how": done, "random and while writing": writing, "survivors": survivors}


def check_end(code, folder, expected):
    """Exit with the log if an attempt did not end as expected."""
    if code != expected:
        raise SystemExit(f"an attempt ended with {code}, not {expected}: {(folder / 'log').read_text()}")


def finished(out):
    return all((out / run / "status.json").exists() for run in RUNS)


def compare(whole, killed):
    """Return whether two runs have the same model and the same rounds, each round once."""

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
