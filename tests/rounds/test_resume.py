"""A resumed run equals an uninterrupted run, bit for bit. Signals never interrupt a round halfway."""

import json
import logging
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import fedagrac as fg
from fedagrac.algorithms import REGISTRY
from fedagrac.callbacks import Checkpoints
from fedagrac.engines import EngineRecord, LanesEngine, SerialEngine
from fedagrac.engines.lanes.memory import LaneMemory
from fedagrac.experiments.run import prepare, run_experiment
from fedagrac.experiments.schema import Experiment
from fedagrac.rounds.interrupts import Held, Interruption, listening
from fedagrac.rounds.record import EXAMPLE
from fedagrac.storage.checkpoints import read_checkpoint
from interrupted_runs import ENGINES, PARTICIPATION, SAMPLING, SCHEDULES, Problem, Rounds, combinations, same
from processes import finish, processor_seconds, wait_while_running

STRIDE = 41  # coprime to the numbers of choices, so that a small sample holds each choice
SAMPLE = combinations()[::STRIDE]


@pytest.fixture(scope="module")
def problem():
    return Problem()


@pytest.mark.parametrize("engine", list(ENGINES))
@pytest.mark.parametrize("name", sorted(REGISTRY))
def test_a_run_in_two_parts_equals_one_in_one_go(name, engine, problem, tmp_path):
    """`make soak` runs all combinations."""
    sample = [combination for combination in SAMPLE if combination[:2] == (name, engine)]
    assert len(sample) >= 3
    for number, combination in enumerate(sample):
        whole = problem.run(*combination)
        assert len(whole.history) == 5
        assert same(problem.run_in_two(tmp_path / str(number), *combination), whole), combination


def test_the_sample_of_resumed_runs_holds_every_choice_for_both_engines():
    assert len(SAMPLE) < 200
    for engine in ENGINES:
        of_engine = [combination for combination in SAMPLE if combination[1] == engine]
        for place, choices in enumerate((SAMPLING, PARTICIPATION, SCHEDULES)):
            assert {combination[2 + place] for combination in of_engine} == set(choices)


def test_compiled_lanes_are_resumed_as_compiled_lanes(problem, tmp_path):
    """The engine is "auto", so the checkpoint must say which engine ran."""
    combination = ("scaffold", "any", "replacement", "all", "constant")
    compiled = {"engine": "lanes", "compile": True}
    whole = problem.run(*combination, **compiled)
    assert same(problem.run_in_two(tmp_path / "one", *combination, **compiled), whole)
    record = read_checkpoint(tmp_path / "one").facts.engine
    assert (record.name, record.compiled, record.threads) == ("lanes", True, torch.get_num_threads())


def test_a_resumed_run_keeps_its_engine(problem, tmp_path, caplog):
    combination = ("fedavg", "any", "replacement", "all", "linear")
    rounds = Rounds()

    class Seen(fg.Callback):
        def on_start(self, run):
            self.engine, self.why, self.threads = (
                run.fleet.engine,
                run.fleet.engine_reason,
                torch.get_num_threads(),
            )

    def narrow(workload):
        return LanesEngine(workload, width=2)

    stop = [rounds, Checkpoints(tmp_path, every=2)]
    problem.run(*combination, engine=narrow, callbacks=stop)
    stored = read_checkpoint(tmp_path)
    facts = replace(stored.facts, engine=replace(stored.facts.engine, threads=2))
    history = [{**EXAMPLE, "round": i + 1, "wall_time": 1.0} for i in range(4)]
    stored, seen = replace(stored, facts=facts, history=history), Seen()
    assert facts.engine.width == 2
    threads = torch.get_num_threads()
    problem.run(*combination, resume=stored, callbacks=[seen])
    assert (seen.engine.name, seen.engine.width, seen.threads) == ("lanes", 2, 2)
    assert seen.why == "as before the run was interrupted"
    assert torch.get_num_threads() == threads
    with caplog.at_level(logging.WARNING, logger="fedagrac"):
        problem.run(*combination, engine="serial", resume=stored, callbacks=[seen])
    assert isinstance(seen.engine, SerialEngine)
    assert "another engine" in caplog.text


def test_invalid_records_of_engines_are_none(problem):
    record = EngineRecord("lanes", False, 3, 2, "cpu", str(torch.__version__))
    table = vars(record)
    assert EngineRecord.read(dict(table)) == record
    for key, bad in (
        ("width", 0),
        ("width", 2.5),
        ("threads", 0),
        ("threads", 10**9),
        ("name", 3),
        ("device", None),
    ):
        assert EngineRecord.read({**table, key: bad}) is None
    for bad in (None, [], {}, {**table, "more": 1}):
        assert EngineRecord.read(bad) is None


def test_lanes_that_do_not_fit_stay_as_narrow_as_they_were(problem, monkeypatch):
    """The memory that is free later must not change how lanes are packed."""
    seen = []

    class Narrow(LanesEngine):
        def run_wave(self, wave, *rest):
            seen.append(len(wave.rows))
            super().run_wave(wave, *rest)

    fitting = iter([3, 1, 4, 1, 5])
    monkeypatch.setattr(LaneMemory, "fitting_width", lambda *_: next(fitting))
    problem.run("fedavg", "any", "replacement", "all", "constant", engine=Narrow)
    assert seen == [3, 2] * 5


class InTheMiddle(SerialEngine):
    """An engine that is interrupted while it runs the clients of round 3."""

    def run(self, plan, x, clients, round):
        if round == 2:
            super().run(plan, x, clients[:1], round)
            signal.raise_signal(signal.SIGINT)
        return super().run(plan, x, clients, round)


@pytest.mark.parametrize("name", ["fedlin", "scaffold", "fedagrac"])
def test_an_interrupted_round_is_done_again(name, problem, tmp_path):
    """The round has new clients, whose rows must be stored completely or not at all."""
    combination = (name, "serial", "shuffle", "two", "uniform random")
    whole, rounds = problem.run(*combination), Rounds()
    with pytest.raises(KeyboardInterrupt):
        problem.run(*combination, engine=InTheMiddle, callbacks=[rounds, Checkpoints(tmp_path)])
    stored = read_checkpoint(tmp_path)
    assert stored.round == 2
    assert same(problem.run(*combination, resume=replace(stored, history=rounds.history)), whole)


def test_a_run_interrupted_in_the_first_round_resumes_after_the_start(problem, tmp_path):
    class AtOnce(InTheMiddle):
        def run(self, plan, x, clients, round):
            return super().run(plan, x, clients, round + 2)

    combination = ("fedagrac", "serial", "replacement", "all", "linear")
    with pytest.raises(KeyboardInterrupt):
        problem.run(*combination, engine=AtOnce, callbacks=[Checkpoints(tmp_path)])
    stored = read_checkpoint(tmp_path)
    assert stored.round == 0
    assert stored.facts.bytes_total > 0  # the start from full gradients is not charged twice
    assert same(problem.run(*combination, resume=stored), problem.run(*combination))


def test_a_signal_in_the_last_round_does_not_change_how_the_run_ends(problem):
    class Last(fg.Callback):
        result = None

        def on_round(self, run, record):
            if record["round"] == run.rounds:
                signal.raise_signal(signal.SIGINT)

        def on_end(self, run, result):
            Last.result = result

    with pytest.raises(KeyboardInterrupt):
        problem.run("fedavg", "serial", "replacement", "all", "constant", callbacks=[Last()])
    assert Last.result.status == "finished"


def test_blocks_inside_one_another_handle_a_signal_at_the_end_of_the_outermost():
    done = []

    def blocks():
        with Held():
            with Held():
                signal.raise_signal(signal.SIGINT)
                done.append("inside")
            done.append("still inside")

    with pytest.raises(KeyboardInterrupt):
        blocks()
    assert done == ["inside", "still inside"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    with pytest.raises(Interruption) as error, Held() as signals:
        signals.pending = signal.SIGTERM  # as if it had arrived at another process; it has no handler here
    assert error.value.code == 143


def test_signals_that_are_ignored_stay_ignored():
    """Ctrl-C in a script does not end a command in its background."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with listening(), Held() as signals:
            signal.raise_signal(signal.SIGINT)
            assert signals.pending is None
    finally:
        signal.signal(signal.SIGINT, before)


EXPERIMENT = """
name = "mini"
rounds = {rounds}
lr = 0.05
checkpoint_every = 1000
engine = "{engine}"
compile = false
[data]
name = "digits"
clients = 4
batch_size = 10
[steps]
kind = "constant"
steps = {steps}
[[algorithm]]
name = "fedavg"
[[algorithm]]
name = "fedagrac"
"""
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "80"}


def start(*arguments):
    command = [sys.executable, "-m", "fedagrac", "run", *map(str, arguments)]
    output = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen(command, env=ENVIRONMENT, **output)


def lines(path):
    return path.read_text().count("\n") if path.exists() else 0


ROUNDS = 150


@pytest.fixture(scope="module")
def in_one_go(tmp_path_factory):
    """Return the experiment file and the folder of an uninterrupted run."""
    folder = tmp_path_factory.mktemp("whole")
    (folder / "mini.toml").write_text(EXPERIMENT.format(rounds=ROUNDS, steps=5, engine="lanes"))
    run_experiment(prepare(Experiment.load(folder / "mini.toml")), folder / "out")
    return folder / "mini.toml", folder / "out"


@pytest.mark.parametrize(("name", "code"), [("SIGINT", 130), ("SIGTERM", 143)])
def test_the_command_saves_ends_and_resumes(name, code, in_one_go, tmp_path):
    """A checkpoint is due after 1000 rounds, so only the signal can have caused one."""
    (file, whole), out = in_one_go, tmp_path / "a folder"
    process = start(file, "--out", out)
    history = out / "fedagrac" / "history.jsonl"
    wait_while_running(lambda: lines(history) >= 3, process)
    process.send_signal(getattr(signal, name))
    _, errors = finish(process)
    assert process.returncode == code, errors
    assert f"interrupted by {name}" in errors
    assert f"resume with: fedagrac run --resume --out '{out}'" in " ".join(errors.split())
    assert "Traceback" not in errors
    done = lines(history)
    assert f"saved after round {done} of {ROUNDS}" in errors
    assert 3 <= done < ROUNDS
    assert read_checkpoint(out / "fedagrac" / "checkpoint").round == done
    assert (out / "fedavg" / "status.json").exists()
    again = start("--resume", "--out", out, "--json")
    printed, errors = finish(again)
    assert again.returncode == 0, errors
    assert [run["rounds"] for run in json.loads(printed)["runs"]] == [ROUNDS, ROUNDS]
    model = Path("fedagrac", "model.safetensors")
    assert (out / model).read_bytes() == (whole / model).read_bytes()
    kept = [json.loads(line) for line in history.read_text().splitlines()]
    assert [record["round"] for record in kept] == list(range(1, ROUNDS + 1))


def test_the_command_does_not_wait_for_a_long_round(tmp_path):
    """A signal interrupts a round of ten million steps, and the checkpoint is that of the start."""
    file, out = tmp_path / "mini.toml", tmp_path / "out"
    file.write_text(EXPERIMENT.format(rounds=3, steps=10_000, engine="serial").replace("= 10_000", "= 2_500_000"))
    process = start(file, "--out", out)
    wait_while_running((out / "fedavg" / "history.jsonl").exists, process)
    prepared = processor_seconds(process.pid)
    wait_while_running(lambda: processor_seconds(process.pid) > prepared + 0.5, process)
    process.send_signal(signal.SIGTERM)
    _, errors = finish(process)
    assert process.returncode == 143, errors
    assert read_checkpoint(out / "fedavg" / "checkpoint").round == 0


def test_a_signal_before_anything_is_written_leaves_nothing(tmp_path):
    file, out = tmp_path / "mini.toml", tmp_path / "out"
    file.write_text(EXPERIMENT.format(rounds=3, steps=10, engine="serial"))
    script = "import signal, fedagrac.experiments.run as e, fedagrac.cli.app as c\n"
    script += "e.prepare = lambda *_, **__: signal.raise_signal(signal.SIGTERM)\n"
    script += f"c.main(['run', {str(file)!r}, '--out', {str(out)!r}])"
    done = subprocess.run(
        [sys.executable, "-c", script], env=ENVIRONMENT, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr.strip()) == (143, "interrupted by SIGTERM")
    assert not out.exists()
