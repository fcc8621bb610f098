"""Buffers that a forward pass changes: averaged, kept by each client, or frozen; none leaks to another client."""

import copy
import json
import os
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

import fedagrac as fg
import moving_buffers
from fedagrac.engines import SerialEngine
from fedagrac.errors import InputError
from fedagrac.storage.checkpoints import CheckpointError, read_checkpoint
from interrupted_runs import InterruptAfter, Rounds, same
from moving_buffers import (
    CLASSES,
    ENGINES,
    FEATURES,
    LR,
    SIZES,
    STEPS,
    by_hand,
    clients,
    far,
    federation,
    module,
    outcomes,
    simulated,
    train,
)
from processes import finish

MODES = ("average", "local", "frozen")


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("batch_size", [6, None], ids=["batches", "full"])
def test_one_client_is_ordinary_training_of_batch_norm(batch_size, engine):
    """Three rounds are three stretches of one training."""
    (pair,) = clients([20])
    result = simulated("norm", [pair], steps=[5], engine=engine, batch_size=batch_size)
    plain = module("norm")
    for round in range(3):
        train(plain, *pair, steps=5, batch_size=batch_size, round=round)
    assert far(result.model().state_dict(), plain.state_dict()) < 1e-12
    assert int(result.buffers["1.num_batches_tracked"]) == 15
    ours, theirs = result.model().eval()(pair[0]), plain.eval()(pair[0])
    torch.testing.assert_close(ours, theirs, atol=1e-12, rtol=0)
    assert result.history[-1]["test_loss"] == pytest.approx(
        functional.cross_entropy(theirs, pair[1]).item(), abs=1e-12
    )


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("buffers", MODES)
@pytest.mark.parametrize("kind", ["norm", "running"])
def test_several_clients_equal_a_loop_by_hand(kind, buffers, engine):
    result = simulated(kind, engine=engine, buffers=buffers)
    state, losses = by_hand(kind, buffers)
    assert far(result.model().state_dict(), state) < 1e-12
    np.testing.assert_allclose(result.history.column("test_loss"), losses, atol=1e-12)


def test_the_three_ways_differ():
    """Otherwise the laws above would hold for any of them."""
    results = [simulated("running", buffers=buffers).vector for buffers in MODES]
    for i, j in ((0, 1), (0, 2), (1, 2)):
        assert (results[i] - results[j]).abs().max() > 1e-4


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("buffers", MODES)
@pytest.mark.parametrize("kind", ["norm", "running"])
def test_the_order_of_clients_changes_nothing(kind, buffers, engine):
    for algorithm in (fg.FedAvg(lr=LR), fg.FedaGrac(lr=LR), fg.FedLin(lr=LR)):
        options = {"algorithm": algorithm, "engine": engine, "buffers": buffers}
        forth = simulated(kind, clients(), steps=STEPS, **options)
        back = simulated(kind, clients()[::-1], steps=STEPS[::-1], **options)
        assert far(forth.model().state_dict(), back.model().state_dict()) < 1e-12


@pytest.mark.parametrize("kind", ["norm", "running"])
@pytest.mark.parametrize("buffers", MODES)
def test_lanes_have_the_numbers_of_serial_for_algorithms_that_ask_for_gradients(buffers, kind):
    for algorithm in (fg.FedaGrac(lr=LR), fg.FedLin(lr=LR), fg.Scaffold(lr=LR)):
        one, other = (
            simulated(kind, algorithm=algorithm, engine=engine, buffers=buffers, batch_size=4, participation=3)
            for engine in ENGINES
        )
        assert far(one.model().state_dict(), other.model().state_dict()) < 1e-12


def test_full_gradients_begin_with_the_buffers_of_the_round():
    """FedLin with one client and one step is plain SGD from the client's own buffers, in every round."""
    (pair,) = clients([12])
    result = simulated("running", [pair], fg.FedLin(lr=LR), steps=[1])
    plain = module("running")
    for _ in range(3):
        train(plain, *pair, steps=1)
    assert far(result.model().state_dict(), plain.state_dict()) < 1e-12


@pytest.mark.parametrize("engine", ENGINES)
def test_frozen_buffers_stay_as_given(engine):
    given = module("norm")
    given[1].running_mean += 0.25
    expected = {name: buffer.clone() for name, buffer in given.named_buffers()}
    options = {"steps": fg.Explicit([list(STEPS)]), "batch_size": None, "buffers": "frozen", **ENGINES[engine]}
    result = fg.simulate(given, federation(), fg.FedAvg(lr=LR), 2, device="cpu", **options)
    assert result.buffers == {}
    assert far(dict(result.model().named_buffers()), expected) == 0
    assert far(dict(given.named_buffers()), expected) == 0


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("buffers", MODES)
def test_the_given_module_is_not_changed(buffers, engine):
    given = module("running")
    before = copy.deepcopy(given.state_dict())
    fg.simulate(given, federation(), fg.FedAvg(lr=LR), 2, buffers=buffers, device="cpu", **ENGINES[engine])
    assert far(given.state_dict(), before) == 0
    assert given.training


def test_another_word_is_refused():
    with pytest.raises(InputError, match="buffers = 'mean': expected one of average, local, frozen"):
        simulated("norm", buffers="mean")


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("buffers", ["average", "local"])
@pytest.mark.parametrize("kind", ["norm", "running"])
def test_a_resumed_run_is_bit_identical(kind, buffers, engine, tmp_path):
    options = {"engine": engine, "buffers": buffers, "participation": 2, "rounds": 6, "batch_size": 4}
    whole = simulated(kind, algorithm=fg.FedaGrac(lr=LR), **options)
    rounds = Rounds()
    stopping = [rounds, fg.Checkpoints(tmp_path, every=1000), InterruptAfter(3)]
    with pytest.raises(KeyboardInterrupt):
        simulated(kind, algorithm=fg.FedaGrac(lr=LR), callbacks=stopping, **options)
    stored = replace(read_checkpoint(tmp_path), history=rounds.history)
    resumed = simulated(kind, algorithm=fg.FedaGrac(lr=LR), resume=stored, **options)
    assert same(resumed, whole)
    assert torch.equal(resumed.buffer_vector, whole.buffer_vector)


def checkpoint_of(folder, net, **options):
    """Return the checkpoint of the first of two rounds."""
    rounds = Rounds()
    with pytest.raises(KeyboardInterrupt):
        fg.simulate(
            net, federation(), fg.FedAvg(lr=LR), 2, device="cpu",
            callbacks=[rounds, fg.Checkpoints(folder, every=1000), InterruptAfter(1)], **options,
        )  # fmt: skip
    return replace(read_checkpoint(folder), history=rounds.history)


def test_a_checkpoint_with_other_buffers_is_refused(tmp_path):
    """Both modules have the same number of parameters."""

    def plain():
        return nn.Linear(FEATURES, CLASSES).double()

    without = checkpoint_of(tmp_path / "without", plain())
    average = checkpoint_of(tmp_path / "average", module("running"))
    for net, checkpoint, options, named in (
        (module("running"), without, {}, "the checkpoint holds 'x', expected buffers, x"),
        (plain(), average, {}, "the checkpoint holds 'buffers, x', expected x"),
        (module("running"), average, {"buffers": "frozen"}, "the checkpoint holds 'buffers, x', expected x"),
        (
            module("running"),
            average,
            {"buffers": "local"},
            "the checkpoint holds the clients' 'nothing', expected buffers",
        ),
    ):
        with pytest.raises(CheckpointError, match=named):
            fg.simulate(net, federation(), fg.FedAvg(lr=LR), 2, device="cpu", resume=checkpoint, **options)


def test_two_processes_have_the_numbers_of_one(tmp_path):
    """Two of four clients a round, so that a process may have nobody."""
    out = tmp_path / "found.json"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    output = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    launcher = subprocess.Popen([*command, moving_buffers.__file__, str(out)], env=environment, **output)
    printed, _ = finish(launcher)
    assert launcher.returncode == 0, printed
    found = json.loads(out.read_text())
    assert found["size"] == 2
    for buffers, (state, losses, sent) in outcomes().items():
        theirs = found["outcomes"][buffers]
        for key, values in state.items():
            np.testing.assert_allclose(theirs[0][key], values, atol=1e-12)
        np.testing.assert_allclose(theirs[1], losses, atol=1e-12)
        assert theirs[2] == sent


@pytest.mark.parametrize("buffers", MODES)
@pytest.mark.parametrize("kind", ["norm", "running"])
def test_runs_side_by_side_equal_runs_alone(kind, buffers):
    algorithms = [fg.FedAvg(lr=LR), fg.FedaGrac(lr=LR / 2), fg.FedLin(lr=LR)]
    options = {"batch_size": None, "buffers": buffers, "device": "cpu", **ENGINES["lanes"]}
    together = fg.simulate_many(
        module(kind), federation(), algorithms, 3, steps=fg.Explicit([list(STEPS)]), **options
    )
    for algorithm, result in zip(algorithms, together, strict=True):
        alone = simulated(kind, algorithm=algorithm, engine="lanes", buffers=buffers)
        assert far(result.model().state_dict(), alone.model().state_dict()) < 1e-12


class SpoiltBuffers(SerialEngine):
    """In round 2 client 1 ends with a buffer that is not a number."""

    def run(self, plan, x, clients, round):
        result = super().run(plan, x, clients, round)
        if round == 1:
            result.buffers[clients == 1, 0] = torch.nan
        return result


@pytest.mark.parametrize("buffers", ["average", "local"])
def test_the_guard_drops_a_client_whose_buffers_are_not_finite(buffers):
    result = simulated("norm", engine=SpoiltBuffers, guard=fg.Guard(factor=100.0), buffers=buffers, rounds=4)
    assert result.history.column("dropped") == [[], [1], [], []]
    assert result.status == "finished"
    assert all(torch.isfinite(value).all() for value in result.buffers.values())


@pytest.mark.parametrize(("kind", "q"), [("norm", 4 + 4 + 1), ("running", FEATURES)])
def test_buffers_are_counted_in_bytes(kind, q):
    """Each of two clients a round receives and sends q numbers of 8 bytes, except frozen ones."""
    d = sum(p.numel() for p in module(kind).parameters())
    for buffers, moved in (("average", q), ("local", q), ("frozen", 0)):
        options = {"buffers": buffers, "participation": 2, "rounds": 2}
        result = simulated(kind, **options)
        assert (
            result.history.column("bytes_down") == result.history.column("bytes_up") == [2 * 8 * (d + moved)] * 2
        )
        result = simulated(kind, algorithm=fg.FedaGrac(lr=LR, transmit="average", init="zeros"), **options)
        assert result.history.column("bytes_down") == [2 * 8 * (2 * d + moved)] * 2
        assert result.history.column("bytes_up") == [2 * 8 * (d + moved)] * 2


def test_local_buffers_of_absent_clients_stay():
    """A client that is drawn again goes on from its own; by hand, with the cohorts of the run."""
    seen = []

    class Members(fg.Callback):
        def on_round(self, run, record):
            seen.append(run.cohort.clients.tolist())

    result = simulated("running", buffers="local", participation=2, rounds=5, callbacks=[Members()])
    server, own = module("running"), {}
    first = server.mean.clone()
    for members in seen:
        ends, weights = [], np.array([SIZES[i] for i in members], float)
        for i in members:
            local = copy.deepcopy(server)
            local.mean = own.get(i, first).clone()
            train(local, *clients()[i], steps=STEPS[i])
            own[i] = local.mean
            ends.append(copy.deepcopy(local.state_dict()))
        server.load_state_dict(moving_buffers.mean_of(ends, weights / weights.sum()))
    assert len({i for members in seen for i in members}) < len([i for members in seen for i in members])
    assert far(result.model().state_dict(), server.state_dict()) < 1e-12


def test_a_run_whose_buffers_are_not_finite_has_diverged():
    class Counted(nn.Module):
        def __init__(self):
            super().__init__()
            self.out = nn.Linear(2, 2)
            self.register_buffer("seen", torch.ones(()))

        def forward(self, x):
            self.seen = self.seen * 1e20  # infinite in float32 after two steps; the model stays finite
            return self.out(x)

    fed = fg.Federation.from_arrays([(np.ones((4, 2), np.float32), np.zeros(4, np.int64))])
    result = fg.simulate(Counted(), fed, fg.FedAvg(lr=0.1), rounds=5, steps=fg.Constant(1), batch_size=2)
    assert result.status == "diverged"
    assert len(result.history) == 2
