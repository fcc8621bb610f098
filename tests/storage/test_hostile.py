"""Hostile files and messages end in a one-line error, take little memory, and run no code."""

import ast
import copy
import gzip
import io
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import tomli_w
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

pytest.importorskip("flwr", reason="the extra fedagrac[flower] is not installed")

import fedagrac as fg
import hostile
from fedagrac.cli.app import main
from fedagrac.data import sources
from fedagrac.engines import choice
from fedagrac.errors import InputError
from fedagrac.experiments.overrides import apply_settings
from fedagrac.experiments.run import prepare, run_experiment
from fedagrac.experiments.schema import Experiment, default_table
from fedagrac.flower.settings import Settings
from fedagrac.flower.wire import BadReplyError, unpack
from fedagrac.imports import Imports
from fedagrac.paper.records import Records, Trial
from fedagrac.rounds.server import Server
from fedagrac.storage.checkpoints import Checkpoint, CheckpointError, Facts
from fedagrac.storage.clients import ClientTable
from fedagrac.storage.run_folder import read_history

SOURCE = Path(fg.__file__).parent
FEW = settings(max_examples=40, suppress_health_check=list(HealthCheck))
NASTY = [
    0, -1, 2**31, 2**62, 2**63 - 1, -(2**63), 0.0, -0.5, 1e-320, 1e308, float("inf"), float("nan"), True, "", "a",
    "../../x", "a\x00b", "[/]", "os:system", "\U0001f600", "x" * 5000, [], {}, [[]], [{}], [[1], 2],
    {"kind": "iid"}, {"0": "a"}, [1, "a"],
]  # fmt: skip


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


# the targets of the fuzzer


@pytest.mark.parametrize(
    "name", [n for n in hostile.TARGETS if n not in ("imports", "flower_reply", "libsvm", "idx")]
)
def test_valid_inputs_are_read_to_the_end(name, monkeypatch):
    monkeypatch.setattr(hostile, "EXPECTED", ())
    hostile.TARGETS[name](hostile.SEEDS[name][0])


@pytest.mark.parametrize("name", hostile.TARGETS)
@FEW
@given(data=st.binary(max_size=200))
def test_random_bytes_end_in_an_error_of_ours(name, data):
    hostile.TARGETS[name](data)


@st.composite
def changed(draw, seeds):
    """Return a valid input with pieces cut, doubled, overwritten or inserted."""
    data = draw(st.sampled_from(seeds))
    for _ in range(draw(st.integers(1, 3))):
        at = draw(st.integers(0, len(data)))
        end = min(len(data), at + draw(st.integers(0, 12)))
        piece = draw(
            st.sampled_from(
                [b"", data[at:end] * 2, b"[" * 3000, b"9" * 5000, b"-1", b"\xff", b"\x00\x00", b"1e999"]
            )
            | st.binary(max_size=8)
        )
        data = data[:at] + piece + data[end:]
    return data


@pytest.mark.parametrize("name", hostile.TARGETS)
@FEW
@given(data=st.data())
def test_valid_input_that_was_changed_ends_in_an_error_of_ours(name, data):
    hostile.TARGETS[name](data.draw(changed(hostile.SEEDS[name])))


def paths_of(value, path=()):
    """Return every path in nested tables and lists."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path] * bool(path) + [
        inner_path for key, value in inner for inner_path in paths_of(value, (*path, key))
    ]


def replaced(table, path, value):
    table = copy.deepcopy(table)
    place = table
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    return table


EXPERIMENTS = [{**hostile.SMALL_EXPERIMENT, "steps": steps} for steps in hostile.STEPS]


@settings(FEW, max_examples=150)
@given(data=st.data(), value=st.sampled_from(NASTY))
def test_any_setting_may_be_anything(data, value):
    table = data.draw(st.sampled_from(EXPERIMENTS))
    changed = replaced(table, data.draw(st.sampled_from(paths_of(table))), value)
    hostile.experiment(tomli_w.dumps(changed).encode())


@settings(FEW, max_examples=100)
@given(data=st.data())
def test_a_checkpoint_with_a_valid_hash_may_hold_anything(data):
    content = hostile.sealed_description()
    for _ in range(data.draw(st.integers(1, 2))):
        place = data.draw(st.sampled_from(paths_of(content)))
        value = data.draw(
            st.sampled_from([*NASTY, "bool", "float64", "int64", [3], [2, 3], [2, 4], ["bool", [], 0]])
        )
        content = replaced(content, place, value)
    hostile.checkpoint_content(json.dumps(content).encode())


# regressions


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("steps={kind='explicit',table=[[1],2]}", "Explicit[1] = 2"),
        ("steps={kind='constant',steps=1_000_000_000_000}", "at most 10000000"),
        ("steps={kind='gaussian',mean=1e300,variance=1}", "no client more than 10000000 steps"),
        ("steps={kind='linear',first=1,increment=1_000_000}", "the last of 20 clients"),
        ("steps={kind='devices',profiles={jetson-nano=1_000_000_000_000},deadline=1}", "profiles.jetson-nano"),
        ("steps={kind='devices',profiles={jetson-nano=20},deadline=1e300}", "no client more than 10000000 steps"),
        ("clock={jitter=-1}", "clock.jitter = -1"),
        ("data.clients=1_000_000_000_000", "clients = 1000000000000: expected an integer of at most 10000000"),
        ("data={name='synthetic',clients=1_000_000}", "at most 10000"),
        ("data.partition={kind='resample',size=1_000_000_000_000}", "data.partition.size"),
        ("data.batch_size=1_000_000_000_000", "data.batch_size"),
        ("participation={size=1_000_000_000_000,by='weight'}", "participation"),
        ("model.features=1_000_000_000", "model.features = 1000000000: expected 64"),
        ("model.classes=1_000_000_000", "model.classes"),
        ("seed=18446744073709551616", "seed"),
        ("lr=" + "9" * 400, "lr"),
        ("device=meta", "device = 'meta'"),
        ("algorithm.²=1", "²"),
        ("algorithm.²._=1", "algorithm.NAME.key"),
        (".".join("a" * 5000) + "=1", "parts in its key"),
        ("algorithm.label=\udc80", "text"),
    ],
)
def test_settings_that_asked_for_too_much_or_broke(setting, message, capsys):
    code, err = command("run", "--set", "rounds=1", "--set", setting, capsys=capsys)
    assert (code, message in err) == (2, True), err
    assert not list(Path().iterdir())


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"a = " + b"[" * 5000, "nested too deeply"),
        (b"a" + b".a" * 500 + b" = 1", "nested more than 32 levels deep"),
        (b"a" + b' . "a\\"b"' * 100_000 + b" = 1", "nested more than 32 levels deep"),
        (b"a = " + b"[" * 40 + b"]" * 40, "nested more than 32 levels deep"),
        (b"seed = " + b"9" * 5000, "valid TOML"),
        (b"seed = 0x" + b"f" * 9000, "an integer of more than 64 bits"),
        (b"seed = 1979-05-27", "date or time 1979-05-27"),
        (b'name = "a\x00b"', "valid TOML"),
        (b"# " + b"x" * 2**22, "at most 4194304 bytes"),
        (b"algorithm = 5\nname = 'x'", "algorithm"),
    ],
)
@pytest.mark.parametrize("verb", ["run", "theory", "sweep"])
def test_a_hostile_file_is_one_line_for_every_command(verb, content, message, capsys):
    Path("bad.toml").write_bytes(content)
    arguments = ["--grid", "algorithm.lr=1,2"] if verb == "sweep" else []
    code, err = command(verb, "bad.toml", *arguments, "--set", "algorithm.lr=1", capsys=capsys)
    assert (code, message in err) == (2, True), err


def test_too_little_memory_is_one_line(capsys, monkeypatch):
    """An allocation by torch that is larger than any machine is reported, too."""

    def refuse(*_):
        raise MemoryError

    monkeypatch.setattr("fedagrac.experiments.run.prepare", refuse)
    assert command("run", capsys=capsys) == (1, "error not enough memory: try a smaller experiment\n")
    monkeypatch.setattr("fedagrac.experiments.run.prepare", lambda *_: torch.empty(2**50))
    code, err = command("run", capsys=capsys)
    assert code == 1
    assert "not enough memory" in err
    assert "Traceback" not in err


def test_the_batches_of_a_round_have_a_limit(capsys):
    many = ["--set", "data.batch_size=1000", "--set", "steps={kind='constant',steps=1_000_000}"]
    code, err = command("run", *many, capsys=capsys)
    assert (code, "at most 268435 local steps with batches of 1000 samples" in err) == (2, True), err


def test_algorithms_that_are_not_tables_cannot_be_set():
    for entries in (5, {"lr": 1}, [5]):
        with pytest.raises(InputError, match="not \\[\\[algorithm\\]\\]"):
            apply_settings({"algorithm": entries}, ["algorithm.lr=1"])
    assert apply_settings(default_table(), ["name=2024-01-01"])["name"] == "2024-01-01"


def command(*arguments, capsys):
    """Run a command in this process. Return its exit code and its errors, which hold no traceback."""
    with pytest.raises(SystemExit) as ended:
        main([str(argument) for argument in arguments])
    err = capsys.readouterr().err
    assert "Traceback" not in err
    assert [line.startswith("error") for line in err.splitlines()][-1:] == [True]
    return ended.value.code, err


def test_a_real_process_says_one_line():
    Path("bad.toml").write_bytes(b"a = " + b"[" * 5000)
    done = subprocess.run(
        [sys.executable, "-m", "fedagrac", "run", "bad.toml"], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout, len(done.stderr.splitlines())) == (2, "", 1)
    assert done.stderr.startswith("error")


@pytest.mark.parametrize("name", hostile.RUN_FILES)
@pytest.mark.parametrize("content", [b"\xff", b"[" * 5000, b"5", b'{"a": ' * 500, b"9" * 5000, b"null\n" * 3])
def test_a_hostile_run_folder_is_one_line(name, content, capsys):
    hostile.run_folder(hostile.SEEDS["run_folder"][0])
    folder = Path("run")
    folder.mkdir()
    for file, good in hostile.GOOD_RUN.items():
        (folder / file).write_bytes(good)
    (folder / name).write_bytes(content)
    code, err = command("report", folder, capsys=capsys)
    assert (code, name in err) == (2, True), err


def test_a_hostile_checkpoint_or_history_is_one_line_for_resume(capsys):
    changes = {"checkpoint_every": 1, "algorithm": [{"name": "fedagrac"}]}
    run_experiment(prepare(Experiment.of({**hostile.SMALL_EXPERIMENT, **changes})), Path("out"))
    run = Path("out/fedagrac")
    (run / "status.json").unlink()
    history = run / "history.jsonl"
    good = history.read_bytes()
    for content, message in (
        (b"5\n" * 3, "does not hold"),
        (b"[" * 9999, "nested"),
        (b'{"round": 1}\n', "a round lacks test_accuracy"),
    ):
        history.write_bytes(content)
        code, err = command("run", "--resume", "--out", "out", capsys=capsys)
        assert (code, message in err) == (1, True), err
    history.write_bytes(good)
    older = run / "checkpoint/round-00000001.safetensors"
    for change, message in (
        ({"num_clients": 10**15}, "num_clients is 1000000000000000"),
        ({"parts": 10**9}, "parts is 1000000000"),
        ({"parts": 2}, "rank-1"),
        ({"round": -1}, "round is -1"),
        ({"num_clients": True}, "num_clients is True"),
        ({"facts": []}, "no facts"),
    ):
        described = hostile.sealed_description()
        older.write_bytes(hostile.sealed({**described, "head": {**described["head"], **change}}))
        code, err = command("run", "--resume", "--out", "out", capsys=capsys)
        assert (code, message in err) == (1, True), err


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({"clients": ["int64", [2], -1]}, "clients that the run does not have"),
        ({"clients": ["int64", [2], 1]}, "clients that the run does not have"),
        ({"clients": ["float32", [2], 0]}, "'clients' has 1 dimensions of torch.float32"),
        ({"rows.nu": ["float32", [3, 4], 0]}, "one row for each"),
        ({"rows.nu": ["float32", [2], 0]}, "'rows.nu' has 1 dimensions"),
        ({"state.x": ["float32", [], 0]}, "'state.x' has 0 dimensions"),
        ({"state.x": ["float8_e4m3fn", [4], 0]}, "float8"),
        ({"other": ["float32", [4], 0]}, "it holds 'other'"),
        ({"state.x": ["float32", [3], 0]}, "x has 3 numbers of torch.float32, expected 4"),
        ({"state.x": ["float64", [4], 0]}, "x has 4 numbers of torch.float64"),
        ({"state.x1": ["float64", [4], 0]}, "x1 has 4 numbers of torch.float64"),
        ({"rows.v": ["float64", [2, 4], 0]}, "the clients' v has 4 numbers of torch.float64"),
        ({"state.mu": ["float32", [4], 0]}, "expected nu, x, x1"),
        ({"rows.c": ["float32", [2, 4], 0]}, "the clients' 'c, nu, v', expected nu, v"),
        ({"rows.nu": ["float32", [2, 3], 0]}, "the clients' nu has 3 numbers"),
    ],
)
def test_a_checkpoint_that_does_not_fit_is_a_checkpoint_error(tensors, message, monkeypatch):
    monkeypatch.setattr(hostile, "EXPECTED", ())
    described = hostile.sealed_description()
    described["tensors"] = {**described["tensors"], **tensors}
    with pytest.raises(CheckpointError, match=message):
        hostile.checkpoint_content(json.dumps(described).encode())


def test_the_history_of_a_checkpoint_of_many_rounds_is_not_made_up():
    Path("history.jsonl").write_text('{"round": 1}\n')
    with pytest.raises(CheckpointError, match="does not hold the 1000000000000 rounds"):
        read_history(Path("history.jsonl"), 10**12)


def test_invalid_records_and_measurements_are_refused():
    records, trial = Records("records"), Trial("a", {})
    path = records.path("r")
    path.parent.mkdir(parents=True)
    for content in (b"[" * 9999, b'{"trial": 1, "settings": 2, "outcome": 3, "environment": 4}', b"\xff"):
        path.write_bytes(content)
        assert records.get("r", trial) is None
    for us in ('"5"', "true", "1e999", "9" * 400, "-1"):
        path.write_text(f'{{"candidates": {{"serial": {{"us": {us}, "start_s": 0}}}}}}')
        assert choice.read_measurement(path) is None


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"steps.kind": "client", "steps.seconds": "x"}, "steps.seconds = 'x'"),
        ({"a": 5, "a.b": 1}, "a is a value"),
        ({"clients": 10**12}, "at most 10000000"),
        ({"steps": "[" * 9999}, "nested too deeply"),
    ],
)
def test_flower_settings_that_broke(config, message):
    with pytest.raises(InputError, match=message):
        Settings.of({"clients": 3, "algorithm.name": "fedavg", "algorithm.lr": 0.1, **config})


@pytest.mark.parametrize(
    ("facts", "message"),
    [
        ([], "it has no facts"),
        ({}, "sim_time is None"),
        ({"bytes_total": 0, "sim_time": float("nan")}, "sim_time is nan"),
        ({"bytes_total": True, "sim_time": 1.0}, "bytes_total is True"),
        ({"bytes_total": 0, "sim_time": 1.0, "sizes": 5}, "sizes is 5"),
        ({"bytes_total": 0, "sim_time": 1.0, "sizes": [0]}, "sizes is .0"),
        ({"bytes_total": 0, "sim_time": 1.0, "identity": [1]}, "identity is .1"),
    ],
)
def test_invalid_facts_of_a_checkpoint_are_refused(facts, message):
    with pytest.raises(ValueError, match=message):
        Facts.read(facts)


def test_a_checkpoint_of_another_federation_is_refused():
    fleet = hostile.live_fleet()[0]
    server = Server(fleet.settings.build_algorithm(), {"x": fleet.model.initial()}, ClientTable(1))
    facts = Facts(1.0, 0, sizes=(5, 5), identity=fleet.identity())
    with pytest.raises(CheckpointError, match="has 2 clients, expected 1"):
        fleet.restore(server, Checkpoint(0, server.state, ClientTable(1), facts))
    with pytest.raises(InputError, match="another folder"):
        fleet.restore(server, Checkpoint(0, server.state, ClientTable(1), Facts(1.0, 0, sizes=(5,))))


@pytest.mark.parametrize(
    ("read", "content", "message"),
    [
        (lambda p: sources.read_idx(p, (3,)), hostile.SEEDS["idx"][1][1:-9], "damaged gzip data"),
        (lambda p: sources.read_idx(p, (3,)), b"\x1f\x8b\x08" + b"x" * 99, "damaged gzip data"),
        (lambda p: sources.read_idx(p, (3,)), b"no gzip", "damaged gzip data"),
        (lambda p: sources.read_cifar(p, 1), b"\x0a" + bytes(3072), "a label 10"),
        (lambda p: sources.read_libsvm(p, 1, 5), b"1 6:1\n", "LIBSVM text with 5 features"),
        (lambda p: sources.read_libsvm(p, 1, 5), b"1 1:nan\n", "NaN or infinity"),
        (lambda p: sources.read_libsvm(p, 1, 5), b"1 1:1\n" * 2, "2 samples"),
        (lambda p: sources.read_libsvm(p, 1, 5), b"1 \xff:1\n", "LIBSVM text"),
    ],
)
def test_invalid_data_files_are_refused(read, content, message):
    Path("data").write_bytes(content)
    with pytest.raises(InputError, match=message):
        read(Path("data"))


# memory


def npy(shape, dtype="<f4", content=bytes(16)):
    header = f"{{'descr': {dtype!r}, 'fortran_order': False, 'shape': {shape}, }}".encode()
    header += b" " * (-(len(header) + 11) % 64) + b"\n"
    return b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header + content


def reply(data):
    from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict

    vectors = ArrayRecord({"model": Array("float32", (4,), "numpy.ndarray", data)})
    return unpack(RecordDict({"facts": ConfigRecord({"client": 0}), "vectors": vectors}))


def test_a_reply_is_as_long_as_its_bytes():
    assert reply(npy("(4,)")).vectors["model"].tolist() == [0, 0, 0, 0]
    file = io.BytesIO()
    np.save(file, np.array([[1.5, -2.0]]))
    assert reply(file.getvalue()).vectors["model"].tolist() == [[1.5, -2.0]]  # refused later, by its shape
    for data in (
        npy("(1000000000000,)"),
        npy("(3,)"),
        npy("(-1,)"),
        npy("(4,)", "|O"),
        npy("(2,)", "<U2"),
        b"",
        b"x",
    ):
        with pytest.raises(BadReplyError, match="cannot be read"):
            reply(data)


ATTACKS = """
import gzip, json, resource, sys
sys.path[:0] = [{tests!r}, {tests!r} + '/storage']
import hostile, test_hostile
import numpy as np
import tomli_w
for name, seeds in hostile.SEEDS.items():  # what is loaded at first use
    hostile.TARGETS[name](seeds[0])
inputs = list(test_hostile.attacks())
pages = int(open("/proc/self/statm").read().split()[0])
limit = pages * resource.getpagesize() + {megabytes} * 2**20
resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
try:
    np.ones({megabytes} * 2**18)
except MemoryError:
    for name, data in inputs:
        hostile.TARGETS[name](data)
    print("held")
"""


def attacks():
    """Yield small inputs that claim to be large."""
    many = 10**12
    for change in (
        {"data": {"name": "digits", "clients": many}},
        {"data": {"name": "digits", "clients": many, "partition": {"kind": "resample", "size": 3}}},
        {"data": {"name": "digits", "clients": 3, "partition": {"kind": "resample", "size": many}}},
        {"data": {"name": "synthetic", "clients": many}},
        {"data": {"name": "digits", "clients": 3, "batch_size": many}},
        {"model": {"name": "logistic", "features": 10**9}},
        {"model": {"name": "logistic", "classes": 10**9}},
        {"model": {"name": "cnn", "classes": 10**9}},
        {"steps": {"kind": "constant", "steps": 10**15}},
        {"steps": {"kind": "devices", "profiles": {"jetson-nano": many}, "deadline": 1}},
        {"participation": {"size": many, "by": "weight"}},
        {"rounds": 10**15},
    ):
        yield "experiment", tomli_w.dumps({**hostile.SMALL_EXPERIMENT, **change}).encode()
    yield "experiment", b"a = [" + b"[" * 10**6
    yield "experiment", b"a" + b".a" * 2000 + b" = 1"
    yield "libsvm", b"1 2147483647:1\n1 99999999999999999999:1\n"
    yield "libsvm", b"1\n" * 500_000
    yield "idx", b"\x01\x00\x00\x08\x03" + b"\xff" * 12 + bytes(100)
    yield "idx", b"\x00" + gzip.compress(hostile.SEEDS["idx"][0][1:] + bytes(2**28), 1, mtime=0)
    yield "checkpoint", (2**60).to_bytes(8, "little") + b"{}"
    head = json.dumps({"clients": {"dtype": "I64", "shape": [2**40], "data_offsets": [0, 2**43]}}).encode()
    yield "checkpoint", len(head).to_bytes(8, "little") + head
    for change in ({"num_clients": 10**15}, {"parts": 10**9}, {"round": 10**15}):
        content = hostile.sealed_description()
        yield "checkpoint_content", json.dumps({**content, "head": {**content["head"], **change}}).encode()
    for shape in ("(1000000000000,)", "(1000000000,)", "(1000000, 1000000)"):
        yield "flower_reply", b"{}\x00\x00" + npy(shape)
    yield "flower_settings", json.dumps({"clients": many, "algorithm.name": "fedavg", "algorithm.lr": 1}).encode()


def test_small_inputs_that_claim_to_be_large_take_little_memory():
    code = ATTACKS.format(tests=str(Path(__file__).parents[1]), megabytes=192)
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, check=False
    )
    assert done.stdout.strip().endswith("held"), done.stderr[-2000:]


# code


MODEL = "from torch import nn\nfrom os import system\n\ndef net(hidden=3):\n    return nn.Linear(64, 10)\n"


def small_file(path, **more):
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    Path(path).write_text(
        tomli_w.dumps({
            **hostile.SMALL_EXPERIMENT, "rounds": 1, "model": {"name": "models_for_test:net", **more},
            "algorithm": [{"name": "fedavg"}],
        })
    )  # fmt: skip
    return path


@pytest.mark.parametrize("arguments", [["run"], ["theory"], ["sweep", "--grid", "algorithm.lr=0.1,0.2"]])
def test_a_file_cannot_run_a_command_unless_it_is_trusted(arguments, capsys):
    path = small_file("evil.toml", name="os:system", command="touch ran")
    code, err = command(*arguments[:1], path, *arguments[1:], capsys=capsys)
    assert code == 2
    assert "model.name = 'os:system'" in err
    assert "--trust-imports" in err
    assert not Path("ran").exists()
    code, err = command(*arguments[:1], path, *arguments[1:], "--trust-imports", capsys=capsys)
    assert (code, "it returned int" in err) == (2, True)
    assert Path("ran").exists()  # what the flag is for


def test_no_module_is_imported_before_it_is_allowed(tmp_path, monkeypatch):
    (tmp_path / "installed").mkdir()
    (tmp_path / "installed/package_for_test").mkdir()
    (tmp_path / "installed/package_for_test/__init__.py").write_text("import pathlib; pathlib.Path('ran').touch()")
    monkeypatch.syspath_prepend(tmp_path / "installed")
    for path in ("package_for_test:net", "package_for_test.part:net"):
        with pytest.raises(InputError, match="`trusted`"):
            Imports().build(path, {})
    assert not Path("ran").exists()
    with pytest.raises(InputError, match="net"):
        Imports(trusted=True).build("package_for_test:net", {})
    assert Path("ran").exists()


def test_a_local_file_is_taken_from_exactly_its_place(capsys):
    path = small_file("there/mine.toml", hidden=4)
    Path("there/models_for_test.py").write_text("from neighbour_for_test import size\n" + MODEL)
    Path("there/neighbour_for_test.py").write_text("size = 3\n")
    assert prepare(Experiment.load(path), imports=Imports(Path("there"))).module.weight.shape == (10, 64)
    assert "device = 'meta'" in command("run", path, "--set", "device=meta", capsys=capsys)[1]  # after the model
    assert "trust-imports" in command("run", path, "--set", "model.name=no_such:net", capsys=capsys)[1]
    Path("torch.py").write_text("from torch import nn\n\ndef net():\n    return nn.Linear(1, 2)\n")
    Path("part").mkdir()
    Path("part/other.py").write_text("from .deeper import net\n")
    Path("part/deeper.py").write_text("from torch import nn\n\nclass net(nn.Linear):\n"
                                      "    def __init__(self):\n        super().__init__(3, 4)\n")  # fmt: skip
    assert Imports().build("torch:net", {}).in_features == 1
    assert Imports().build("part.other:net", {}).out_features == 4
    assert not [name for name in sys.path if name == str(Path.cwd())]


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("models_for_test:system", "itself defines"),
        ("models_for_test:nn", "itself defines"),
        ("models_for_test:missing", "missing"),
        ("models_for_test:net.weight", "module:factory"),
        ("../models_for_test:net", "module:factory"),
        ("models_for_test", "module:factory"),
        (":", "module:factory"),
        ("x" * 5000 + ":net", "`trusted`"),
        ("broken_for_test:net", "SyntaxError"),
        ("raises_for_test:net", "ZeroDivisionError"),
    ],
)
def test_import_paths_that_are_refused(path, message):
    Path("models_for_test.py").write_text(MODEL)
    Path("broken_for_test.py").write_text("def (")
    Path("raises_for_test.py").write_text("def net():\n    return 1 / 0\n")
    with pytest.raises(InputError, match=message):
        Imports().build(path, {})


FORBIDDEN_MODULES = {
    "pickle",
    "cPickle",
    "dill",
    "cloudpickle",
    "joblib",
    "marshal",
    "shelve",
    "yaml",
    "jsonpickle",
}
FORBIDDEN_CALLS = {
    "eval", "exec", "compile", "__import__", "torch.load", "np.load", "numpy.load", "os.system", "os.popen",
    "tempfile.mktemp", "importlib.import_module", "torch.hub.load",
}  # fmt: skip
FORBIDDEN_METHODS = {"extractall", "extract", "read_pickle", "to_pickle"}
ALLOWED = {
    ("imports.py", "importlib.import_module"),  # decides before it imports
    ("__init__.py", "importlib.import_module"),  # the package's own modules, from a table of its own
    ("flower/__init__.py", "importlib.import_module"),  # the same
}
"""Import paths that a file gives are followed in one place."""


def suspicions(path):
    """Yield every construct of a module that could run code from a file."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (a.name for a in node.names if a.name.split(".")[0] in FORBIDDEN_MODULES)
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in FORBIDDEN_MODULES:
            yield node.module
        elif isinstance(node, ast.ImportFrom):
            yield from (
                f"{node.module}.{a.name}" for a in node.names if f"{node.module}.{a.name}" in FORBIDDEN_CALLS
            )
        elif isinstance(node, ast.Call):
            called = ast.unparse(node.func)
            if called in FORBIDDEN_CALLS or called.rsplit(".", 1)[-1] in FORBIDDEN_METHODS:
                yield called
            yield from (
                f"{called}({k.arg}=True)"
                for k in node.keywords
                if k.arg in ("shell", "allow_pickle")
                and not (isinstance(k.value, ast.Constant) and not k.value.value)
            )


def test_nothing_in_the_package_can_run_what_a_file_says():
    suspicious = {(p.relative_to(SOURCE).as_posix(), what) for p in SOURCE.rglob("*.py") for what in suspicions(p)}
    assert suspicious == ALLOWED


def test_the_search_for_suspicions_finds_them(tmp_path):
    code = tmp_path / "code.py"
    code.write_text(
        "import pickle\nfrom os import system\neval('1')\nnp.load(f)\ntar.extractall()\nrun('x', shell=True)\n"
        "np.save(f, a, allow_pickle=False)\nmodule.eval()\n"
    )
    assert sorted(suspicions(code)) == [
        "eval", "np.load", "os.system", "pickle", "run(shell=True)", "tar.extractall",
    ]  # fmt: skip
