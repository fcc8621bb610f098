"""Step counts, participation, calibration schedules."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import fedagrac as fg
from fedagrac.data.batches import batch_positions

SCHEDULES = [
    fg.Constant(7),
    fg.Gaussian(50, 10_000),
    fg.Gaussian(50, 10_000, mode="random"),
    fg.Uniform(1, 9),
    fg.Uniform(3, 3, mode="random"),
    fg.Linear(1, 150),
    fg.Extreme(1, 1000),
    fg.Geometric(0.2),
    fg.Geometric(1.0, mode="fixed"),
]


@given(st.sampled_from(SCHEDULES), st.integers(0, 1000), st.integers(1, 200), st.integers(0, 2**40))
def test_every_schedule_gives_everyone_at_least_one_step_and_repeats_itself(schedule, round, M, seed):
    K = schedule.counts(round, M, seed)
    assert K.shape == (M,)
    assert K.dtype == np.int64
    assert K.min() >= 1
    assert np.array_equal(K, schedule.counts(round, M, seed))


def test_fixed_draws_once_and_random_every_round():
    for kind in (fg.Gaussian(500, 10_000, mode="fixed"), fg.Uniform(1, 1000, mode="fixed")):
        assert np.array_equal(kind.counts(0, 20, 1), kind.counts(9, 20, 1))
        assert not np.array_equal(kind.counts(0, 20, 1), kind.counts(0, 20, 2))
    for kind in (fg.Gaussian(500, 10_000, mode="random"), fg.Uniform(1, 1000, mode="random")):
        assert not np.array_equal(kind.counts(0, 20, 1), kind.counts(9, 20, 1))


def test_gaussian_has_the_mean_and_variance_it_says():
    K = fg.Gaussian(mean=500, variance=10_000).counts(0, 100_000, 0)
    assert abs(K.mean() - 500) < 1.5
    assert abs(K.var() - 10_000) < 200
    assert fg.Gaussian(mean=5.4, variance=0).counts(0, 3, 0).tolist() == [5, 5, 5]


def test_geometric_gives_all_clients_of_a_round_one_number_with_the_law_it_says():
    rounds = [fg.Geometric(0.25).counts(t, 5, seed=3) for t in range(20_000)]
    assert all((K[0] == K).all() for K in rounds)
    K = np.array(rounds)[:, 0]
    for k in range(1, 8):  # P(K = k) = p (1 - p)^(k - 1), within five standard errors
        share = 0.25 * 0.75 ** (k - 1)
        assert abs((k == K).mean() - share) < 5 * np.sqrt(share * (1 - share) / len(K))
    fixed = fg.Geometric(0.01, mode="fixed")
    assert np.array_equal(fixed.counts(0, 5, 3), fixed.counts(8, 5, 3))
    assert set(fg.Geometric(1).counts(0, 5, 0)) == {1}
    with pytest.raises(fg.InputError, match="a value that gives no client more than"):
        fg.Geometric(1e-300).counts(0, 5, 0)


def test_epochs_are_passes_over_the_clients_own_data():
    sizes = np.array([1, 10, 11, 39])
    assert fg.Epochs(3).with_samples(sizes, 10).counts(5, 4, 0).tolist() == [3, 3, 6, 12]
    assert fg.Epochs(3).with_samples(sizes, None).counts(0, 4, 0).tolist() == [3, 3, 3, 3]
    clients = [(np.zeros((n, 2), np.float32), np.zeros(n, np.int64)) for n in sizes]
    fed = fg.Federation.from_arrays(clients)
    model = fg.models.build("logistic", features=2)
    for batch_size, mean in ((10, (3 + 3 + 6 + 12) / 4), (None, 3)):
        result = fg.simulate(model, fed, fg.FedAvg(lr=0.1), 1, steps=fg.Epochs(3), batch_size=batch_size)
        assert result.history[0]["steps_mean"] == mean
    with pytest.raises(fg.InputError, match="K_i follows from the clients' samples"):
        fg.Epochs(3).counts(0, 4, 0)
    with pytest.raises(fg.InputError, match="one for each of 3 clients"):
        fg.Epochs(3, epoch_steps=[1, 2]).check(3, 1)
    with pytest.raises(fg.InputError, match="no client more than 10000000 steps"):
        fg.Epochs(10_000_000, epoch_steps=[2]).counts(0, 1, 0)


@pytest.mark.parametrize(("sampling", "steps"), [("replacement", [2, 4, 4]), ("shuffle", [2, 2, 4])])
def test_epochs_make_the_passes_that_the_sampling_has(sampling, steps):
    """With 39 samples in batches of 20 a shuffled pass has one step: a second one would use samples again."""
    sizes = [7, 39, 40]
    fed = fg.Federation.from_arrays([(np.zeros((n, 2), np.float32), np.zeros(n, np.int64)) for n in sizes])
    options = {"batch_size": 20, "sampling": sampling, "steps": fg.Epochs(2)}
    result = fg.simulate(fg.models.build("logistic", features=2), fed, fg.FedAvg(lr=0.1), 1, **options)
    assert result.history[0]["steps_mean"] == np.mean(steps)
    if sampling == "shuffle":
        for n, K in zip(sizes, steps, strict=True):
            one_pass = batch_positions(n, K // 2, 20, sampling, seed=0, round=0, client=0).ravel()
            assert len(set(one_pass)) == len(one_pass) == max(n // 20 * 20, min(n, 20))


def test_explicit_repeats_one_row_or_follows_the_rounds():
    assert fg.Explicit([3, 4]).counts(9, 2, 0).tolist() == [3, 4]
    table = fg.Explicit([[1, 2], [3, 4]])
    assert [table.counts(t, 2, 0).tolist() for t in (0, 1)] == [[1, 2], [3, 4]]
    with pytest.raises(fg.InputError, match="one for each of 5 rounds"):
        table.check(clients=2, rounds=5)
    with pytest.raises(fg.InputError, match="one for each of 3 clients"):
        table.check(clients=3, rounds=2)


@pytest.mark.parametrize(
    "make",
    [
        lambda: fg.Constant(0),
        lambda: fg.Constant(2.5),
        lambda: fg.Geometric(0),
        lambda: fg.Geometric(1.5),
        lambda: fg.Geometric(0.5, mode="sometimes"),
        lambda: fg.Epochs(0),
        lambda: fg.Epochs(1.5),
        lambda: fg.Epochs(1, epoch_steps=[0]),
        lambda: fg.Epochs(1, epoch_steps="all"),
        lambda: fg.Constant(True),
        lambda: fg.Gaussian(0, 1),
        lambda: fg.Gaussian(10, -1),
        lambda: fg.Gaussian(10, 1, mode="sometimes"),
        lambda: fg.Uniform(0, 3),
        lambda: fg.Uniform(5, 3),
        lambda: fg.Linear(0, 1),
        lambda: fg.Linear(1, -1),
        lambda: fg.Extreme(0, 5),
        lambda: fg.Explicit([]),
        lambda: fg.Explicit([[1, 0]]),
        lambda: fg.Explicit("12"),
    ],
)
def test_bad_step_counts_are_refused(make):
    with pytest.raises(fg.InputError):
        make()


@given(st.integers(1, 60), st.data())
def test_uniform_participation_draws_distinct_clients(M, data):
    size = data.draw(st.integers(1, M))
    clients, times = fg.Participation(size).draw(3, np.full(M, 1 / M), seed=1)
    assert len(np.unique(clients)) == size
    assert np.array_equal(clients, np.sort(clients))
    assert times.tolist() == [1] * size


def test_every_client_comes_equally_often():
    draws = [fg.Participation(3).draw(t, np.full(10, 0.1), seed=0)[0] for t in range(4000)]
    shares = np.bincount(np.concatenate(draws)) / 4000
    assert np.abs(shares - 0.3).max() < 0.03


def test_by_weight_heavy_clients_come_more_often():
    weights = np.array([0.1, 0.2, 0.7])
    counts = np.zeros(3)
    for t in range(3000):
        clients, times = fg.Participation(2, by="weight").draw(t, weights, seed=0)
        counts[clients] += times
    assert np.abs(counts / 6000 - weights).max() < 0.03


def test_a_fraction_is_rounded_and_at_least_one():
    assert fg.Participation(0.5).number(7) == 4
    assert fg.Participation(0.01).number(7) == 1
    assert fg.Participation(1.0).number(7) == 7
    with pytest.raises(fg.InputError, match="at most the number of clients, 7"):
        fg.Participation(8).number(7)


@pytest.mark.parametrize("size", [0, -1, 0.0, 1.5, "all", True])
def test_bad_participation_is_refused(size):
    with pytest.raises(fg.InputError, match="participation"):
        fg.Participation(size)


@given(st.dictionaries(st.integers(1, 100), st.floats(0, 2), max_size=6), st.integers(0, 200))
def test_piecewise_takes_the_last_breakpoint_passed(later, t):
    table = {0: 0.25, **later}
    assert fg.schedule.Piecewise(table)(t) == table[max(k for k in table if k <= t)]


@pytest.mark.parametrize("values", [{}, {1: 0.5}, {0: -1.0}, {-1: 0.5, 0: 1.0}, [0.1], {0: "1"}])
def test_bad_piecewise_is_refused(values):
    with pytest.raises(fg.InputError):
        fg.schedule.Piecewise(values)
