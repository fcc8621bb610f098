"""A federation whose server keeps the state of each client's local optimizer and sends it with the model."""

import numpy as np
import pytest
import torch

import fedagrac as fg

pytest.importorskip("flwr", reason="the extra fedagrac[flower] is not installed")

from flower_grid import K, Node, close, config, federation, flower, simulated, vector

D_BYTES = 650 * 8
FORMS = {
    "weight": {},
    "work": {"merge": "work"},
    "calibrated": {"merge": "calibrated", "calibration": 0.5},
    "anew": {"keep": False},
}


def settings_of(tmp_path, options=None, **changes):
    algorithm = {f"algorithm__{key}": value for key, value in (options or {}).items()}
    return config(tmp_path, algorithm__name="diloco", algorithm__lr=0.01, **algorithm, **changes)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("engine", ["serial", "lanes"])
def test_planned_rounds_equal_a_simulation(form, engine, tmp_path):
    settings = settings_of(tmp_path, FORMS[form], engine=engine)
    run = flower(settings, federation(settings))
    assert close(run.state["x"], simulated(fg.DiLoCo(lr=0.01, **FORMS[form])).vector)


@pytest.mark.parametrize("form", FORMS)
def test_steps_chosen_by_clients_give_the_same_rounds(form, tmp_path):
    settings = settings_of(tmp_path, FORMS[form], steps__kind="client")
    run = flower(settings, federation(settings, steps=K))
    assert close(run.state["x"], simulated(fg.DiLoCo(lr=0.01, **FORMS[form])).vector)
    assert run.history[0]["steps"] == {"0": 3, "1": 5, "2": 12}


@pytest.mark.parametrize(
    ("options", "vectors"),
    [({}, (3, 3)), ({"keep": False}, (1, 1)), ({"merge": "calibrated", "init": "zeros"}, (4, 4))],
    ids=["kept", "anew", "calibrated"],
)
def test_states_are_sent_and_counted(options, vectors, tmp_path):
    """The model and AdamW's two vectors; if calibrated, the correction down and the sum of gradients up, too."""
    settings = settings_of(tmp_path, options)
    run = flower(settings, federation(settings))
    for record in run.history:
        assert (record["bytes_down"], record["bytes_up"]) == tuple(3 * n * D_BYTES for n in vectors)


def test_a_node_that_is_replaced_goes_on_with_its_state(tmp_path):
    settings = settings_of(tmp_path)
    grid = federation(settings)

    def spoil(node, kind, round, reply):
        if kind == "train.steps":
            grid.nodes[node] = Node(settings, node - 10)
        return reply

    grid.spoil = spoil
    assert close(flower(settings, grid).state["x"], simulated(fg.DiLoCo(lr=0.01)).vector)


@pytest.mark.parametrize(
    ("change", "event"),
    [
        (lambda v: np.where(np.arange(len(v)) == 3, np.nan, v), "slot1 holds NaN"),
        (lambda v: v[1:], "slot1 has shape (649,)"),
        (lambda v: v.astype(np.float32), "slot1 is torch.float32"),
        (None, "slot1 is missing"),
    ],
    ids=["nan", "short", "float32", "missing"],
)
def test_a_reply_with_a_bad_state_is_dropped_and_the_client_keeps_its_last(change, event, tmp_path):
    """Client 1 has no usable reply in round 2, so it begins round 3 with its state after round 1."""

    def spoil(node, kind, round, reply):
        if (node, kind, round) == (11, "train.steps", 2):
            if change is None:
                del reply.content["vectors"]["slot1"]
            else:
                vector(reply.content, "slot1", change)
        return reply

    settings = settings_of(tmp_path, min_clients=2)
    run = flower(settings, federation(settings, spoil))
    assert any(event in one for one in run.history[1]["events"])
    assert run.server.table.rows(np.arange(3))["made"][:, 0].tolist() == [9, 10, 36]


def test_a_resumed_federation_goes_on_from_its_states(tmp_path):
    settings = settings_of(tmp_path, {"merge": "calibrated"}, rounds=4)
    whole = flower(settings, federation(settings))
    settings = settings_of(tmp_path / "two", {"merge": "calibrated"}, rounds=4)

    class Stop(fg.Callback):
        def on_round(self, run, record):
            if record["round"] == 2:
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        flower(settings, federation(settings), callbacks=[Stop()])
    resumed = flower(settings, federation(settings))
    assert [record["round"] for record in resumed.history] == [1, 2, 3, 4]
    assert torch.equal(resumed.state["x"], whole.state["x"])
