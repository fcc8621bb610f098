"""One function for each kind of file or message that may come from anywhere: bytes in, nothing out.

Each feeds the bytes through the code that really reads them and lets pass only the errors that the command line
turns into one line. Anything else propagates, and is a bug. `test_hostile.py` and `fuzz/run.py` share these
targets; `SEEDS` holds valid inputs of each.
"""

import atexit
import contextlib
import dataclasses
import functools
import gzip
import io
import json
import shutil
import sys
import tempfile
from pathlib import Path

import numpy as np
import tomli_w
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict
from rich.console import Console
from safetensors.torch import save

import fedagrac as fg
from fedagrac.core.cohort import Cohort
from fedagrac.data import federation, sources
from fedagrac.data.catalogue import DataFile
from fedagrac.data.locating import inspect_file
from fedagrac.engines import choice
from fedagrac.errors import MOST_CLIENTS, FedagracError
from fedagrac.experiments.overrides import apply_settings
from fedagrac.experiments.run import prepare
from fedagrac.experiments.schema import Experiment, default_table, read_toml
from fedagrac.flower.fleet import FlowerFleet
from fedagrac.flower.link import Link
from fedagrac.flower.server import initial_model
from fedagrac.flower.settings import Settings
from fedagrac.flower.wire import unpack
from fedagrac.imports import Imports
from fedagrac.paper.records import Records, Trial
from fedagrac.report import read_run, summarise, summary_table
from fedagrac.report.charts import charts_of, series_of
from fedagrac.report.page import render_page
from fedagrac.storage import checkpoints
from fedagrac.storage.checkpoints import Checkpoint, Facts, read_checkpoint, write_checkpoint
from fedagrac.storage.clients import ClientTable
from fedagrac.storage.run_folder import read_history
from run_folders import record, write_run

EXPECTED = (FedagracError, OSError)
"""What the command line says in one line."""

SCRATCH = Path(tempfile.mkdtemp(prefix="fedagrac-hostile-", dir="/dev/shm" if Path("/dev/shm").is_dir() else None))
atexit.register(shutil.rmtree, SCRATCH, ignore_errors=True)

torch.set_num_threads(1)  # every input is tiny
federation.digits = functools.cache(federation.digits)  # the same every time, and read for every experiment


def written(name, data):
    path = SCRATCH / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    return path


# experiment files


def experiment(data):
    """An experiment file, up to the model and the data where those are small."""
    with contextlib.suppress(EXPECTED):
        checked = Experiment.of(read_toml(written("experiment.toml", data)))
        tomli_w.dumps(checked.resolved()).encode()
        if _quick(checked):
            tomli_w.dumps(prepare(checked, imports=Imports(SCRATCH / "nothing")).described()).encode()


def _quick(checked):
    clients = checked.data.clients
    largest = 20 if checked.data.partition else 50
    return (
        checked.data.name in ("digits", "synthetic")
        and (clients <= largest or clients > MOST_CLIENTS)
        and (checked.model.name in ("logistic", "cnn") or ":" in checked.model.name)
    )


def settings(data):
    """Arguments of --set, one a line, as the operating system hands them over."""
    lines = data.decode("utf-8", "surrogateescape").split("\n")
    with contextlib.suppress(EXPECTED):
        checked = Experiment.of(apply_settings(default_table(), lines))
        tomli_w.dumps(checked.resolved()).encode()


def imports(data):
    """An import path in an experiment file that is not trusted: no module is imported for it."""
    before = set(sys.modules)
    with contextlib.suppress(EXPECTED):
        Imports(SCRATCH / "nothing").build(data.decode("utf-8", "replace"), {"command": "exit 1"})
    assert set(sys.modules) == before


# data files


def libsvm(data):
    """A LIBSVM file of three samples with five features."""
    with contextlib.suppress(EXPECTED):
        sources.read_libsvm(written("libsvm", data), 3, 5)


def idx(data):
    """An idx file of three pictures of 2 x 2: as it is, and where the first byte is odd, compressed properly."""
    path = written("idx.gz", gzip.compress(data[1:], 1, mtime=0) if data[:1] and data[0] % 2 else data[1:])
    inspect_file(DataFile("idx.gz", "0" * 64, 28, "gzip"), path)
    with contextlib.suppress(EXPECTED):
        sources.read_idx(path, (3, 2, 2))
    with contextlib.suppress(EXPECTED):
        sources.class_labels(path, sources.read_idx(path, (3,)))


def cifar(data):
    """A batch of CIFAR-10 of two pictures."""
    with contextlib.suppress(EXPECTED):
        sources.read_cifar(written("cifar", data), 2)


# checkpoints


@functools.cache
def _small():
    fed = fg.Federation.from_arrays([([[0.0], [1.0]], [0, 1]), ([[2.0]], [1])])
    return fg.models.build("logistic", features=1, classes=2), fed


def _go_on(found, history):
    """Go on from a checkpoint for one round."""
    if found is None or found.round > 5:
        return
    past = read_history(history, found.round)
    fg.simulate(
        *_small(), fg.FedaGrac(lr=0.1), found.round + 1, steps=fg.Constant(1), engine="serial",
        resume=dataclasses.replace(found, history=past),
    )  # fmt: skip


def checkpoint(data):
    """A checkpoint file beside a good history."""
    folder = written("checkpoint/round-00000002.safetensors", data).parent
    with contextlib.suppress(EXPECTED):
        _go_on(read_checkpoint(folder), written("history.jsonl", _HISTORY))


def checkpoint_content(data):
    """A checkpoint with a right hash: JSON that names facts of its header, and tensors by type and shape."""
    with contextlib.suppress(ValueError, RecursionError):
        given = json.loads(data)
        folder = written("sealed/round-00000002.safetensors", sealed(given)).parent
        with contextlib.suppress(EXPECTED):
            _go_on(read_checkpoint(folder), written("history.jsonl", _HISTORY))


TENSOR_TYPES = {str(t).removeprefix("torch."): t for t in (
    torch.float32, torch.float64, torch.int64, torch.int32, torch.uint8, torch.bool, torch.float16, torch.bfloat16,
    torch.float8_e4m3fn,
)}  # fmt: skip


def sealed(given):
    """Return a checkpoint of {"head": {...}, "tensors": {name: [type, shape, first value]}} with its hash."""
    if not isinstance(given, dict) or not isinstance(given.get("tensors"), dict):
        raise ValueError("another description")
    tensors = {}
    for name, kind in given["tensors"].items():
        if not isinstance(kind, list) or len(kind) != 3 or not isinstance(kind[1], list) or len(kind[1]) > 4:
            raise ValueError("another description")
        shape = [int(n) for n in kind[1] if isinstance(n, int) and 0 <= n <= 4]
        values = kind[2] if isinstance(kind[2], int) and abs(kind[2]) < 2**62 else 0
        dtype = TENSOR_TYPES.get(str(kind[0]), torch.float32)
        numbers = torch.arange(int(np.prod(shape))) + values
        tensors[name.encode("utf-8", "replace").decode()] = numbers.to(dtype).reshape(shape)
    head = {"format": checkpoints.FORMAT, **(given["head"] if isinstance(given.get("head"), dict) else {})}
    return save(tensors, metadata={"fedagrac": json.dumps({"sha256": hash_of(head, tensors), **head})})


def hash_of(head, tensors):
    """Return the hash that a checkpoint of these tensors has; what cannot be hashed has none."""
    try:
        return checkpoints.content_hash(head, tensors)
    except RuntimeError:
        return ""


def history(data):
    """A history beside a good checkpoint."""
    folder = written("good/round-00000002.safetensors", _CHECKPOINT).parent
    with contextlib.suppress(EXPECTED):
        _go_on(read_checkpoint(folder), written("history.jsonl", data))


# run folders, records, measurements


RUN_FILES = ("history.jsonl", "experiment.toml", "status.json", "environment.json", "federation.json")


def run_folder(data):
    """A run folder in which the file that the first byte names holds the rest."""
    folder = SCRATCH / "run"
    if not folder.exists():
        write_run(folder, [])
    for name, content in GOOD_RUN.items():
        (folder / name).write_bytes(content)
    (folder / RUN_FILES[(data[0] if data else 0) % len(RUN_FILES)]).write_bytes(data[1:])
    with contextlib.suppress(EXPECTED):
        runs = [read_run(folder)]
        rows = summarise(runs)
        json.dumps(rows)
        Console(file=io.StringIO()).print(summary_table(rows))
        charts_of(runs)
        series_of(runs)
        if len(data) % 16 == 0:  # the page is 5 MB of JavaScript around the same values
            render_page(runs).encode("utf-8", "replace")


def records(data):
    """The record of a paper's run: what is no record counts as none."""
    store, trial = Records(SCRATCH), Trial("a", {"lr": 0.1})
    written(str(store.path("recipe").relative_to(SCRATCH)), data)
    record = store.get("recipe", trial)
    assert record is None or record.finished in (True, False)


def measurement(data):
    """A measurement of engines in the cache: what is none counts as none."""
    table = choice.read_measurement(written("measurement.json", data))
    for name, row in (table or {"candidates": {}})["candidates"].items():
        assert name in choice.CANDIDATES
        assert float(f"{row['us']:.3g}") + row["start_s"] >= 0


# Flower


def flower_reply(data):
    """A client's answer: facts as JSON, two zero bytes, and the bytes of its vector."""
    head, _, vector = data.partition(b"\x00\x00")
    try:
        facts = json.loads(head)
        told = ConfigRecord({k: v for k, v in facts.items() if isinstance(v, int | float | str | list)})
    except (ValueError, TypeError, AttributeError, RecursionError):
        told = ConfigRecord({"client": 0, "round": 0, "steps": 3, "loss": 1.0})
    model = Array("float32", (4,), "numpy.ndarray", vector)
    fleet, cohort, plan = live_fleet()
    with contextlib.suppress(EXPECTED):
        parcel = unpack(RecordDict({"facts": told, "vectors": ArrayRecord({"model": model})}))
        good = fleet.checked({0: parcel}, cohort, plan, lambda row: (1, 100))
        for reply in good.values():
            assert reply.vectors["model"].isfinite().all()
        fleet.link.meet(7, parcel)


@functools.cache
def live_fleet():
    """Return a live fleet of one client, a cohort of it, and its plan."""
    checked = Settings.of({"clients": 1, "algorithm.name": "fedavg", "algorithm.lr": 0.1})
    model = initial_model(checked, lambda _: _small()[0], None)
    link = Link(None, model, checked)
    link.note = lambda event: None
    link.started = True
    one = np.ones(1, np.int64)
    cohort = Cohort(0, one - 1, 3 * one, [1], one / 1.0, one, True, lambda *_: torch.zeros(1, 4))
    plan = checked.build_algorithm().plan({"x": model.initial()}, {}, cohort)
    return FlowerFleet(checked, model, link), cohort, plan


def flower_settings(data):
    """Flower's run config, a flat table."""
    with contextlib.suppress(ValueError, RecursionError):
        config = json.loads(data)
        if isinstance(config, dict):
            with contextlib.suppress(EXPECTED):
                Settings.of(config)


# valid inputs


def _checkpoint():
    table = ClientTable(2)
    x = torch.zeros(4)
    table.put(np.array([1, 0]), {"nu": torch.zeros(2, 4), "v": torch.zeros(2, 4)})
    state = {"x": x, "nu": x, "x1": x}
    with tempfile.TemporaryDirectory() as folder:
        facts = Facts(sim_time=1.0, bytes_total=64)
        return write_checkpoint(Path(folder), Checkpoint(2, state, table, facts)).read_bytes()


def _npy(array):
    file = io.BytesIO()
    np.save(file, array)
    return file.getvalue()


def _lines(records):
    return "".join(json.dumps(one) + "\n" for one in records).encode()


def sealed_description():
    """The description of a checkpoint from which a run goes on."""
    head = {"round": 2, "num_clients": 2, "parts": 1, "facts": {"sim_time": 1.0, "bytes_total": 64}}
    vectors = {f"state.{name}": ["float32", [4], 0] for name in ("x", "nu", "x1")}
    rows = {f"rows.{name}": ["float32", [2, 4], 0] for name in ("nu", "v")}
    tensors = {"clients": ["int64", [2], 0], **rows, **vectors}
    return {"head": head, "tensors": tensors}


_HISTORY = _lines([record(1, 0.5, 1.0), record(2, 0.6, 0.9)])
_CHECKPOINT = _checkpoint()
_DESCRIBED = {
    "name": "digits", "clients": 2, "samples": 30, "sizes_range": [10, 20], "steps_range": [3, 4],
    "steps_mean": 3.5, "shown": [0, 1], "sizes": [10, 20], "steps": [3, 4], "labels": [[5, 5], [10, 10]],
}  # fmt: skip
GOOD_RUN = {
    "experiment.toml": b'name = "written"\nseed = 0\ntarget = 0.5\n[[algorithm]]\nname = "fedavg"\nlr = 0.1\n',
    "status.json": b'{"status": "finished", "reason": "all rounds done"}',
    "environment.json": b'{"torch": "2.13.0", "device": "cpu"}',
    "history.jsonl": _HISTORY,
    "federation.json": json.dumps(_DESCRIBED).encode(),
}
SMALL_EXPERIMENT = {
    "name": "small",
    "rounds": 2,
    "lr": 0.1,
    "data": {"name": "digits", "clients": 3, "partition": {"kind": "dirichlet", "alpha": 0.3}},
    "model": {"name": "logistic"},
    "steps": {"kind": "constant", "steps": 2},
    "algorithm": [{"name": "fedagrac", "calibration": 1.0}, {"name": "fedavg", "label": "plain"}],
    "clock": {"step_time": 0.1, "jitter": 0.5},
    "stop": {"accuracy": 0.9},
}
STEPS = [
    {"kind": "gaussian", "mean": 20, "variance": 100, "mode": "random"},
    {"kind": "uniform", "lo": 1, "hi": 4},
    {"kind": "linear", "first": 1, "increment": 3},
    {"kind": "extreme", "slow": 1, "fast": 9},
    {"kind": "explicit", "table": [[1, 2, 3]]},
    {"kind": "devices", "profiles": {"jetson-nano": 3}, "deadline": 0.001},
    {"kind": "devices", "profiles": [{"step_time": 0.5}, {"flops": 1e9}, "raspberry-pi-4"], "deadline": 1.0},
]
_FACTS = {"client": 0, "round": 0, "steps": 3, "loss": 1.0, "samples": 5, "model": "x"}
_FLOWER = {
    "clients": 3,
    "algorithm.name": "fedavg",
    "algorithm.lr": 0.1,
    "steps.kind": "client",
    "steps.seconds": 2,
}

TARGETS = {
    f.__name__: f
    for f in (
        experiment, settings, imports, libsvm, idx, cifar, checkpoint, checkpoint_content, history, run_folder,
        records, measurement, flower_reply, flower_settings,
    )
}  # fmt: skip
"""Every target by name."""

SEEDS = {
    "experiment": [
        tomli_w.dumps({**SMALL_EXPERIMENT, "steps": steps}).encode()
        for steps in (SMALL_EXPERIMENT["steps"], *STEPS)
    ],
    "settings": [
        b"rounds=5\ndata.clients=3\nalgorithm.fedavg.lr=0.1",
        b"algorithm.0.lr=1e-3\nsteps={kind='constant',steps=3}",
    ],
    "imports": [b"os:system", b"torch.nn:Linear", b"my_models:net", b"..evil:x"],
    "libsvm": [b"+1 1:1 3:0.5\n-1 2:1 qid:3\n+1 5:1 # note\n", b"-1 1:1\n"],
    "idx": [b"\x01\x00\x00\x08\x03" + b"".join(n.to_bytes(4, "big") for n in (3, 2, 2)) + bytes(12),
            b"\x00" + gzip.compress(b"\x00\x00\x08\x01\x00\x00\x00\x03\x01\x02\x03", mtime=0)],
    "cifar": [bytes(2 * 3073), bytes(3073)],
    "checkpoint": [_CHECKPOINT],
    "checkpoint_content": [json.dumps(sealed_description()).encode()],
    "history": [_HISTORY],
    "run_folder": [bytes([i]) + GOOD_RUN[name] for i, name in enumerate(RUN_FILES)],
    "records": [b'{"trial": "a", "settings": {"lr": 0.1}, "environment": {}, "outcome": {"finished": true}}'],
    "measurement": [json.dumps({"candidates": {"serial": {"us": 3.5, "start_s": 0.0}}}).encode()],
    "flower_reply": [
        json.dumps(_FACTS).encode() + b"\x00\x00" + _npy(np.zeros(4, np.float32)),
        json.dumps(_FACTS).encode() + b"\x00\x00" + _npy(np.zeros((2, 2))),
    ],
    "flower_settings": [json.dumps(_FLOWER).encode(), json.dumps({**_FLOWER, "steps.kind": "explicit",
                                                                  "steps.table": "[[1, 2, 3]]"}).encode()],
}  # fmt: skip
"""Valid inputs of every target, from which others are made by changing them."""
