"""Cohorts and batches that are drawn while a GPU works on the round before are those drawn in time."""

import numpy as np
import pytest
import torch

import fedagrac as fg


class DrawAhead(fg.Callback):
    """Draws the next round on any device, as fleets do on a GPU."""

    def __init__(self):
        self.drawn = []

    def on_start(self, run):
        run.fleet.draw_ahead(0)

    def on_round(self, run, record):
        left = len(run.fleet.workload.drawn)
        run.fleet.draw_ahead(record["round"])
        self.drawn.append((left, len(run.fleet.workload.drawn)))


@pytest.mark.parametrize("engine", ["serial", "lanes"])
@pytest.mark.parametrize("sampling", ["replacement", "shuffle", "cyclic"])
def test_a_run_whose_batches_are_drawn_ahead_gives_the_same_model(engine, sampling):
    def run(callbacks):
        return fg.simulate(
            fg.models.build("logistic", features=64, classes=10),
            fg.Federation.load("digits", clients=6, partition=fg.Dirichlet(0.5)),
            fg.FedaGrac(lr=0.05), 4, steps=fg.Uniform(1, 9, mode="random"), participation=3, sampling=sampling,
            engine=engine, compile=False, callbacks=callbacks,
        )  # fmt: skip

    ahead = DrawAhead()
    assert torch.equal(run([ahead]).vector, run([]).vector)
    assert ahead.drawn == [
        (0, 3),
        (0, 3),
        (0, 3),
        (0, 0),
    ]  # each round used all that was drawn; none after the last


def test_a_round_of_very_many_batches_is_not_drawn_ahead():
    fed = fg.Federation.from_arrays([(np.zeros((4, 2), np.float32), np.zeros(4, np.int64))])
    seen = []

    class Watch(fg.Callback):
        def on_start(self, run):
            for steps in (250_000, 250_001):  # eight samples a step
                run.fleet.workload.draw_ahead(np.array([0]), np.array([steps]), 0)
                seen.append(len(run.fleet.workload.drawn))

    fg.simulate(torch.nn.Linear(2, 2), fed, fg.FedAvg(lr=0.1), 1, steps=1, batch_size=8, callbacks=[Watch()])
    assert seen == [1, 0]
