"""A short soak: only the history grows from round to round; clients that never took part cost nothing."""

import json
import subprocess
import sys

import numpy as np
import pytest

import fedagrac as fg
from fedagrac.heterogeneity import Participation
from fedagrac.rounds.record import EXAMPLE, History, RoundRecord
from fedagrac.storage.checkpoints import write_checkpoint

ROUNDS = 600  # so many that caches of Python and NumPy, some 40 kB, are 100 bytes a round

PROGRAM = f"""
import gc, json, sys, tracemalloc
from pathlib import Path
import torch
import fedagrac as fg
from fedagrac.callbacks.run_folder import KeepRun

torch.set_num_threads(1)

class Watch(fg.Callback):
    def __init__(self):
        self.seen = {{}}

    def on_round(self, run, record):
        if record["round"] == {ROUNDS // 6}:  # so that what every round replaces is counted in both measurements
            tracemalloc.start()
        if record["round"] in ({ROUNDS // 3}, {ROUNDS - 1}):
            gc.collect()
            tensors = sum(isinstance(one, torch.Tensor) for one in gc.get_objects())
            files = len(list(Path("/proc/self/fd").iterdir())) if Path("/proc/self/fd").exists() else 0
            self.seen[record["round"]] = (tracemalloc.get_traced_memory()[0], tensors, files)

folder, watch = Path(sys.argv[1]), Watch()
fg.simulate(
    fg.models.build("logistic", features=64, classes=10), fg.Federation.load("digits", clients=8),
    fg.FedaGrac(lr=0.05), {ROUNDS}, steps=fg.Linear(1, 1), participation=4, engine="serial",
    callbacks=[KeepRun(folder, {{}}), fg.Checkpoints(folder / "checkpoint", every=50), watch],
)
print(json.dumps(list(watch.seen.values())))
"""


def test_a_round_leaves_its_record_in_memory_and_nothing_else(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(tmp_path)], capture_output=True, text=True, check=True
    )
    (before, tensors, files), (after, tensors_after, files_after) = json.loads(done.stdout)
    # bytes a round: a record takes 510, of which 40 are the five fields that only live fleets fill
    assert (after - before) / (ROUNDS - 1 - ROUNDS // 3) < 740
    assert tensors_after == tensors
    assert files_after == files
    assert len((tmp_path / "history.jsonl").read_text().splitlines()) == ROUNDS
    assert len(list((tmp_path / "checkpoint").iterdir())) == 2


def test_records_read_as_mappings_and_go_through_json():
    given = [
        {**EXAMPLE, "round": i, "test_accuracy": None, "train_loss": float(i), "f1 score": i} for i in range(3)
    ]
    history = History(json.loads(json.dumps(given[:2])))  # as a resumed run reads them
    history.append(RoundRecord.of(given[2]))
    assert history == given
    assert [set(record) for record in history] == [set(given[0])] * 3
    assert all(type(record) is RoundRecord for record in history)
    assert json.loads(json.dumps([dict(record) for record in history])) == given
    history[-1].measured({"test_accuracy": 0.5, "test_loss": 0.25, "f1 score": 7})
    history[-1].dropped = [4]
    changed = {"test_accuracy": 0.5, "test_loss": 0.25, "f1 score": 7, "dropped": [4]}
    assert history[-1] == {**given[2], **changed}
    assert history[0] == given[0]
    assert history.to_pandas()["f1 score"].tolist() == [0, 1, 7]


@pytest.mark.parametrize("metrics", [[], ["f1"], ["a", "b", "c"]])
def test_a_record_takes_less_memory_in_a_history(metrics):
    """Also when the history of another run has fewer fields."""
    fields = ["round", "test_accuracy", "test_loss", "train_loss", "clients", "fast", "steps_mean", *metrics]
    fields += ["bytes_up", "bytes_down", "bytes_total", "sim_time", "wall_time"]
    records = [dict.fromkeys(fields, 0.0) for _ in range(100)]
    history = History(records)
    assert sys.getsizeof(history[-1]) < sys.getsizeof(records[-1]) / 2


def test_of_a_hundred_thousand_clients_only_those_seen_are_remembered(tmp_path):
    fed = fg.Federation.load("digits", clients=100_000, partition=fg.Resample(20), seed=0)
    model = fg.models.build("logistic", features=64, classes=10)
    seen, sizes = [], []

    class Sizes(fg.Callback):
        def on_round(self, run, record):
            clients, rows = run.table.export()
            assert {name: tuple(values.shape) for name, values in rows.items()} == {"nu": (len(clients), 650)}
            seen.append(len(clients))
            sizes.append(write_checkpoint(tmp_path, run.checkpoint()).stat().st_size)

    fg.simulate(
        model, fed, fg.Scaffold(lr=0.1), 3, steps=fg.Constant(2), participation=100, callbacks=[Sizes()],
        engine="lanes", compile=False,
    )  # fmt: skip
    draws = [Participation(100).draw(t, fed.weights, 0)[0] for t in range(3)]
    assert seen == [len(np.unique(np.concatenate(draws[: t + 1]))) for t in range(3)]
    for clients, size in zip(seen, sizes, strict=True):
        vectors = 1 + 2 + clients  # x, nu in float64, and every nu_i
        assert 0 <= size - vectors * 650 * 4 - clients * 8 < 1024
