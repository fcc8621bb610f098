"""Flower: a federation over an in-memory grid, and with real processes on loopback."""

import json
import re
import runpy
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import fedagrac as fg
from fedagrac.engines import SerialEngine
from fedagrac.errors import FedagracError, InputError
from flower_processes import Loopback

pytest.importorskip("flwr", reason="the extra fedagrac[flower] is not installed")

from flwr.app import Array, Context, RecordDict

from fedagrac.algorithms import REGISTRY
from fedagrac.cli.app import main
from fedagrac.core.streams import first_weights
from fedagrac.flower import client_app, link
from fedagrac.flower.app import write_app
from fedagrac.flower.fleet import FlowerFleet
from fedagrac.flower.link import Link
from fedagrac.flower.server import initial_model, run_federation
from fedagrac.flower.settings import Settings, partition_of
from fedagrac.report import read_run
from fedagrac.rounds.server import Server
from fedagrac.storage.checkpoints import read_checkpoint
from fedagrac.storage.clients import ClientTable
from flower_grid import FED, K, Node, StandIn, close, config, data, federation, flower, model, simulated, vector
from two_layers import module_for

NEEDS_STEPS = ["fedlin"]
"""The algorithms whose clients cannot choose K_i."""


def module_hook(name):
    """Return the function that makes the module of an algorithm's federation."""
    return lambda context: module_for(name)


@pytest.mark.parametrize("name", sorted(REGISTRY))
def test_planned_rounds_equal_a_simulation(name, tmp_path):
    settings, model = config(tmp_path, algorithm__name=name), module_hook(name)
    run = flower(settings, federation(settings, model=model), FED.test, model=model)
    expected = simulated(fg.algorithm(name, lr=0.1), model=model)
    assert close(run.state["x"], expected.vector)
    assert run.history[-1]["test_accuracy"] == expected.history[-1]["test_accuracy"]
    assert run.history[-1]["test_loss"] == pytest.approx(expected.history[-1]["test_loss"], rel=1e-12)
    assert run.history[-1]["train_loss"] == pytest.approx(expected.history[-1]["train_loss"])
    assert json.loads((tmp_path / "run" / "status.json").read_text())["status"] == "finished"
    assert read_run(tmp_path / "run").status == "finished"  # `fedagrac report` reads the folder
    saved = load_file(tmp_path / "run" / "model.safetensors")
    assert close(saved["1.weight"], expected.params["1.weight"])


@pytest.mark.parametrize("name", sorted({*REGISTRY} - {*NEEDS_STEPS}))
def test_steps_chosen_by_clients_give_the_same_rounds(name, tmp_path):
    settings, model = config(tmp_path, algorithm__name=name, steps__kind="client"), module_hook(name)
    grid = federation(settings, model=model, steps=K)
    run = flower(settings, grid, model=model)
    assert close(run.state["x"], simulated(fg.algorithm(name, lr=0.1), model=model).vector)
    assert run.history[0]["steps"] == {"0": 3, "1": 5, "2": 12}
    asked = sorted(node for node, kind in grid.sent if kind == "train.first")
    who = {"fedagrac": [12] * 3, "fedagrac-first": [10, 11, 12] * 3, "fedagrac-reverse": [10, 11] * 3}
    assert asked == sorted(who.get(name, []))


SENDS_GRADIENTS = [fg.MimeLite(lr=0.1), fg.Scaffold(lr=0.1, option="I")]


@pytest.mark.parametrize("form", ["explicit", "client"])
@pytest.mark.parametrize("algorithm", SENDS_GRADIENTS, ids=["mimelite", "scaffold one"])
def test_gradients_at_the_server_model_travel_with_the_model_in_one_exchange(algorithm, form, tmp_path):
    """The local steps do not need them: two vectors go down, x and c_i, and two up, x_i and g_i."""
    assert algorithm.traits.exchanges == 1
    option = {"algorithm__option": "I"} if algorithm.name == "scaffold" else {}
    settings = config(tmp_path, algorithm__name=algorithm.name, steps__kind=form, **option)
    grid = federation(settings, steps=K)
    run = flower(settings, grid)
    assert close(run.state["x"], simulated(algorithm).vector)
    assert {kind for _, kind in grid.sent} == {"query.hello", "train.steps"}
    for column in ("bytes_down", "bytes_up"):
        assert run.history.column(column) == [2 * 3 * 650 * 8] * 3


@pytest.mark.parametrize("change", ["missing", "too long"])
@pytest.mark.parametrize("form", ["explicit", "client"])
def test_a_reply_whose_gradient_cannot_be_used_is_dropped(form, change, tmp_path):
    def spoil(node, kind, round, reply):
        if node == 11 and kind == "train.steps" and round == 2:
            if change == "missing":
                del reply.content["vectors"]["gradient"]
            else:
                vector(reply.content, "gradient", lambda v: 1e30 * v)
        return reply

    settings = config(tmp_path, algorithm__name="mimelite", min_clients=2, steps__kind=form, guard__factor=10.0)
    run = flower(settings, federation(settings, spoil, steps=K))
    assert [set(record["weights"]) for record in run.history] == [{"0", "1", "2"}, {"0", "2"}, {"0", "1", "2"}]
    assert float(run.state["m"].abs().max()) < 10
    said = "gradient is missing" if change == "missing" else "its gradient is .* x the median"
    assert re.search(f"client 1: .*dropped, {said}", run.history[1]["events"][0])


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        ({"engine": "lanes"}, {}),
        ({"sampling": "shuffle", "weight_decay": 0.01}, {"sampling": "shuffle", "weight_decay": 0.01}),
        ({"batch_size": "full"}, {"batch_size": None}),
        ({"seed": 7}, {"seed": 7}),
    ],
    ids=["lanes", "shuffle", "full", "seed"],
)
def test_settings_of_the_local_rule_mean_what_they_mean_in_a_simulation(ours, theirs, tmp_path):
    settings = config(tmp_path, **ours)
    run = flower(settings, federation(settings))
    options = {"steps": fg.Explicit([K]), "batch_size": 10, "engine": "serial", **theirs}
    expected = fg.simulate(model(None).double(), FED, fg.FedaGrac(lr=0.1), 3, **options)
    assert close(run.state["x"], expected.vector, 1e-10)


def test_a_data_hook_may_return_a_federation_of_one_client(tmp_path):
    settings = config(tmp_path)
    grid = federation(settings)
    for i, node in enumerate(grid.nodes.values()):
        node.app = client_app(model, lambda context, i=i: fg.Federation.from_arrays([data(context)]))
    assert close(flower(settings, grid).state["x"], simulated(fg.FedaGrac(lr=0.1)).vector)
    grid.nodes[10].app = client_app(model, lambda context: FED)
    with pytest.raises(FedagracError, match=r"missing partition-id 0 .*a Federation of one client"):
        flower({**settings, "out": str(tmp_path / "other")}, grid)


def test_only_fast_clients_upload_a_second_vector(tmp_path):
    settings = config(tmp_path)
    run = flower(settings, federation(settings))
    d = 650 * 8
    assert [record["bytes_up"] for record in run.history] == [4 * d] * 3
    assert [record["bytes_down"] for record in run.history] == [6 * d] * 3
    assert [record["first_gradients"] for record in run.history] == [1] * 3


@pytest.mark.parametrize("form", ["explicit", "client"])
def test_small_steps_send_their_gradient_sum_because_the_model_does_not_give_it(form, tmp_path):
    settings = config(tmp_path, algorithm__lr=0.001, steps__kind=form, dtype="float32")
    run = flower(settings, federation(settings, steps=K))
    expected = simulated(fg.FedaGrac(lr=0.001), dtype=torch.float32)
    assert close(run.state["x"], expected.vector, 1e-6)
    assert run.history[0]["bytes_up"] == 4 * 650 * (3 + 1 + 2)  # eta K < 0.01 for K = 3 and 5 alone


def test_an_algorithm_that_needs_k_first_is_refused(tmp_path):
    assert [name for name in sorted(REGISTRY) if fg.algorithm(name, lr=0.1).traits.needs_steps] == NEEDS_STEPS
    for name in NEEDS_STEPS:
        settings = config(tmp_path, algorithm__name=name, steps__kind="client")
        with pytest.raises(InputError, match=f"the local rule of {name} needs K_i before it starts"):
            flower(settings, federation(settings))


SPOILT = {
    "holds NaN": lambda r: vector(r, "model", lambda v: np.where(np.arange(len(v)) == 3, np.nan, v)),
    "has shape (649,)": lambda r: vector(r, "model", lambda v: v[1:]),
    "has shape (1, 650)": lambda r: vector(r, "model", lambda v: v[None]),
    "torch.float32": lambda r: vector(r, "model", lambda v: v.astype("float32")),
    "model is missing": lambda r: r["vectors"].pop("model"),
    "steps = 100000": lambda r: r["facts"].update(steps=100_000),
    "steps = -1": lambda r: r["facts"].update(steps=-1),
    "steps = 3.0": lambda r: r["facts"].update(steps=3.0),
    "round = 7": lambda r: r["facts"].update(round=7),
    "client = 2": lambda r: r["facts"].update(client=2),
    "loss = nan": lambda r: r["facts"].update(loss=float("nan")),
    "cannot be read": lambda r: r.pop("facts"),
    "'total' among its vectors was not asked for": lambda r: r["vectors"].update(total=r["vectors"]["model"]),
    "model has 8128 bytes, expected at most 6224": lambda r: vector(r, "model", lambda v: np.ones(1000)),
}


@pytest.mark.parametrize("form", ["explicit", "client"])
@pytest.mark.parametrize("fault", SPOILT)
def test_a_bad_reply_is_dropped_named_and_counted(fault, form, tmp_path):
    def spoil(node, kind, round, reply):
        if node == 11 and kind == "train.steps" and round == 2:
            SPOILT[fault](reply.content)
        return reply

    settings = config(tmp_path, min_clients=2, steps__kind=form)
    if form == "client":
        settings["steps.max_steps"] = 1000
    run = flower(settings, federation(settings, spoil, steps=K))
    assert [record["clients"] for record in run.history] == [3, 2, 3]
    assert [record["asked"] for record in run.history] == [3, 3, 3]
    assert [record["dropped"] for record in run.history] == [[], [1], []]
    (event,) = run.history[1]["events"]
    assert "client 1: reply dropped" in event
    assert fault in event
    assert torch.isfinite(run.state["x"]).all()


@pytest.mark.parametrize("form", ["explicit", "client"])
def test_a_gradient_sum_counts_only_for_the_steps_that_need_it(form, tmp_path):
    """With eta = 0.001 the sums of K = 3 and 5 are asked for, that of K = 12 is not."""

    def spoil(node, kind, round, reply):
        if node == 12 and kind == "train.steps" and round == 2:
            reply.content["vectors"]["total"] = Array(np.ones(650))
        if node == 11 and kind == "train.steps" and round == 3:
            del reply.content["vectors"]["total"]
        return reply

    settings = config(tmp_path, min_clients=2, steps__kind=form, algorithm__lr=0.001)
    run = flower(settings, federation(settings, spoil, steps=K))
    assert [record["dropped"] for record in run.history] == [[], [2], [1]]
    asked = {"explicit": "'total' among its vectors was not asked for", "client": "total was not asked for with"}
    assert asked[form] in run.history[1]["events"][0]
    assert "total is missing" in run.history[2]["events"][0]


@pytest.mark.parametrize(
    "error", [ValueError("no"), RecursionError(), UnicodeDecodeError("a", b"", 0, 1, "b"), KeyError(3)]
)
def test_an_error_of_any_grid_about_one_reply_is_noted_and_the_others_count(error, tmp_path):
    def spoil(node, kind, round, reply):
        if node == 11 and kind == "train.steps" and round == 2:
            del grid.waiting[f"m{len(grid.sent) - 2}"]  # Flower hands over a reply once
            raise error
        return reply

    settings = config(tmp_path, min_clients=2)
    grid = federation(settings, spoil)
    run = flower(settings, grid)
    assert [record["dropped"] for record in run.history] == [[], [1], []]
    (event,) = run.history[1]["events"]
    assert event.startswith(f"client 1: reply dropped, it cannot be read ({type(error).__name__}: ")


class FarAway(SerialEngine):
    """In round 2 the reply of client 1 is far too long."""

    def run(self, plan, x, clients, round):
        result = super().run(plan, x, clients, round)
        if round == 1:
            result.models[1] = 1e3 * result.models[1]
        return result


@pytest.mark.parametrize("form", ["explicit", "client"])
def test_the_guard_is_that_of_a_simulation(form, tmp_path):
    """min_clients counts replies. Client 1 did reply, so the round continues without it."""

    def spoil(node, kind, round, reply):
        if node == 11 and kind == "train.steps" and round == 2:
            vector(reply.content, "model", lambda v: 1e3 * v)
        return reply

    settings = config(tmp_path, steps__kind=form, guard__factor=10.0)
    run = flower(settings, federation(settings, spoil, steps=K))
    options = {"steps": fg.Explicit([K]), "batch_size": 10, "engine": FarAway, "guard": fg.Guard(10.0)}
    expected = fg.simulate(model(None).double(), FED, fg.FedaGrac(lr=0.1), 3, **options)
    assert expected.history.column("dropped") == [[], [1], []]
    assert close(run.state["x"], expected.vector)
    for field in ("clients", "dropped"):  # client 1 replied but does not count
        assert run.history.column(field) == expected.history.column(field)
    assert run.history.column("clients") == [3, 3, 3]
    (event,) = run.history[1]["events"]
    assert re.fullmatch(r"client 1: dropped, its update is [\d.]+(e\+\d+)? x the median", event)


@pytest.mark.parametrize(
    ("name", "kind", "rule"),
    [
        ("fedagrac", "median", fg.Median()),
        ("scaffold", "trimmed-mean", fg.TrimmedMean(share=0.2)),
        ("fedlin", "norm-bounded", fg.NormBounded(factor=1.0)),
        ("fednova", "median", fg.Median()),
    ],
)
def test_a_robust_rule_is_that_of_a_simulation_and_part_of_the_run(name, kind, rule, tmp_path):
    """Client 1 is spoilt in round 2, which a robust rule bounds and the sum does not."""

    def spoil(node, kind, round, reply):
        if node == 11 and kind == "train.steps" and round == 2:
            vector(reply.content, "model", lambda v: 1e3 * v)
        return reply

    settings = config(tmp_path, algorithm__name=name, aggregate__kind=kind)
    if kind == "trimmed-mean":
        settings["aggregate.share"] = 0.2
    run = flower(settings, federation(settings, spoil))
    options = {"steps": fg.Explicit([K]), "batch_size": 10, "engine": FarAway, "aggregate": rule}
    expected = fg.simulate(model(None).double(), FED, fg.algorithm(name, lr=0.1), 3, **options)
    assert close(run.state["x"], expected.vector)
    summed = fg.simulate(
        model(None).double(), FED, fg.algorithm(name, lr=0.1), 3, **{**options, "aggregate": None}
    )
    assert not close(expected.vector, summed.vector, 1e-3)
    other = {key: value for key, value in settings.items() if not key.startswith("aggregate.")} | {"rounds": 4}
    with pytest.raises(InputError, match=f"another folder: it holds a run with aggregate = {{'kind': '{kind}'"):
        flower(other, federation(other))


def test_a_robust_rule_on_flower_needs_three_replies(tmp_path):
    with pytest.raises(InputError, match=r"aggregate = Median\(\): expected a cohort of at least 3 clients"):
        Settings.of(config(tmp_path, aggregate__kind="median", min_clients=2))


@pytest.mark.parametrize("form", ["explicit", "client"])
def test_a_first_gradient_that_is_far_too_long_is_dropped_by_the_guard(form, tmp_path):
    """Client 2 alone is fast. Its model is good, so today's average would be, too; nu would be ruined."""

    def spoil(node, kind, round, reply):
        if node == 12 and round == 2 and "first" in reply.content["vectors"]:
            vector(reply.content, "first", lambda v: np.full_like(v, 1e30))
        return reply

    settings = config(tmp_path, steps__kind=form, guard__factor=10.0)
    run = flower(settings, federation(settings, spoil, steps=K))
    assert run.history.column("dropped") == [[], [2], []]
    assert re.fullmatch(
        r"client 2: dropped, its first gradient is [\d.e+]+ x the median", run.history[1]["events"][0]
    )
    assert float(run.state["nu"].abs().max()) < 10
    assert set(run.history[1]["weights"]) == {"0", "1"}
    unguarded = config(tmp_path / "unguarded", steps__kind=form)
    ruined = flower(unguarded, federation(unguarded, spoil, steps=K))
    assert float(ruined.state["x"].abs().max()) > 1e20


def test_gradients_that_are_asked_for_before_the_steps_are_guarded(tmp_path):
    def spoil(node, kind, round, reply):
        if node == 11 and round == 2 and kind == "query.gradient":
            vector(reply.content, "gradient", lambda v: 1e30 * v)
        return reply

    settings = config(tmp_path, algorithm__name="fedlin", min_clients=2, rounds=2, guard__factor=10.0)
    run = flower(settings, federation(settings, spoil))
    assert [record["clients"] for record in run.history] == [3, 2]
    assert re.fullmatch(
        r"client 1: reply dropped, its gradient is [\d.e+]+ x the median", run.history[1]["events"][0]
    )

    def at_the_start(node, kind, round, reply):
        if node == 11 and kind == "query.hello":
            vector(reply.content, "gradient", lambda v: 1e30 * v)
        return reply

    first = config(tmp_path / "first", guard__factor=10.0)
    with pytest.raises(FedagracError, match=r"clients \[1\] sent no usable gradient"):
        flower(first, federation(first, at_the_start))


def test_buffers_that_are_far_too_long_are_dropped_by_the_guard(tmp_path):
    def spoil(node, kind, round, reply):
        if node == 11 and kind == "train.steps" and round == 2:
            vector(reply.content, "buffers", lambda v: 1e30 * v)
        return reply

    settings = config(tmp_path, guard__factor=10.0)
    run = norm_run(settings, norm_nodes(settings, spoil))
    assert run.history.column("dropped") == [[], [1], []]
    assert "client 1: dropped, the norm of its buffers is" in run.history[1]["events"][0]


def test_a_wrong_guard_is_named(tmp_path):
    with pytest.raises(InputError, match=r"guard\.factor = 0\.5: expected a number above 1"):
        Settings.of(config(tmp_path, guard__factor=0.5))


def test_a_server_that_overflows_says_so_and_what_to_try(tmp_path):
    """The coefficients of FedNova sum to more than 1, so usable models of 5e152 give one whose norm overflows."""

    def spoil(node, kind, round, reply):
        if kind == "train.steps" and round == 2:
            vector(reply.content, "model", lambda v: np.full_like(v, 5e152))
        return reply

    settings = config(tmp_path, algorithm__name="fednova")
    run = flower(settings, federation(settings, spoil))
    assert len(run.history) == 2
    status = json.loads((tmp_path / "run" / "status.json").read_text())
    assert status["status"] == "diverged"
    assert status["reason"] == (
        "round 2: all replies are finite, but the model, its squared norm or its loss is not; the longest update "
        "is that of client 0, 2.35 x the median of the others; the round is not saved: repeat `flwr run` with a "
        "guard or without the client, undo earlier rounds with `fedagrac flower rollback`, or start again with a "
        "smaller lr than 0.1"
    )
    divergence = status["divergence"]
    assert (divergence["round"], divergence["client"], divergence["longest"]) == (2, None, 0)
    # equal models with K = 3, 5, 12: lengths are proportional to 1 / K
    assert divergence["factor"] == pytest.approx((1 / 3) / ((1 / 5 + 1 / 12) / 2))


def test_the_model_is_averaged_over_those_who_answered(tmp_path):
    def lose(node, kind, round, reply):
        return None if node == 10 and kind == "train.steps" else reply

    settings = config(tmp_path, rounds=1, min_clients=1, algorithm__name="fedavg")
    run = flower(settings, federation(settings, lose))
    n = FED.sizes
    models = []
    for i in (1, 2):  # the average of one client is its model; its batches depend on its number
        alone = StandIn({10: Node({**settings, "clients": 3}, i)})
        client_settings = Settings.of(settings)
        vector_model = initial_model(client_settings, model, None)
        single = FlowerFleet(client_settings, vector_model, Link(alone, vector_model, client_settings))
        single.link.sizes = dict(enumerate(n.tolist()))
        server = Server(client_settings.build_algorithm(), {"x": vector_model.initial()}, ClientTable(3))
        (replies,) = single.round([server])
        server.take_in(replies)
        models.append(server.x)
    expected = (n[1] * models[0] + n[2] * models[1]) / (n[1] + n[2])
    assert close(run.state["x"], expected)
    assert run.history[0]["events"] == ["client 0: no reply to train.steps within 0.3 s"]


def test_a_late_reply_is_dropped_and_named_in_the_round_it_comes_in(tmp_path):
    settings = config(tmp_path, min_clients=2)
    grid = federation(settings)

    def delay(node, kind, round, reply):
        if node == 12 and kind == "train.steps" and round == 1:
            return reply if len([sent for sent in grid.sent if sent[1] == kind]) > 3 else None
        return reply

    grid.spoil = delay
    run = flower(settings, grid)
    assert [record["clients"] for record in run.history] == [2, 3, 3]
    assert "client 2: no reply" in run.history[0]["events"][0]
    assert run.history[1]["events"] == ["client 2: late reply of round 1, dropped"]


def test_looking_for_nodes_loses_no_reply(tmp_path, monkeypatch):
    monkeypatch.setattr(link, "LOOK_SECONDS", 0.0)
    waited = {}

    def delay(node, kind, round, reply):
        waited[node, kind, round] = waited.get((node, kind, round), 0) + 1
        return reply if waited[node, kind, round] > 3 * (node == 11) else None

    settings = config(tmp_path, round_seconds=5.0)
    run = flower(settings, federation(settings, delay))
    assert [record["events"] for record in run.history] == [[], [], []]
    assert close(run.state["x"], simulated(fg.FedaGrac(lr=0.1)).vector)


@pytest.mark.parametrize("how", ["lost", "nan", "forgotten"])
def test_a_fast_client_that_misses_the_second_exchange_gives_its_mean_gradient(how, tmp_path):
    def spoil(node, kind, round, reply):
        if kind != "train.first":
            return reply
        if how == "lost":
            return None
        vector(reply.content, "first", lambda v: v * np.nan)
        return reply

    settings = config(tmp_path, steps__kind="client", rounds=2)
    grid = federation(settings, None if how == "forgotten" else spoil, steps=K)
    if how == "forgotten":  # a node that was replaced between the two exchanges
        keep = grid.nodes[12]
        grid.nodes[12] = lambda message: (keep.context.state.clear(), keep(message))[1]
    run = flower(settings, grid)
    # then nobody transmits a first gradient: FedaGrac with transmit="average"
    assert close(run.state["x"], simulated(fg.FedaGrac(lr=0.1, transmit="average"), rounds=2).vector)
    assert [record["clients"] for record in run.history] == [3, 3]
    assert [record["first_gradients"] for record in run.history] == [0, 0]
    assert "client 2: missed the second exchange, its mean gradient is used" in run.history[0]["events"]


def test_a_client_runs_until_its_time_is_over(tmp_path):
    settings = config(tmp_path, steps__kind="client", rounds=1, round_seconds=20.0)
    run = flower(settings, federation(settings, seconds=[1e-9, 0.05, 0.2]))
    steps = run.history[0]["steps"]
    assert steps["0"] == 1
    assert 1 <= steps["1"] < steps["2"]
    again = simulated(fg.FedaGrac(lr=0.1), rounds=1, steps=list(steps.values()))
    assert close(run.state["x"], again.vector, 1e-10)


class Seen(fg.Callback):
    """Keep what callbacks receive."""

    def __init__(self):
        self.calls, self.replies = [], []

    def on_start(self, run):
        self.calls.append("start")

    def on_round(self, run, record):
        self.calls.append(record["round"])
        assert run.cohort.clients.tolist() == [0, 1, 2]
        assert run.plan.steps.tolist() == K
        self.replies = list(run.replies)

    def on_end(self, run, result):
        self.calls.append(result.status)


def test_callbacks_stopping_rules_and_metrics_are_those_of_a_simulation(tmp_path):
    expected = simulated(fg.FedaGrac(lr=0.1), rounds=9)
    accuracy = expected.history[1]["test_accuracy"]
    stop = next(record["round"] for record in expected.history if record["test_accuracy"] >= accuracy)
    settings = config(tmp_path, rounds=9, stop__accuracy=accuracy)
    seen, board = Seen(), fg.TensorBoard(tmp_path / "board")
    size = {"outputs": lambda output, target: torch.tensor(float(len(output)))}
    run = flower(settings, federation(settings), FED.test, callbacks=[seen, board], metrics=size)
    assert run.result.status == "stopped"
    assert "reached the target" in run.result.reason
    assert seen.calls == ["start", *range(1, stop + 1), "stopped"]
    assert run.history.column("test_accuracy") == expected.history.column("test_accuracy")[:stop]
    assert run.history.column("outputs") == [float(len(FED.test[0]))] * stop
    assert [(reply.client, reply.steps) for reply in seen.replies] == list(enumerate(K))
    assert all(reply.length > 0 and reply.loss > 0 for reply in seen.replies)
    assert list((tmp_path / "board" / "fedagrac").iterdir())
    again = flower(settings, federation(settings), FED.test)  # the same command once more
    assert (again.result.status, len(again.history)) == ("stopped", stop)
    assert torch.equal(again.state["x"], run.state["x"])
    longer = flower({**settings, "stop.accuracy": 1.0, "rounds": stop + 1}, federation(settings), FED.test)
    assert (longer.result.status, len(longer.history)) == ("finished", stop + 1)


def test_a_callback_ends_a_federation(tmp_path):
    class Enough(fg.Callback):
        def on_round(self, run, record):
            run.stop("enough")

    settings = config(tmp_path)
    run = flower(settings, federation(settings), callbacks=[Enough()])
    assert (run.result.status, run.result.reason) == ("stopped", "round 1: enough")
    assert json.loads((tmp_path / "run" / "status.json").read_text())["status"] == "stopped"


def test_a_resumed_run_has_the_same_numbers(tmp_path):
    settings = config(tmp_path, rounds=4)
    whole = flower({**settings, "out": str(tmp_path / "whole")}, federation(settings))

    class CrashError(BaseException):
        """The end of the server's process."""

    def crash(node, kind, round, reply):
        if round == 3 and kind == "train.steps" and node == 12:
            raise CrashError
        return reply

    with pytest.raises(CrashError):
        flower(settings, federation(settings, crash))
    assert read_checkpoint(tmp_path / "run" / "checkpoint").round == 2
    assert not (tmp_path / "run" / "status.json").exists()
    resumed = flower(settings, federation(settings))
    assert torch.equal(resumed.state["x"], whole.state["x"])
    assert [record["round"] for record in resumed.history] == [1, 2, 3, 4]
    assert "resumed after round 2" in resumed.history[2]["events"]
    assert len((tmp_path / "run" / "history.jsonl").read_text().splitlines()) == 4


def norm(context):
    layers = torch.nn.Linear(64, 8), torch.nn.BatchNorm1d(8), torch.nn.Tanh(), torch.nn.Linear(8, 10)
    return torch.nn.Sequential(torch.nn.Flatten(), *layers)


MOVING = ["2.running_mean", "2.running_var", "2.num_batches_tracked"]


def norm_nodes(settings, spoil=None, **node_configs):
    nodes = {
        10 + i: Node(settings, i, norm, **{key: values[i] for key, values in node_configs.items()})
        for i in range(3)
    }
    return StandIn(nodes, spoil)


def norm_run(settings, grid, test=None):
    checked = Settings.of(settings)
    return run_federation(grid, checked, initial_model(checked, norm, None), test)


def norm_simulated(algorithm, buffers, rounds=3):
    with first_weights(0):
        net = norm(None).double()
    options = {"steps": fg.Explicit([K]), "batch_size": 10, "engine": "serial", "buffers": buffers}
    return fg.simulate(net, FED, algorithm, rounds, **options)


def same_model(run, expected):
    """Return whether the model and the buffers of a live run are those of a simulation."""
    ours, theirs = (result.model().state_dict() for result in (run.result, expected))
    assert ours.keys() == theirs.keys()
    return all(close(ours[key].double(), theirs[key].double()) for key in ours)


@pytest.mark.parametrize("tested", [False, True], ids=["no test data", "test data"])
@pytest.mark.parametrize("buffers", ["average", "local", "frozen"])
@pytest.mark.parametrize(
    ("name", "form"), [("fedavg", "explicit"), ("fedagrac", "client"), ("fedlin", "explicit")]
)
def test_buffers_of_a_federation_are_those_of_a_simulation(name, form, buffers, tested, tmp_path):
    """Without test data the server never runs the module, so clients must say which buffers move."""
    settings = config(tmp_path, algorithm__name=name, steps__kind=form, buffers=buffers)
    run = norm_run(settings, norm_nodes(settings, steps=K), FED.test if tested else None)
    expected = norm_simulated(fg.algorithm(name, lr=0.1), buffers)
    assert same_model(run, expected)
    assert [record["events"] for record in run.history] == [[], [], []]
    if tested:
        assert run.history.column("test_loss") == pytest.approx(expected.history.column("test_loss"), abs=1e-12)
    assert list(run.result.buffers) == ([] if buffers == "frozen" else MOVING)
    saved = load_file(tmp_path / "run" / "model.safetensors")
    assert all(close(saved[key].double(), value.double()) for key, value in expected.buffers.items())


def backbone(context):
    """A drawn layer that does not train, in eval(), with dropout and BatchNorm; and a head that does."""
    layers = torch.nn.Linear(64, 16), torch.nn.BatchNorm1d(16), torch.nn.Tanh(), torch.nn.Dropout(0.5)
    frozen = torch.nn.Sequential(torch.nn.Flatten(), *layers).requires_grad_(False).eval()
    return torch.nn.Sequential(frozen, torch.nn.Linear(16, 10))


def test_what_does_not_train_is_the_same_on_every_node(tmp_path):
    settings = config(tmp_path)
    nodes = {10 + i: Node(settings, i, backbone) for i in range(3)}
    checked = Settings.of(settings)
    run = run_federation(StandIn(nodes), checked, initial_model(checked, backbone, None), FED.test)
    with first_weights(0):
        net = backbone(None).double()
    options = {"steps": fg.Explicit([K]), "batch_size": 10, "engine": "serial"}
    assert same_model(run, fg.simulate(net, FED, fg.FedaGrac(lr=0.1), 3, **options))


@pytest.mark.parametrize("buffers", ["average", "local", "frozen"])
def test_buffers_of_a_federation_are_counted_in_bytes(buffers, tmp_path):
    settings = config(tmp_path, algorithm__name="fedavg", buffers=buffers)
    run, expected = norm_run(settings, norm_nodes(settings)), norm_simulated(fg.FedAvg(lr=0.1), buffers)
    d, q = 65 * 8 + 2 * 8 + 9 * 10, 0 if buffers == "frozen" else 8 + 8 + 1
    for column in ("bytes_up", "bytes_down"):
        assert run.history.column(column) == expected.history.column(column) == [3 * 8 * (d + q)] * 3


@pytest.mark.parametrize("buffers", ["average", "local"])
def test_a_resumed_run_goes_on_from_its_buffers(buffers, tmp_path):
    settings = config(tmp_path, rounds=4, buffers=buffers)
    whole = norm_run({**settings, "out": str(tmp_path / "whole")}, norm_nodes(settings))

    class CrashError(BaseException):
        """The end of the server's process."""

    def crash(node, kind, round, reply):
        if round == 3 and kind == "train.steps" and node == 12:
            raise CrashError
        return reply

    with pytest.raises(CrashError):
        norm_run(settings, norm_nodes(settings, crash))
    stored = read_checkpoint(tmp_path / "run" / "checkpoint")
    assert (stored.round, list(stored.facts.buffers)) == (2, MOVING)
    resumed = norm_run(settings, norm_nodes(settings))
    assert torch.equal(resumed.state["x"], whole.state["x"])
    assert torch.equal(resumed.server.buffers, whole.server.buffers)
    assert same_model(resumed, norm_simulated(fg.FedaGrac(lr=0.1), buffers, rounds=4))
    with pytest.raises(InputError, match=f"another folder: it holds a run with buffers = '{buffers}'"):
        norm_run({**settings, "buffers": "frozen", "rounds": 5}, norm_nodes(settings))


def still(context):
    """The same parameters as `norm`, but no buffers that move."""
    net = norm(context)
    net[2] = torch.nn.BatchNorm1d(8, track_running_stats=False)
    return net


def test_a_node_whose_buffers_move_differently_is_refused(tmp_path):
    settings = config(tmp_path, min_clients=2)
    grid = norm_nodes(settings)
    grid.nodes[11] = Node(settings, 1, still)
    with pytest.raises(FedagracError, match=r"moving buffers of client 1 = \[\]: expected \['2\.running_mean', "):
        norm_run(settings, grid)

    def replace(node, kind, round, reply):  # in round 2 another app runs on the node of client 1
        if round == 2 and 11 in grid.nodes:
            del grid.nodes[11]
            grid.nodes[99] = Node(settings, 1, still)
            return None if node == 11 else reply
        return reply

    grid = norm_nodes(settings, replace)
    run = norm_run({**settings, "out": str(tmp_path / "other")}, grid)
    assert [record["clients"] for record in run.history] == [3, 2, 2]
    events = [event for record in run.history for event in record["events"]]
    assert any("node 99: refused, moving buffers of client 1 = []" in event for event in events)


def test_a_node_that_names_unknown_buffers_is_refused(tmp_path):
    def rename(node, kind, round, reply):
        if node == 11 and kind == "query.hello":
            reply.content["facts"]["buffers"] = "2.secret"
        return reply

    settings = config(tmp_path)
    with pytest.raises(FedagracError, match=r"its moving buffers are '2\.secret', expected buffers of"):
        norm_run(settings, norm_nodes(settings, rename))


SPOILT_BUFFERS = {
    "buffers is missing": lambda r: r["vectors"].pop("buffers"),
    "buffers has shape (16,)": lambda r: vector(r, "buffers", lambda v: v[1:]),
    "buffers holds NaN": lambda r: vector(r, "buffers", lambda v: v * np.nan),
    "buffers is torch.float32": lambda r: vector(r, "buffers", lambda v: v.astype("float32")),
}


@pytest.mark.parametrize("form", ["explicit", "client"])
@pytest.mark.parametrize("fault", SPOILT_BUFFERS)
def test_a_reply_with_bad_buffers_is_dropped_and_named(fault, form, tmp_path):
    def spoil(node, kind, round, reply):
        if node == 11 and kind == "train.steps" and round == 2:
            SPOILT_BUFFERS[fault](reply.content)
        return reply

    settings = config(tmp_path, min_clients=2, buffers="local", steps__kind=form)
    run = norm_run(settings, norm_nodes(settings, spoil, steps=K))
    assert [record["dropped"] for record in run.history] == [[], [1], []]
    (event,) = run.history[1]["events"]
    assert f"client 1: reply dropped, {fault}" in event
    assert torch.isfinite(run.server.buffers).all()


def test_a_folder_with_another_run_is_refused(tmp_path):
    settings = config(tmp_path, rounds=1)
    flower(settings, federation(settings))
    changed = {**settings, "algorithm.lr": 0.2}
    with pytest.raises(InputError, match="another folder: it holds a run with algorithm"):
        flower(changed, federation(changed))


def claim(**samples):
    """Return how replies are spoilt so that nodes claim these numbers of samples: n10=5 for node 10."""

    def spoil(node, kind, round, reply):
        if kind == "query.hello" and f"n{node}" in samples:
            reply.content["facts"]["samples"] = samples[f"n{node}"]
        return reply

    return spoil


def test_weights_are_in_the_history_and_sum_to_one_over_those_who_count(tmp_path):
    def lose(node, kind, round, reply):
        return None if node == 10 and kind == "train.steps" and round == 2 else reply

    settings = config(tmp_path, min_clients=2, rounds=2)
    run = flower(settings, federation(settings, lose))
    n = FED.sizes.tolist()
    assert run.history[0]["weights"] == {str(i): n[i] / sum(n) for i in range(3)}
    assert run.history[1]["weights"] == {str(i): n[i] / (n[1] + n[2]) for i in (1, 2)}
    stored = [json.loads(line) for line in (tmp_path / "run" / "history.jsonl").read_text().splitlines()]
    assert [line["weights"] for line in stored] == run.history.column("weights")


def test_huge_sample_counts_are_summed_exactly(tmp_path):
    """In int64 the sum of two counts of 2^62 is negative, and both weights were -0.5."""
    settings = config(tmp_path, rounds=1, max_samples=2**62)
    run = flower(settings, federation(settings, claim(n10=2**62, n11=2**62)))
    total = 2**63 + int(FED.sizes[2])
    assert run.history[0]["weights"] == {"0": 2**62 / total, "1": 2**62 / total, "2": int(FED.sizes[2]) / total}
    assert read_checkpoint(tmp_path / "run" / "checkpoint").facts.sizes == (2**62, 2**62, int(FED.sizes[2]))
    assert flower({**settings, "rounds": 2}, federation(settings, claim(n10=2**62, n11=2**62))).rounds == 2


def test_a_client_cannot_claim_more_samples_than_the_bound(tmp_path):
    settings = config(tmp_path)
    with pytest.raises(FedagracError, match=r"node 10: refused, samples = 4611686018427387904, expected an"):
        flower(settings, federation(settings, claim(n10=2**62)))
    with pytest.raises(FedagracError, match=r"samples = 501, expected an integer from 1 to 500"):
        flower({**settings, "max_samples": 500}, federation(settings, claim(n10=501, n11=9, n12=9)))


def test_sample_counts_may_be_fixed_by_the_operator(tmp_path):
    fixed = {str(i): int(n) for i, n in enumerate(FED.sizes)}
    settings = config(tmp_path, rounds=1, samples=json.dumps(fixed))
    run = flower(settings, federation(settings))
    assert close(run.state["x"], simulated(fg.FedaGrac(lr=0.1), rounds=1).vector)
    other = {**settings, "out": str(tmp_path / "other")}
    with pytest.raises(FedagracError, match=rf"client 1 = 7: expected {fixed['1']}, as the setting samples"):
        flower(other, federation(other, claim(n11=7)))
    changed = {**settings, "rounds": 2, "samples": json.dumps({**fixed, "2": 5})}
    with pytest.raises(InputError, match=rf"samples.2 = 5: expected {fixed['2']}, with which the run in"):
        flower(changed, federation(changed))
    with pytest.raises(InputError, match=r"samples = .*: expected one number for each partition, 0 to 2"):
        Settings.of(config(tmp_path, samples='{"0": 4}'))
    with pytest.raises(InputError, match=r"samples\.1 = 0: expected an integer of at least 1"):
        Settings.of(config(tmp_path, samples='{"0": 4, "1": 0, "2": 4}'))


def test_a_node_that_leaves_and_returns_takes_part_again(tmp_path):
    settings = config(tmp_path, min_clients=2, rounds=4)
    grid = federation(settings)

    def spoil(node, kind, round, reply):
        if round == 2 and 11 in grid.nodes:
            gone = grid.nodes.pop(11)
            if node == 11:
                return None
            grid.returning = gone
        if round == 3 and 99 not in grid.nodes:
            grid.nodes[99] = Node(settings, 1)
        return reply

    grid.spoil = spoil
    run = flower(settings, grid)
    assert [record["clients"] for record in run.history][:3] == [3, 2, 2]
    assert run.history[3]["clients"] == 3
    assert any("its node left" in event for record in run.history for event in record["events"])
    assert any("client 1: connected again" in event for record in run.history for event in record["events"])


def test_fedlin_continues_without_a_client_whose_gradient_is_missing(tmp_path):
    def lose(node, kind, round, reply):
        return None if node == 10 and kind == "query.gradient" and round == 1 else reply

    settings = config(tmp_path, algorithm__name="fedlin", min_clients=2, rounds=2)
    run = flower(settings, federation(settings, lose))
    assert [record["clients"] for record in run.history] == [2, 3]


def test_too_few_replies_end_the_run_and_say_how_to_resume(tmp_path):
    settings = config(tmp_path, round_seconds=0.05, attempts=2)
    grid = federation(settings, lambda node, kind, round, reply: reply if kind == "query.hello" else None)
    with pytest.raises(
        FedagracError, match="fewer than min_clients = 3 usable replies in attempts = 2; run again"
    ):
        flower(settings, grid)


def test_no_nodes_within_the_time_limit(tmp_path):
    settings = config(tmp_path)
    with pytest.raises(
        FedagracError, match=r"0 of clients = 3 .* wait_seconds = 0.3, .* missing partition-id 0, 1, 2"
    ):
        flower(settings, StandIn({}))
    with pytest.raises(FedagracError, match=r"missing partition-id 2 \(node 7: .*partition-id = 5"):
        flower(settings, StandIn({5: Node(settings, 0), 6: Node(settings, 1), 7: Node(settings, 5)}))


def test_a_client_with_another_model_is_named_if_the_start_waits_in_vain(tmp_path):
    settings = config(tmp_path)
    grid = federation(settings)
    grid.nodes[11] = Node(settings, 1, model=lambda _: torch.nn.Linear(64, 12))
    with pytest.raises(FedagracError, match=r"model of client 1 = '780 parameters, torch.float64': .*650"):
        flower(settings, grid)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"algorithm__name": "fedagrak"}, "algorithm.name = 'fedagrak': .*did you mean 'fedagrac'"),
        ({"algorithm__lr": -1}, "algorithm.lr = -1"),
        ({"round": 3}, "round = 3: expected a known setting .*did you mean 'rounds'"),
        ({"min_clients": 4}, "min_clients = 4: expected at most clients = 3"),
        ({"steps__kind": "sometimes"}, "steps.kind = 'sometimes': expected one of client, constant"),
        ({"steps__kind": "client", "steps__second": 3}, "steps.second = 3: .*did you mean 'seconds'"),
        ({"steps__table": "[[1, 2]]"}, "Explicit"),
        ({"steps__table": "[[1, 2"}, "steps.table = .*JSON"),
        ({"batch_size": 0}, "batch_size = 0"),
        ({"engine": "fast"}, "engine = 'fast'"),
        ({"round_seconds": 0}, "round_seconds = 0"),
    ],
)
def test_bad_settings_are_named(changes, message, tmp_path):
    with pytest.raises(InputError, match=message):
        Settings.of(config(tmp_path, **changes))


def test_a_node_needs_a_partition_of_its_own():
    for value in (None, -1, 3, "0", True):
        with pytest.raises(InputError, match="partition-id"):
            partition_of({"partition-id": value}, clients=3)


def test_importing_the_package_does_not_import_flower():
    code = "import sys, fedagrac, fedagrac.flower; sys.exit(any(m.split('.')[0] == 'flwr' for m in sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_the_missing_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "flwr", None)
    with pytest.raises(FedagracError, match=r"pip install 'fedagrac\[flower\]'"):
        client_app(model, data)


def test_a_new_app_is_complete_and_its_settings_are_good(tmp_path):
    from flwr.cli.config_utils import load_and_validate
    from flwr.common.config import flatten_dict

    app = write_app(tmp_path / "My App")
    project, warnings = load_and_validate(app / "pyproject.toml")
    assert not warnings
    settings = Settings.of(flatten_dict(project["tool"]["flwr"]["app"]["config"]))
    assert (settings.clients, settings.min_clients, settings.build_algorithm().name) == (3, 2, "fedagrac")
    assert sorted(path.name for path in (app / "my_app").glob("*.py")) == [
        "__init__.py", "client_app.py", "server_app.py", "task.py",
    ]  # fmt: skip
    assert "@" not in (app / "README.md").read_text()
    hooks = runpy.run_path(str(app / "my_app" / "task.py"))
    run_config = flatten_dict(project["tool"]["flwr"]["app"]["config"])
    context = Context(1, 2, {"partition-id": 2}, RecordDict(), run_config)
    inputs, targets = hooks["data"](context)
    assert len(inputs) == len(targets) > 0
    assert hooks["model"](context)(inputs[:2].float()).shape == (2, 10)
    assert len(hooks["test"](context)[0]) == 360


def test_the_commands_write_an_app_and_keys(tmp_path, capsys):
    main_quietly(["flower", "new", str(tmp_path / "app")])
    main_quietly(["flower", "keys", str(tmp_path / "keys"), "--nodes", "1", "--host", "10.0.0.5"])
    made = {path.name for path in (tmp_path / "keys").iterdir()}
    assert made == {"ca.crt", "ca.key", "server.crt", "server.key", "node-0", "node-0.pub", "keys.toml"}
    assert (tmp_path / "keys" / "node-0").stat().st_mode & 0o077 == 0
    for command in (
        ["new", str(tmp_path / "app")],
        ["keys", str(tmp_path / "keys")],
        ["new", str(tmp_path / "3")],
    ):
        with pytest.raises(SystemExit) as ended:
            main(["flower", *command])
        assert ended.value.code == 2
        assert "DIR = " in capsys.readouterr().err


def main_quietly(arguments):
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code in (0, None)


def store_data(folder):
    for i in range(3):
        samples = FED.samples_of(i)
        np.savez(folder / f"{i}.npz", inputs=FED.inputs[samples].numpy(), targets=FED.targets[samples].numpy())


def run_everything(folder):
    """Do all runs of one federation of processes. A server is killed in the first run, a node in the last."""
    planned = {"steps": {"kind": "explicit", "table": json.dumps([K])}}
    fedagrac = {"algorithm": {"name": "fedagrac", "lr": 0.1}}
    with Loopback(folder, nodes=3) as loopback:
        store_data(folder)
        loopback.start_link()
        for i in range(3):
            loopback.start_node(i, f"steps={K[i]}")
        loopback.run("fedagrac", rounds=3, **fedagrac, **planned)
        loopback.kill_server("fedagrac", rounds=1)
        loopback.submit("fedagrac")
        stop = {"bytes": (6 + 2 * 10) * 650 * 4}  # x_1 and gradients of 3 clients, then two rounds of 10 vectors
        loopback.run("chosen", rounds=9, **fedagrac, steps={"kind": "client"}, stop=stop)
        loopback.wait("fedagrac", "chosen")
        loopback.run("troubled", rounds=3, min_clients=1, faults=True, **fedagrac, **planned)
        loopback.wait_for((folder / "hanging").exists)
        loopback.start_node(1, f"steps={K[1]}", second=True)  # claims the partition of a node that is busy
        answered = re.compile(r"Sending: query\.hello.*Sent successfully", re.DOTALL)
        loopback.wait_for(lambda: answered.search((folder / "second1.log").read_text()))
        loopback.stop("node1", signal.SIGKILL)
        loopback.wait("troubled")


def final(folder, name):
    return load_file(Path(folder) / name / "model.safetensors")


def rounds_of(folder, name):
    return [json.loads(line) for line in (folder / name / "history.jsonl").read_text().splitlines()]


def assert_equal_to_a_simulation(folder, name, rounds):
    """Steps are planned by the server, which is killed once, or chosen by the clients with two exchanges."""
    expected = simulated(fg.FedaGrac(lr=0.1), rounds, dtype=torch.float32)
    for key, value in final(folder, name).items():
        torch.testing.assert_close(value, expected.params[key], atol=1e-6, rtol=0)
    history = rounds_of(folder, name)
    assert [record["clients"] for record in history] == [3] * rounds
    for ours, theirs in zip(history, expected.history, strict=True):
        assert ours["train_loss"] == pytest.approx(theirs["train_loss"], abs=1e-6)
        assert (ours["bytes_up"], ours["bytes_down"]) == (theirs["bytes_up"], theirs["bytes_down"])


def assert_called_back_tracked_and_stopped(folder):
    """The run "chosen" has 9 rounds and stops after the second."""
    status = json.loads((folder / "chosen" / "status.json").read_text())
    assert (status["status"], status["rounds"]) == ("stopped", 2)
    assert "67600 bytes moved reached 67600" in status["reason"]
    lines = (folder / "chosen-rounds.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in lines] == [[t, [0, 1, 2], K] for t in (1, 2)]
    events = EventAccumulator(str(folder / "chosen-board" / "fedagrac"))
    events.Reload()
    losses = [record["train_loss"] for record in rounds_of(folder, "chosen")]
    assert [event.value for event in events.Scalars("train_loss")] == pytest.approx(losses)


def assert_resumed_after_its_last_round(folder):
    history = rounds_of(folder, "fedagrac")
    assert [record["round"] for record in history] == [1, 2, 3]
    events = [event for record in history for event in record["events"]]
    assert [event for event in events if "resumed" in event] in ([f"resumed after round {t}"] for t in (1, 2))


def assert_nonsense_dropped(folder):
    first, second, _ = rounds_of(folder, "troubled")
    assert set(first["steps"]) == {"2"}
    assert first["dropped"] == [0, 1]
    assert any("client 0: reply dropped, model holds NaN" in event for event in first["events"])
    assert any("client 1: reply dropped, model has shape (649,)" in event for event in first["events"])
    assert any("client 2: reply dropped, steps = 1000000000" in event for event in second["events"])
    assert all(torch.isfinite(value).all() for value in final(folder, "troubled").values())


def assert_partition_given_when_its_node_was_killed_and_not_before(folder):
    _, second, third = rounds_of(folder, "troubled")
    assert set(second["steps"]) == {"0"}
    said = [event for event in second["events"] + third["events"] if "Error" not in event and "drop" not in event]
    assert re.fullmatch(r"node \d+: claims client 1; node \d+, which has it, is greeted again", said[0])
    assert said[1:] == ["client 1: its node left", "client 1: connected again"]
    assert set(third["steps"]) == {"0", "1", "2"}


def test_a_federation_of_processes(tmp_path):
    """One test, because the processes take minutes."""
    run_everything(tmp_path)
    assert_equal_to_a_simulation(tmp_path, "fedagrac", rounds=3)
    assert_equal_to_a_simulation(tmp_path, "chosen", rounds=2)
    assert_called_back_tracked_and_stopped(tmp_path)
    assert_resumed_after_its_last_round(tmp_path)
    assert_nonsense_dropped(tmp_path)
    assert_partition_given_when_its_node_was_killed_and_not_before(tmp_path)
