"""The random streams of algorithms: keyed by seed, round and client, and by nothing else."""

from dataclasses import replace

import numpy as np
import pytest

import fedagrac as fg
from fedagrac.core.streams import Purpose, stream
from keyed_noise import Noisy, noisy_rounds
from quadratics import K, Trace, quadratics

ROUNDS, SEED = 4, 11


class Kept(Trace):
    """Keeps models, cohorts and the last checkpoint."""

    def __init__(self):
        super().__init__()
        self.cohorts = []

    def on_round(self, run, record):
        super().on_round(run, record)
        self.cohorts.append(run.cohort.clients.tolist())
        self.checkpoint = replace(run.checkpoint(), history=[dict(record) for record in run.history])


def run(rounds=ROUNDS, **options):
    kept = Kept()
    quadratics().simulate(Noisy(lr=0.02), rounds=rounds, seed=SEED, callbacks=[kept], **options)
    return kept


@pytest.mark.parametrize("engine", ["serial", "lanes"])
@pytest.mark.parametrize("participation", [None, 2])
def test_the_draws_are_those_of_numpy(engine, participation):
    kept = run(engine=engine, participation=participation)
    expected = list(noisy_rounds(quadratics(), kept.cohorts, K, 0.02, 0.01, SEED))
    assert np.abs(np.array(kept.x) - expected).max() < 1e-10


def test_a_resumed_run_draws_the_same():
    whole = run(engine="serial", participation=3)
    half = run(rounds=2, engine="serial", participation=3)
    resumed = run(engine="serial", participation=3, resume=half.checkpoint)
    assert np.array_equal(resumed.x, whole.x[2:])


def test_a_part_of_a_cohort_draws_as_the_whole():
    """Every process has a part, and draws the numbers of the whole round for itself."""
    seen = []

    class Look(Noisy):
        def cost(self, cohort):
            seen.append(cohort)
            return super().cost(cohort)

    quadratics().simulate(Look(lr=0.02), rounds=2, seed=SEED)
    cohort = seen[-1]
    part, rest = cohort.part(np.arange(6) > 2, cohort.total), cohort.alone(np.array([1, 4]))
    for one in (part, rest):
        assert one.generator().random() == stream(SEED, Purpose.ROUND, round=1).random()
        for client in one.clients:
            assert one.generator(client).random() == stream(SEED, Purpose.MEMBER, 1, int(client)).random()


def test_streams_differ_by_every_key():
    draws = {
        stream(seed, purpose, round, client, number).integers(2**63)
        for seed in (0, 1)
        for purpose in Purpose
        for round in (0, 1)
        for client in (0, 1)
        for number in (0, 1)
    }
    assert len(draws) == 2**4 * len(Purpose)
    assert (
        stream(3, Purpose.BATCHES, 4, 5).integers(2**63) == 3393954249453706574
    )  # recorded before `number` existed


@pytest.mark.parametrize("number", [-1, 1.5, True])
def test_a_number_that_names_no_stream_is_refused(number):
    class Wrong(Noisy):
        def aggregate(self, state, rows, cohort, plan, result):
            return {"x": cohort.generator(number=number)}, {}

    with pytest.raises(fg.InputError, match="number = "):
        quadratics().simulate(Wrong(lr=0.02), rounds=1)
