"""fedagrac run, as a user meets it."""

import json
import os
import tomllib
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import fedagrac as fg
from command_line import command, process
from fedagrac.experiments.build import build_steps
from fedagrac.experiments.overrides import apply_settings
from fedagrac.experiments.schema import Experiment, default_table
from fedagrac.storage import run_folder

SMALL = ["--set", "rounds=2", "--set", "data.clients=4", "--set", "steps={kind='linear',first=1,increment=2}"]


def experiment(tmp_path, **changes):
    text = """
name = "tiny"
rounds = 3
target = 0.5
[data]
name = "digits"
clients = 5
partition = { kind = "shards", classes = 3 }
batch_size = 10
[model]
name = "logistic"
[steps]
kind = "gaussian"
mean = 8
variance = 16
[[algorithm]]
name = "fedagrac"
lr = 0.1
calibration = { 0 = 0.1, 2 = 1.0 }
[[algorithm]]
name = "fedavg"
lr = 0.1
"""
    path = tmp_path / "tiny.toml"
    path.write_text(text)
    return path


def assert_refused(message, *arguments, capsys):
    """Check that `fedagrac run` refuses its arguments with a message."""
    code, _, err = command("run", *arguments, capsys=capsys)
    assert code == 2
    assert message in " ".join(err.split())
    assert "Traceback" not in err


def test_the_default_runs_the_algorithms_of_the_paper_and_leaves_a_run_folder(capsys):
    code, out, err = command("run", *SMALL, capsys=capsys)
    assert code == 0
    assert all(len(line) <= 80 for line in out.splitlines() if "runs/" not in line)
    (folder,) = Path("runs").iterdir()
    assert folder.name.startswith("digits-")
    assert (folder / "curves.png").read_bytes()[:4] == b"\x89PNG"
    assert (folder / "curves.pdf").read_bytes()[:4] == b"%PDF"
    assert f"report  {folder / 'report.html'}" in out
    for name in fg.algorithms.PAPER_NAMES:
        assert name in out
        assert sorted(p.name for p in (folder / name).iterdir()) == [
            "environment.json", "experiment.toml", "history.jsonl", "model.safetensors", "status.json",
        ]  # fmt: skip
        lines = (folder / name / "history.jsonl").read_text().splitlines()
        assert [json.loads(line)["round"] for line in lines] == [1, 2]
    assert "x Kbar" in out  # FedLin's step size is explained
    assert "Traceback" not in err


def test_the_embedded_default_is_the_one_promised():
    e = Experiment.default()
    assert (e.data.name, e.data.clients, e.data.partition) == ("digits", 20, {"kind": "dirichlet", "alpha": 0.3})
    assert e.steps["kind"] == "gaussian"
    assert [a.name for a in e.algorithm] == [
        "fedavg", "fedprox", "fednova", "scaffold", "fedlin",
        "fedagrac", "fedagrac-avg", "fedagrac-first", "fedagrac-reverse",
    ]  # fmt: skip
    assert tuple(a.name for a in e.algorithm) == fg.algorithms.PAPER_NAMES
    K = build_steps(e.steps).counts(0, 20, 0)
    assert K.max() > 20 * K.min()


def test_a_file_gives_the_same_numbers_as_python(tmp_path, capsys):
    code, out, _ = command("run", str(experiment(tmp_path)), "--out", "mine", "--json", capsys=capsys)
    assert code == 0
    report = json.loads(out)
    fed = fg.Federation.load("digits", clients=5, partition=fg.Shards(3), seed=0)
    schedule = fg.schedule.Piecewise({0: 0.1, 2: 1.0})
    result = fg.simulate(
        fg.models.build("logistic", features=64, classes=10), fed, fg.FedaGrac(lr=0.1, calibration=schedule),
        rounds=3, steps=fg.Gaussian(8, 16), batch_size=10,
    )  # fmt: skip
    row = report["runs"][0]
    assert row["algorithm"] == "fedagrac"
    assert row["accuracy"] == result.history[-1]["test_accuracy"]
    assert row["rounds_to_target"] == result.rounds_to(accuracy=0.5)
    assert row["bytes"] == result.history[-1]["bytes_total"]
    saved = load_file("mine/fedagrac/model.safetensors")
    assert {name: tuple(p.shape) for name, p in saved.items()} == {"1.weight": (10, 64), "1.bias": (10,)}
    assert all(torch.equal(saved[name], p) for name, p in result.params.items())


def test_the_saved_experiment_repeats_the_run(tmp_path, capsys):
    command("run", *SMALL, "--out", "first", capsys=capsys)
    code, _, err = command("run", "first/experiment.toml", "--out", "second", capsys=capsys)
    assert code == 0, err
    for name in fg.algorithms.PAPER_NAMES:
        a, b = (load_file(f"{run}/{name}/model.safetensors") for run in ("first", "second"))
        assert all(torch.equal(a[k], b[k]) for k in a)
    assert tomllib.loads(Path("first/experiment.toml").read_text()) == tomllib.loads(
        Path("second/experiment.toml").read_text()
    )


def test_a_run_that_diverges_lets_the_others_finish(tmp_path, capsys):
    arguments = ["--set", "algorithm.fedagrac.lr=1e38", "--out", "mine"]
    code, out, _ = command("run", str(experiment(tmp_path)), *arguments, capsys=capsys)
    assert code == 0
    assert "fedagrac diverged" in out
    assert json.loads(Path("mine/fedagrac/status.json").read_text())["status"] == "diverged"
    assert json.loads(Path("mine/fedavg/status.json").read_text())["status"] == "finished"
    assert Path("mine/fedagrac/history.jsonl").read_text().count("\n") >= 1
    code, _, _ = command(
        "run", str(experiment(tmp_path)), "--set", "algorithm.lr=1e38", "--out", "b", capsys=capsys
    )
    assert code == 1  # nothing finished


def test_devices_and_their_wire_in_a_file(tmp_path, capsys):
    """Two slow and three fast devices, and a radio: K and the clock follow from the file alone."""
    steps = (
        "steps={kind='devices',deadline=1.0,profiles=[{step_time=0.5},{step_time=0.5},{step_time=0.1},"
        "{name='pi',flops=1.28e6},{step_time=0.1}]}"
    )
    arguments = ["--set", steps, "--set", "rounds=1", "--out", "mine", "--json"]
    code, out, err = command("run", str(experiment(tmp_path)), *arguments, capsys=capsys)
    assert code == 0, err
    row = json.loads(out)["runs"][1]
    history = json.loads(Path("mine/fedavg/history.jsonl").read_text())
    # logistic regression, batch 10: 2 * 2 * 10 * 64 * 10 operations a step, 0.02 s on the fourth device
    assert history["steps_mean"] == (2 + 2 + 10 + 50 + 10) / 5
    assert row["sim_time"] == pytest.approx(1.0)
    radio = ["--set", "clock={step_time=1e-9,bandwidth_up=2600,bandwidth_down=5200,latency=0.25}"]
    arguments = [*radio, "--set", "rounds=1", "--out", "radio", "--json"]
    code, out, _ = command("run", str(experiment(tmp_path)), *arguments, capsys=capsys)
    assert code == 0
    assert json.loads(out)["runs"][1]["sim_time"] == pytest.approx(
        0.5 + 0.5 + 1.0, rel=1e-6
    )  # 650 floats each way
    assert Path("radio/costs.png").exists()


def test_the_engine_is_chosen_on_the_command_line(tmp_path, capsys):
    models = {}
    for engine in ("serial", "lanes"):
        code, _, err = command(
            "run",
            str(experiment(tmp_path)),
            "--engine",
            engine,
            "--set",
            "dtype=float64",
            "--out",
            engine,
            capsys=capsys,
        )
        assert code == 0, err
        models[engine] = load_file(f"{engine}/fedagrac/model.safetensors")["1.weight"]
        assert json.loads(Path(engine, "fedagrac", "environment.json").read_text())["engine"] == engine
    assert torch.allclose(models["lanes"], models["serial"], rtol=1e-10)
    code, _, err = command("run", str(experiment(tmp_path)), "--engine", "lane", capsys=capsys)
    assert code == 2
    assert "did you mean 'lanes'" in " ".join(err.split())


def test_many_clients_by_resampling_in_a_file(tmp_path, capsys):
    arguments = ["--set", "data.partition={kind='resample',size=30}", "--set", "data.clients=3000"]
    arguments += [
        "--set",
        "participation=4",
        "--set",
        "rounds=1",
        "--set",
        "algorithm.fedagrac.init=zeros",
        "--json",
    ]
    code, out, err = command("run", str(experiment(tmp_path)), *arguments, capsys=capsys)
    assert code == 0, err
    assert json.loads(out)["runs"][0]["status"] == "finished"


def test_a_model_by_import_path_in_a_file(tmp_path, capsys):
    Path("my_models.py").write_text(
        "from torch import nn\n\ndef net(hidden):\n"
        "    return nn.Sequential(nn.Linear(64, hidden), nn.ReLU(), nn.Linear(hidden, 10))\n"
    )
    arguments = ["--set", "model={name='my_models:net',hidden=7}", "--set", "rounds=1", "--out", "mine"]
    code, _, err = command("run", str(experiment(tmp_path)), *arguments, capsys=capsys)
    assert code == 0, err
    assert load_file("mine/fedavg/model.safetensors")["0.weight"].shape == (7, 64)


def test_stop_target_is_used_in_the_table(tmp_path, capsys):
    arguments = ["--set", "target=0.3", "--set", "stop.accuracy=0.3", "--set", "rounds=30", "--out", "mine"]
    code, out, _ = command("run", str(experiment(tmp_path)), *arguments, capsys=capsys)
    assert code == 0
    assert "rounds to 30%" in out
    assert json.loads(Path("mine/fedavg/status.json").read_text())["status"] == "stopped"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["rouds=4"], "rouds = 4: expected a known setting"),
        (["rouds=4"], "did you mean 'rounds'?"),
        (["rounds=0"], "rounds = 0"),
        (["rounds=x"], "rounds = 'x'"),
        (["rounds"], "key=value"),
        (["name=../../x"], "name = '../../x'"),
        (["data.name=digit"], "did you mean 'digits'"),
        (["data.clients=0"], "clients = 0"),
        (["data.clients=5000"], "1437 samples"),
        (["data.batch_size=0"], "batch_size = 0"),
        (["data.partition.kind=dirichlett"], "did you mean 'dirichlet'"),
        (["data.partition.alpha=-1"], "data.partition.alpha = -1"),
        (["data.partition={kind='shards',classes=11}"], "number of classes in the data, 10"),
        (["model.name=logistics"], "did you mean 'logistic'"),
        (["model.width=3"], "width"),
        (["model.features=3"], "model.features = 3: expected 64"),
        (["model.classes=3"], "labels from 0 to 2"),
        (["steps.kind=gausian"], "did you mean 'gaussian'"),
        (["steps.mean=0"], "steps.mean = 0"),
        (["steps={kind='constant',steps=0}"], "steps.steps = 0"),
        (["steps={kind='explicit',table=[[1,2]]}"], "one for each of 20 clients"),
        (["algorithm.lr=-1"], "algorithm[0].lr = -1"),
        (["algorithm.0.name=fedavgg"], "did you mean 'fedavg'"),
        (["algorithm.fedavg.mu=1"], "algorithm[0].fedavg.mu = 1"),
        (["algorithm.fedsgd.lr=1"], "--set"),
        (["algorithm.1.name=fedavg", "algorithm.1.mu=0"], "algorithm[1].fedavg.mu"),
        (["algorithm=[]"], "algorithm"),
        (["algorithm=[{name='fedavg'},{name='fedavg'}]"], "label"),
        (["data.partition={kind='resample',size=0}"], "data.partition.size = 0"),
        (["steps={kind='devices',profiles=['raspberry-pi-5'],deadline=1}"], "did you mean 'raspberry-pi-4'"),
        (["steps={kind='devices',profiles=[{step_time=1,speed=2}],deadline=1}"], "steps.profiles[0].speed"),
        (["steps={kind='devices',profiles=['jetson-nano'],deadline=1}"], "one for each of 20 clients"),
        (["clock.step_time=0"], "clock"),
        (["clock.speed=1"], "clock.speed = 1"),
        (["model.name=no_such:thing"], "no_such"),
        (["lr=0"], "lr = 0"),
        (["target=92"], "0.68, not 68"),
        (["stop.accuracy=92"], "stop.accuracy"),
        (["participation=99"], "at most the number of clients, 20"),
        (["participation={size=3,by='luck'}"], "participation.by"),
        (["device=cuda:7"], "CUDA devices"),
        (["engine=lane"], "engine = 'lane'"),
        (["dtype=float16"], "dtype = 'float16'"),
        (["precision=tf32", "device=cpu"], "needs a GPU"),
        (["precision=bf16", "dtype=float64"], "a model of torch.float32"),
        (["precision=fp16"], "'float32', 'tf32' or 'bf16'"),
        (["seed=-1"], "seed = -1"),
    ],
)
def test_bad_settings_exit_with_2_and_write_nothing(settings, message, capsys):
    arguments = [part for setting in settings for part in ("--set", setting)]
    assert_refused(message, *arguments, capsys=capsys)
    assert list(Path().iterdir()) == []


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "a file that exists"),
        (b"name = ", "valid TOML"),
        (b"\xff\xfe\x00", "valid TOML"),
        (b"", "name"),
        (b'name = "x"', "steps"),
        (b'name = "x"\n[steps]\nkind = "constant"\nsteps = 3', "algorithm"),
        (b'name = "x"\n[steps]\nkind = "constant"\nsteps = 3\n[[algorithm]]\nname = "fedavg"', "lr"),
        (b'name = "x"\n[steps]\nkind = "constant"\n[[algorithm]]\nname = "fedavg"\nlr = 1', "steps.steps"),
        (b'name = "x"\nsteps = 0\n[[algorithm]]\nname = "fedavg"\nlr = 1', "steps = 0"),
    ],
)
def test_bad_files_exit_with_2(content, message, tmp_path, capsys):
    path = tmp_path / "bad.toml"
    if content is not None:
        path.write_bytes(content)
    assert_refused(message, str(path), capsys=capsys)


def test_a_folder_that_holds_something_is_not_touched(tmp_path, capsys):
    folder = tmp_path / "taken"
    folder.mkdir()
    (folder / "experiment.toml").write_text("name = 'another'")
    code, _, err = command("run", *SMALL, "--out", str(folder), capsys=capsys)
    assert code == 2
    assert "already holds an experiment" in " ".join(err.split())
    assert (folder / "experiment.toml").read_text() == "name = 'another'"
    (tmp_path / "file").write_text("")
    code, _, err = command("run", *SMALL, "--out", str(tmp_path / "file"), capsys=capsys)
    assert code == 2


def test_a_full_disk_is_named(tmp_path, capsys, monkeypatch):
    """The history of a run goes to a device that is always full."""
    if not Path("/dev/full").exists():
        pytest.skip("needs /dev/full")
    monkeypatch.setattr(run_folder, "opener", lambda path, flags: os.open("/dev/full", os.O_WRONLY))
    code, _, err = command("run", *SMALL, "--out", "mine", capsys=capsys)
    assert code == 1
    assert "history.jsonl: No space left on device" in " ".join(err.split())


def test_a_folder_that_cannot_be_written_is_an_error_not_a_traceback(tmp_path):
    blocked = tmp_path / "blocked"
    blocked.write_text("a file where a folder would have to be")
    done = process("run", "--set", "rounds=1", "--out", str(blocked / "below"))
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    assert "blocked" in done.stderr


def test_environment_names_versions_and_no_variables(capsys, monkeypatch):
    monkeypatch.setenv("SECRET_TOKEN", "hunter2-hunter2")
    command("run", *SMALL, "--out", "mine", capsys=capsys)
    text = Path("mine/fedavg/environment.json").read_text()
    facts = json.loads(text)
    assert facts["torch"] == torch.__version__
    assert facts["engine"] == "lanes"  # what auto took for a small model and four clients
    assert not any("hunter2" in p.read_text() for p in Path("mine").rglob("*.json"))


def test_settings_reach_where_they_point():
    table = apply_settings(default_table(), ["algorithm.lr=0.5", "algorithm.fedprox.mu=2", "algorithm.0.lr=0.25"])
    lrs = [entry["lr"] for entry in table["algorithm"]]
    assert lrs == [0.25] + [0.5] * 8
    assert table["algorithm"][1]["mu"] == 2
    assert default_table()["algorithm"][1]["mu"] == 0.1


def test_fedlins_step_size_is_scaled_by_kbar_unless_given():
    from fedagrac.experiments.run import prepare

    e = Experiment.of(apply_settings(default_table(), ["algorithm=[{name='fedlin'}]"]))
    prepared = prepare(e)
    K = build_steps(e.steps).counts(0, 20, 0)
    assert prepared.entries[0].algorithm.lr == pytest.approx(0.1 * float(prepared.federation.weights @ K))
    own = prepare(Experiment.of(apply_settings(default_table(), ["algorithm=[{name='fedlin',lr=0.7}]"])))
    assert own.entries[0].algorithm.lr == 0.7
    assert own.entries[0].note == ""
