"""What an operator does to a run folder: undo rounds, add a guard, exclude clients."""

import json
import os

import numpy as np
import pytest
import torch

import fedagrac as fg
from fedagrac.errors import FedagracError, InputError

pytest.importorskip("flwr", reason="the extra fedagrac[flower] is not installed")

from fedagrac.cli.app import main
from fedagrac.flower.operating import exclude_client, read_exclusions, roll_back, rounds_to_go_back_to
from fedagrac.flower.server import initial_model, run_federation
from fedagrac.flower.settings import Settings
from fedagrac.storage.checkpoints import stored_rounds
from fedagrac.storage.claims import claimed
from flower_grid import FED, K, close, config, federation, flower, model, simulated, vector


def poison(rounds, change=lambda v: v + 1000.0, node=11):
    """Return how replies are spoilt so that in some rounds a client's model is finite nonsense."""

    def spoil(of, kind, round, reply):
        if of == node and kind == "train.steps" and round in rounds:
            vector(reply.content, "model", change)
        return reply

    return spoil


def status(tmp_path):
    path = tmp_path / "run" / "status.json"
    return json.loads(path.read_text()) if path.exists() else None


@pytest.mark.parametrize("name", ["fedagrac", "scaffold", "fedavg"])
def test_a_run_that_was_rolled_back_equals_one_that_never_did_the_bad_rounds(name, tmp_path):
    settings = config(tmp_path, rounds=5, algorithm__name=name)
    clean = flower({**settings, "out": str(tmp_path / "clean")}, federation(settings))
    bad = flower(settings, federation(settings, poison({3, 4, 5})))
    assert bad.result.status == "finished"
    assert not torch.equal(bad.state["x"], clean.state["x"])
    roll_back(tmp_path / "run", 2)
    assert status(tmp_path) is None
    assert not (tmp_path / "run" / "model.safetensors").exists()
    assert len((tmp_path / "run" / "history.jsonl").read_text().splitlines()) == 2
    again = flower(settings, federation(settings))
    assert torch.equal(again.state["x"], clean.state["x"])
    for vectors in ("state", "table"):
        assert_same(getattr(again, vectors), getattr(clean, vectors))
    for field in ("round", "train_loss", "bytes_total", "weights"):
        assert again.history.column(field) == clean.history.column(field)
    assert again.history[2]["events"] == ["resumed after round 2"]
    assert status(tmp_path)["status"] == "finished"


def assert_same(ours, theirs):
    if hasattr(ours, "export"):
        (clients, ours), (expected, theirs) = ours.export(), theirs.export()
        assert clients.tolist() == expected.tolist()
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[key], theirs[key]) for key in ours)


@pytest.mark.parametrize("keep", [2, 5])
def test_only_rounds_with_a_checkpoint_can_be_reached_and_are_listed(keep, tmp_path, capsys):
    settings = config(tmp_path, rounds=6, keep_checkpoints=keep, algorithm__name="fedavg")
    flower(settings, federation(settings))
    kept = list(range(7 - keep, 7))
    assert stored_rounds(tmp_path / "run" / "checkpoint") == kept == rounds_to_go_back_to(tmp_path / "run")
    listed = ", ".join(map(str, kept))
    with pytest.raises(InputError, match=f"to = 1: expected a round with a checkpoint: {listed}"):
        roll_back(tmp_path / "run", 1)
    assert len((tmp_path / "run" / "history.jsonl").read_text().splitlines()) == 6
    for arguments, code in (([], 0), (["--to", "1"], 2), (["--to", "5"], 0)):
        with pytest.raises(SystemExit) as ended:
            main(["flower", "rollback", str(tmp_path / "run"), *arguments])
        assert (ended.value.code or 0) == code
    printed = capsys.readouterr()
    assert f"rounds with a checkpoint: {listed}" in printed.out
    assert "the next `flwr run` goes on with round 6" in printed.out
    assert f"--to = 1: expected a round with a checkpoint: {listed}" in printed.err
    assert stored_rounds(tmp_path / "run" / "checkpoint") == [t for t in kept if t <= 5]


def test_a_rollback_is_refused_while_a_server_runs_and_for_other_folders(tmp_path):
    settings = config(tmp_path, rounds=2, algorithm__name="fedavg")
    flower(settings, federation(settings))
    with claimed(tmp_path / "run"), pytest.raises(InputError, match="a folder in which no server runs"):
        roll_back(tmp_path / "run", 1)
    with pytest.raises(InputError, match="this one has no checkpoint"):
        roll_back(tmp_path / "nothing", 1)
    assert not (tmp_path / "nothing").exists()
    net, checkpoints = model(None), fg.Checkpoints(tmp_path / "simulated" / "checkpoint", every=1)
    fg.simulate(net, FED, fg.FedAvg(lr=0.1), 2, callbacks=[checkpoints])
    with pytest.raises(InputError, match="not of a simulation"):
        roll_back(tmp_path / "simulated", 1)


def test_a_damaged_checkpoint_or_history_is_found_before_anything_is_removed(tmp_path):
    settings = config(tmp_path, algorithm__name="fedavg")
    flower(settings, federation(settings))
    path = tmp_path / "run" / "checkpoint" / "round-00000001.safetensors"
    whole = path.read_bytes()
    path.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    with pytest.raises(FedagracError, match="is damaged: its content does not match its hash"):
        roll_back(tmp_path / "run", 1)
    path.write_bytes(whole)
    history = tmp_path / "run" / "history.jsonl"
    history.write_text("{}\n" + history.read_text())
    with pytest.raises(FedagracError, match="does not hold the 1 rounds of its checkpoint"):
        roll_back(tmp_path / "run", 1)
    assert rounds_to_go_back_to(tmp_path / "run") == [0, 1, 2, 3]
    assert status(tmp_path)["status"] == "finished"


def test_a_rollback_to_the_start_repeats_the_run(tmp_path):
    settings = config(tmp_path)
    first = flower(settings, federation(settings))
    roll_back(tmp_path / "run", 0)
    again = flower(settings, federation(settings))
    assert torch.equal(again.state["x"], first.state["x"])
    assert again.history.column("round") == [1, 2, 3]


def test_a_guard_may_be_added_changed_and_removed_when_a_run_resumes(tmp_path):
    settings = config(tmp_path, rounds=4)
    flower({**settings, "rounds": 2}, federation(settings, poison({2}, lambda v: 1e6 * v)))
    roll_back(tmp_path / "run", 1)
    guarded = {**settings, "guard.factor": 10.0}
    run = flower({**guarded, "rounds": 2}, federation(guarded, poison({2}, lambda v: 1e6 * v)))
    assert run.history.column("dropped") == [[], [1]]
    assert "guard was None, is {'factor': 10.0}" in run.history[1]["events"]
    run = flower({**settings, "guard.factor": 5.0, "rounds": 3}, federation(guarded))
    assert "guard was {'factor': 10.0}, is {'factor': 5.0}" in run.history[2]["events"]
    run = flower(settings, federation(settings))
    assert "guard was {'factor': 5.0}, is None" in run.history[3]["events"]


@pytest.mark.parametrize(("dtype", "value"), [("float32", 3e38), ("float32", 1e18), ("float64", 1e153)])
def test_a_finite_reply_whose_squared_norm_overflows_is_dropped(dtype, value, tmp_path):
    settings = config(tmp_path, rounds=2, min_clients=2, dtype=dtype)
    huge = poison({2}, lambda v: np.full_like(v, value))
    run = flower(settings, federation(settings, huge))
    assert run.history.column("dropped") == [[], [1]]
    assert run.history[1]["events"] == [
        f"client 1: reply dropped, model is too long: its squared norm overflows torch.{dtype}"
    ]

    def lose(node, kind, round, reply):
        return None if node == 11 and kind == "train.steps" and round == 2 else reply

    absent = {**settings, "out": str(tmp_path / "absent")}
    assert torch.equal(run.state["x"], flower(absent, federation(absent, lose)).state["x"])


def test_a_reply_that_is_far_longer_than_the_others_is_an_event_without_a_guard(tmp_path):
    settings = config(tmp_path, rounds=3)
    seen = {}

    def spoil(node, kind, round, reply):
        if kind == "train.steps" and round == 2:
            if node == 11:
                vector(reply.content, "model", lambda v: v + 1e9)
            seen[node - 10] = reply.content["vectors"]["model"].numpy().copy()
        return reply

    roll = {}
    run = flower(settings, federation(settings, spoil), callbacks=[Start(roll)])
    lengths = [np.linalg.norm(seen[i] - roll[2]) / (0.1 * K[i]) for i in range(3)]
    times = lengths[1] / ((lengths[0] + lengths[2]) / 2)
    assert times > 1e8
    (event,) = run.history[1]["events"]
    assert event.startswith(f"client 1: its update is {times:.3g} x the median of the others; it counts")
    assert run.history[0]["events"] == []


class Start(fg.Callback):
    """Keep the model with which every round begins."""

    def __init__(self, models):
        self.models = models

    def on_start(self, run):
        self.models[1] = run.state["x"].numpy().copy()

    def on_round(self, run, record):
        self.models[record.round + 1] = run.state["x"].numpy().copy()


def test_a_diverged_round_is_not_the_one_that_a_resume_uses(tmp_path):
    """Client 1 sends a bias of 1e19. Its model is usable, and the average is, but the loss overflows float32."""

    def overflow(output, target):
        return (output**4).mean()

    settings = config(tmp_path, rounds=3, dtype="float32", algorithm__name="fedavg")
    checked = Settings.of(settings)
    grid = federation(settings, poison({2}, lambda v: np.where(np.arange(len(v)) == 640, 1e19, v).astype("f4")))
    run = run_federation(grid, checked, initial_model(checked, model, None), FED.test, loss=overflow)
    told = status(tmp_path)
    assert (run.result.status, told["status"], len(run.history)) == ("diverged", "diverged", 2)
    assert "the longest update is that of client 1, " in told["reason"]
    assert "`fedagrac flower rollback`" in told["reason"]
    assert told["divergence"]["factor"] > 1e15
    assert rounds_to_go_back_to(tmp_path / "run") == [0, 1]
    again = flower(settings, federation(settings))
    assert again.history[1]["events"] == ["resumed after round 1"]
    clean = {**settings, "out": str(tmp_path / "clean")}
    assert torch.equal(again.state["x"], flower(clean, federation(clean)).state["x"])
    assert status(tmp_path)["status"] == "finished"


def test_a_diverged_run_can_be_rolled_back_further(tmp_path):
    settings = config(tmp_path, rounds=4, algorithm__name="fednova")

    def spoil(node, kind, round, reply):
        if kind == "train.steps" and round == 3:
            vector(reply.content, "model", lambda v: np.full_like(v, 5e152))
        return reply

    assert flower(settings, federation(settings, spoil)).result.status == "diverged"
    roll_back(tmp_path / "run", 1)
    assert status(tmp_path) is None
    run = flower(settings, federation(settings))
    assert close(run.state["x"], simulated(fg.FedNova(lr=0.1), rounds=4).vector)


class Exclude(fg.Callback):
    """Call the command `fedagrac flower exclude` after a round, as an operator would while the server runs."""

    def __init__(self, folder, after):
        self.folder, self.after = folder, after

    def on_round(self, run, record):
        for arguments in self.after.get(record.round, []):
            with pytest.raises(SystemExit) as ended:
                main(["flower", "exclude", str(self.folder), *arguments])
            assert not ended.value.code


def test_a_client_is_excluded_and_admitted_again_while_the_server_runs(tmp_path):
    settings = config(tmp_path, rounds=5)
    grid = federation(settings)
    operator = Exclude(tmp_path / "run", {1: [["1"]], 3: [["1", "--undo"]]})
    run = flower(settings, grid, callbacks=[operator])
    assert run.history.column("clients") == run.history.column("asked") == [3, 2, 2, 3, 3]
    assert [list(steps) for steps in run.history.column("steps")][1:3] == [["0", "2"], ["0", "2"]]
    assert run.history[1]["events"] == ["client 1: excluded"]
    assert run.history[3]["events"] == ["client 1: no longer excluded", "client 1: connected again"]
    assert len([sent for sent in grid.sent if sent == (11, "query.hello")]) == 2
    absent = config(tmp_path / "absent", rounds=5, min_clients=2)

    def lose(node, kind, round, reply):
        return None if node == 11 and kind == "train.steps" and round in (2, 3) else reply

    expected = flower(absent, federation(absent, lose))  # its rows stay, as those of an absent client
    assert_same(run.state, expected.state)
    assert_same(run.table, expected.table)


def test_an_excluded_client_stays_excluded_after_a_resume_and_by_the_setting(tmp_path):
    settings = config(tmp_path, rounds=2)
    flower({**settings, "rounds": 1}, federation(settings))
    exclude_client(tmp_path / "run", 2)
    grid = federation(settings)
    run = flower(settings, grid)
    assert run.history[1]["events"][:2] == ["resumed after round 1", "client 2: excluded"]
    assert run.history[1]["clients"] == 2
    assert (12, "train.steps") not in grid.sent
    run = flower({**settings, "rounds": 3, "exclude": "[0]"}, federation(settings))
    assert list(run.history[2]["steps"]) == ["1"]


@pytest.mark.parametrize(
    "content",
    [b"\xff\x00", b"[", b'"1"', b"[true]", b"[3]", b"[-1]", b"[0, 0]", b"[0, 1, 2]", b"[1.0]", b"{}", b"[" * 10**5,
     b"[" + b"0" * 5000 + b"]", b" " * (2**24 + 1)],
    ids=["bytes", "half", "text", "bool", "range", "negative", "twice", "all", "float", "table", "deep", "digits",
         "large"],
)  # fmt: skip
def test_a_hostile_list_of_excluded_clients_is_an_event_and_changes_nothing(content, tmp_path):
    class Write(fg.Callback):
        def on_round(self, run, record):
            exclude_client(tmp_path / "run", 1) if record.round == 1 else None
            if record.round > 1:
                (tmp_path / "run" / "exclude.json").write_bytes(content)

    settings = config(tmp_path, rounds=4, algorithm__name="fedavg")
    run = flower(settings, federation(settings), callbacks=[Write()])
    assert run.history.column("clients") == [3, 2, 2, 2]
    (event,) = run.history[2]["events"]
    assert event.startswith("the list of excluded clients stays as it was: ")
    assert len(event) < 600
    assert run.history[3]["events"] == []  # said once
    with pytest.raises(InputError, match=r"exclude\.json"):
        exclude_client(tmp_path / "run", 0)


def test_a_list_that_is_no_file_is_an_event(tmp_path):
    settings = config(tmp_path, rounds=2, algorithm__name="fedavg")
    flower({**settings, "rounds": 1}, federation(settings))
    os.mkfifo(tmp_path / "run" / "exclude.json")
    run = flower(settings, federation(settings))
    assert "the list of excluded clients stays as it was" in run.history[1]["events"][1]
    assert run.history.column("clients") == [3, 3]


def test_the_command_names_what_is_wrong(tmp_path, capsys):
    settings = config(tmp_path, rounds=1, algorithm__name="fedavg")
    flower(settings, federation(settings))
    folder = tmp_path / "run"
    for arguments, message in (
        ([str(tmp_path / "no"), "1"], "expected the run folder of a federation that has begun"),
        ([str(folder), "3"], "CLIENT = 3: expected a partition from 0 to 2"),
        ([str(folder), "1", "--undo"], "CLIENT = 1: expected a client that was excluded by this command: none"),
    ):
        with pytest.raises(SystemExit) as ended:
            main(["flower", "exclude", *arguments])
        assert ended.value.code == 2
        assert message in capsys.readouterr().err
    assert exclude_client(folder, 1) == [1]
    assert exclude_client(folder, 0) == [0, 1]
    with pytest.raises(InputError, match="a client other than the last one that takes part"):
        exclude_client(folder, 2)
    assert exclude_client(folder, 1, undo=True) == [0]
    assert list(read_exclusions(folder / "exclude.json", 3)) == [0]
