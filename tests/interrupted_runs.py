"""Interrupt and resume runs: every algorithm, engine, sampling mode, participation and step schedule."""

import itertools
import signal
from dataclasses import replace

import fedagrac as fg
from fedagrac.algorithms import REGISTRY
from fedagrac.storage.checkpoints import read_checkpoint
from two_layers import module_for

ROUNDS, CLIENTS = 5, 5

SCHEDULES = {
    "constant": fg.Constant(3),
    "gaussian fixed": fg.Gaussian(4, 4),
    "gaussian random": fg.Gaussian(4, 4, mode="random"),
    "uniform fixed": fg.Uniform(1, 6),
    "uniform random": fg.Uniform(1, 6, mode="random"),
    "linear": fg.Linear(1, 2),
    "extreme": fg.Extreme(2, 9),
    "explicit": fg.Explicit([[1 + (t * i) % 4 for i in range(CLIENTS)] for t in range(ROUNDS)]),
    "devices": fg.Devices([fg.DeviceProfile("d", step_time=0.1 * (1 + i)) for i in range(5)], 0.7, jitter=0.3),
    "geometric": fg.Geometric(0.3),
    "epochs": fg.Epochs(1),
}
PARTICIPATION = {
    "all": None,
    "two": 2,
    "a fraction": 0.6,
    "by weight": fg.Participation(4, by="weight"),
}
SAMPLING = ("replacement", "shuffle", "full")
ENGINES = {"serial": {"engine": "serial"}, "lanes": {"engine": "lanes", "compile": False}}


def combinations(algorithms=None, engines=tuple(ENGINES)):
    """Return every combination of names."""
    names = sorted(REGISTRY) if algorithms is None else algorithms
    return list(itertools.product(names, engines, SAMPLING, PARTICIPATION, SCHEDULES))


class InterruptAfter(fg.Callback):
    """Sends Ctrl-C to this process while the callbacks of a round run."""

    def __init__(self, round):
        self.round = round

    def on_round(self, run, record):
        if record["round"] == self.round:
            signal.raise_signal(signal.SIGINT)


class Rounds(fg.Callback):
    """Keeps the rounds done before an interruption, as history.jsonl does."""

    def on_interrupt(self, run):
        self.history = list(run.history)


class Problem:
    """A small problem that every combination runs on."""

    def __init__(self):
        self.federation = fg.Federation.load("digits", clients=CLIENTS, partition=fg.Dirichlet(0.3))
        self.models = {name: module_for(name) for name in REGISTRY}

    def run(self, algorithm, engine_name, sampling, participation, schedule, **options):
        return fg.simulate(
            self.models[algorithm], self.federation, fg.algorithm(algorithm, lr=0.1), ROUNDS,
            steps=SCHEDULES[schedule],
            batch_size=None if sampling == "full" else 8, sampling=sampling.replace("full", "replacement"),
            participation=PARTICIPATION[participation],
            **{"device": "cpu", **ENGINES.get(engine_name, {}), **options},
        )  # fmt: skip

    def run_in_two(self, folder, *combination, after=2, **options):
        """Interrupt a run after a round and resume it from its checkpoint; return the result."""
        rounds = Rounds()
        callbacks = [rounds, fg.Checkpoints(folder, every=1000), InterruptAfter(after)]
        before = signal.signal(signal.SIGINT, signal.default_int_handler)  # background jobs ignore Ctrl-C
        try:
            self.run(*combination, callbacks=callbacks, **options)
        except KeyboardInterrupt:
            pass
        else:
            raise AssertionError("the run was not interrupted")
        finally:
            signal.signal(signal.SIGINT, before)
        stored = read_checkpoint(folder)
        assert stored.round == after == len(rounds.history)
        return self.run(*combination, **{**options, "resume": replace(stored, history=rounds.history)})


def same(one, other):
    """Return whether two runs are bit-identical except for their wall times."""
    if not (one.vector == other.vector).all():
        return False
    timeless = [
        [{k: v for k, v in record.items() if k != "wall_time"} for record in r.history] for r in (one, other)
    ]
    return timeless[0] == timeless[1]
