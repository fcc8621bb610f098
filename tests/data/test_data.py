"""Federations, partitions, batches: who holds what, and who uses what when."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import fedagrac as fg
from fedagrac.data.batches import batch_positions, epoch_steps
from fedagrac.data.sources import digits

labels = st.lists(st.integers(0, 5), min_size=30, max_size=200).map(lambda values: np.array(values, np.int64))
clients = st.integers(1, 25)
seeds = st.integers(0, 2**32)


def split(partition, y, M, seed):
    """The partition's shares as a list of arrays."""
    shares = partition.split(y, M, seed)
    pieces = [shares[i] for i in range(M)]
    assert shares.sizes.tolist() == list(map(len, pieces))
    return pieces


def covers_once(shares, samples):
    return np.array_equal(np.sort(np.concatenate(shares)), np.arange(samples))


@given(labels, clients, seeds)
def test_iid_uses_every_sample_once_in_equal_shares(y, M, seed):
    shares = split(fg.IID(), y, M, seed)
    assert len(shares) == M
    assert covers_once(shares, len(y))
    sizes = list(map(len, shares))
    assert max(sizes) - min(sizes) <= 1


@settings(max_examples=40)
@given(labels, clients, seeds, st.sampled_from([1e-3, 0.05, 0.3, 1.0, 100.0]))
def test_dirichlet_uses_every_sample_once_and_leaves_nobody_empty(y, M, seed, alpha):
    shares = split(fg.Dirichlet(alpha), y, M, seed)
    assert len(shares) == M
    assert covers_once(shares, len(y))
    assert min(map(len, shares)) >= 1


@given(labels, st.integers(1, 12), seeds, st.integers(1, 6))
def test_shards_gives_equal_volumes_and_exactly_so_many_classes(y, M, seed, classes):
    kinds = len(np.unique(y))
    if classes > kinds:
        with pytest.raises(fg.InputError, match="classes"):
            split(fg.Shards(classes), y, M, seed)
        return
    if np.minimum(M, np.unique(y, return_counts=True)[1]).sum() < M * classes:  # too few even of one sample each
        with pytest.raises(fg.InputError, match="shards"):
            split(fg.Shards(classes), y, M, seed)
        return
    shares = split(fg.Shards(classes), y, M, seed)
    assert len(shares) == M
    assert len({len(share) for share in shares}) == 1
    assert all(len(np.unique(y[share])) == classes for share in shares)
    everything = np.concatenate(shares)
    assert len(np.unique(everything)) == len(everything)  # nobody shares a sample


def test_shards_of_balanced_classes_leave_nothing_over():
    y = np.repeat(np.arange(10), 500)
    assert covers_once(split(fg.Shards(5), y, 20, 3), 5000)


@pytest.mark.parametrize("partition", [fg.IID(), fg.Dirichlet(0.3), fg.Shards(5)])
def test_the_seed_decides_the_partition(partition):
    y = np.repeat(np.arange(10), 50)
    a, b, c = (split(partition, y, 7, seed) for seed in (0, 0, 1))
    assert all(np.array_equal(x, y) for x, y in zip(a, b, strict=True))
    assert not all(np.array_equal(x, y) for x, y in zip(a, c, strict=True))


def test_a_smaller_alpha_is_more_unequal():
    y = np.repeat(np.arange(10), 200)

    def concentration(alpha):
        shares = split(fg.Dirichlet(alpha), y, 10, 0)
        return np.mean([np.bincount(y[s], minlength=10).max() / len(s) for s in shares])

    assert concentration(0.05) > concentration(0.3) > concentration(100) > 0.1


def test_balance_stops_giving_to_clients_that_hold_their_share():
    """As in the authors' code: a client with n / M samples gets none of the classes that follow."""
    y = np.repeat(np.arange(10), 500)
    free, balanced = (split(fg.Dirichlet(0.3, balance=b), y, 10, 0) for b in (False, True))
    assert covers_once(balanced, 5000)
    assert max(map(len, balanced)) <= 500 + 500  # less than a share, and then one whole class at most
    assert np.std([len(s) for s in balanced]) < np.std([len(s) for s in free])


@settings(max_examples=40)
@given(labels, st.integers(1, 7), seeds, st.sampled_from([1e-3, 0.1, 0.3, 100.0]), st.integers(1, 4))
def test_a_balanced_draw_covers_every_sample_once_and_stays_near_the_equal_share(y, M, seed, alpha, least):
    shares = split(fg.Dirichlet(alpha, balance=True, least=least), y, M, seed)
    assert covers_once(shares, len(y))
    assert min(map(len, shares)) >= least
    largest_class = np.bincount(y).max()
    assert max(map(len, shares)) < len(y) / M + largest_class + 1  # below its share, then one class at most


def test_the_authors_dp1_on_twenty_clients():
    """Dirichlet(0.3), balanced, at least as many samples as classes: no client holds twice its equal share."""
    y = np.repeat(np.arange(10), 500)
    for seed in range(5):
        sizes = [len(share) for share in split(fg.Dirichlet(0.3, balance=True, least=10), y, 20, seed)]
        assert sum(sizes) == 5000
        assert 10 <= min(sizes) <= max(sizes) < 250 + 500
        free = [len(share) for share in split(fg.Dirichlet(0.3), y, 20, seed)]
        assert np.std(sizes) < np.std(free)


def test_the_default_draw_is_unchanged():
    """The settings of older records name these splits by their seed alone."""
    y = np.repeat(np.arange(4), 25)
    default, named = (split(p, y, 5, 3) for p in (fg.Dirichlet(0.3), fg.Dirichlet(0.3, least=1, balance=False)))
    assert all(np.array_equal(a, b) for a, b in zip(default, named, strict=True))
    assert [len(share) for share in default] == [4, 21, 11, 6, 58]


@settings(max_examples=40)
@given(labels, clients, seeds, st.integers(1, 4))
def test_least_is_the_fewest_samples_anyone_holds(y, M, seed, least):
    if M * least > len(y):
        with pytest.raises(fg.InputError, match="least"):
            fg.Dirichlet(0.1, least=least).split(y, M, seed)
        return
    shares = split(fg.Dirichlet(0.1, least=least), y, M, seed)
    assert min(map(len, shares)) >= least
    assert covers_once(shares, len(y))


@given(st.integers(1, 50), st.integers(1, 300), st.integers(1, 40), seeds)
def test_resample_gives_every_client_its_own_draws(n, M, size, seed):
    shares = fg.Resample(size).split(np.zeros(n, np.int64), M, seed)
    assert shares.sizes.tolist() == [size] * M
    last = shares[M - 1]
    assert last.shape == (size,)
    assert 0 <= last.min() <= last.max() < n
    assert np.array_equal(last, fg.Resample(size).split(np.zeros(n, np.int64), M, seed)[M - 1])


def test_resample_draws_uniformly_and_differently_for_every_client():
    shares = fg.Resample(50).split(np.zeros(20, np.int64), 2000, seed=0)
    draws = np.stack([shares[i] for i in range(2000)])
    assert np.abs(np.bincount(draws.ravel()) / draws.size - 0.05).max() < 0.005
    assert len({row.tobytes() for row in draws}) == 2000


@given(st.lists(st.sampled_from("abcde"), min_size=1, max_size=60))
def test_natural_clients_are_the_values_of_a_column(column):
    kinds = sorted(set(column))
    shares = fg.Natural(column).split(np.zeros(len(column), np.int64), len(kinds), seed=0)
    pieces = [shares[i] for i in range(len(kinds))]
    assert covers_once(pieces, len(column))
    for kind, own in zip(kinds, pieces, strict=True):
        assert {column[j] for j in own} == {kind}


def test_a_pool_is_split_by_any_partition():
    X, y = np.arange(12.0).reshape(6, 2), np.array([0, 0, 1, 1, 2, 2])
    by_index = fg.Federation.from_pool(X, y, 2, fg.Indices([[0, 1, 5], [2]]), test=(X, y))
    assert by_index.sizes.tolist() == [3, 1]
    assert by_index.samples_of(0).tolist() == [0, 1, 5]
    assert by_index.weights.tolist() == [0.75, 0.25]
    by_column = fg.Federation.from_pool(X, y.astype(float), 3, fg.Natural(["u", "v", "u", "w", "v", "u"]))
    assert by_column.sizes.tolist() == [3, 2, 1]
    with pytest.raises(fg.InputError, match="number of index lists, 2"):
        fg.Federation.from_pool(X, y, 3, fg.Indices([[0], [1]]))
    with pytest.raises(fg.InputError, match="0 to 5"):
        fg.Federation.from_pool(X, y, 2, fg.Indices([[0], [6]]))
    with pytest.raises(fg.InputError, match=r"client 1.*at least one"):
        fg.Federation.from_pool(X, y, 2, fg.Indices([[0], []]))
    with pytest.raises(fg.InputError, match="one for each of 6 samples"):
        fg.Federation.from_pool(X, y, 2, fg.Natural([1, 2]))
    with pytest.raises(fg.InputError, match="different values in the column, 2"):
        fg.Federation.from_pool(X, y, 3, fg.Natural([1, 2] * 3))


@pytest.mark.parametrize(("n", "M"), [(3, 4), (10, 0)])
def test_more_clients_than_samples_or_none_is_refused(n, M):
    with pytest.raises(fg.InputError, match="clients"):
        fg.IID().split(np.zeros(n, np.int64), M, seed=0)


# batches


@given(st.integers(1, 60), st.integers(1, 40), st.integers(1, 30), seeds)
def test_replacement_draws_full_batches_of_own_samples(n, steps, batch, seed):
    positions = batch_positions(n, steps, batch, "replacement", seed, 3, 5)
    assert positions.shape == (steps, batch)
    assert positions.min() >= 0
    assert positions.max() < n


@given(st.integers(1, 60), st.integers(1, 40), st.integers(1, 30), seeds)
def test_shuffle_walks_epochs_without_repeats_and_drops_the_tail(n, steps, batch, seed):
    positions = batch_positions(n, steps, batch, "shuffle", seed, 0, 0)
    assert positions.shape == (steps, min(n, batch))
    per_epoch = max(1, n // batch)
    for start in range(0, steps, per_epoch):
        epoch = positions[start : start + per_epoch].ravel()
        assert len(np.unique(epoch)) == len(epoch)


@pytest.mark.parametrize("sampling", ["replacement", "shuffle"])
def test_the_first_batches_do_not_depend_on_how_many_follow(sampling):
    long = batch_positions(50, 40, 7, sampling, 1, 2, 3)
    assert np.array_equal(batch_positions(50, 11, 7, sampling, 1, 2, 3), long[:11])


@pytest.mark.parametrize("sampling", ["replacement", "shuffle"])
def test_batches_are_keyed_by_seed_round_and_client(sampling):
    def draw(seed, round, client):
        return batch_positions(1000, 5, 10, sampling, seed, round, client).tobytes()

    keys = [(s, r, c) for s in (0, 1) for r in (0, 1) for c in (0, 1)]
    assert len({draw(*key) for key in keys}) == len(keys)


def test_replacement_is_uniform():
    positions = batch_positions(10, 5000, 20, "replacement", 0, 0, 0)
    shares = np.bincount(positions.ravel(), minlength=10) / positions.size
    assert np.abs(shares - 0.1).max() < 0.005  # 5 standard deviations


def test_an_epoch_is_a_full_pass():
    assert epoch_steps(np.array([1, 19, 20, 21, 40]), 20).tolist() == [1, 1, 1, 2, 2]
    assert epoch_steps(np.array([1, 1000]), None).tolist() == [1, 1]


# federations


def test_from_arrays_takes_anything_that_becomes_a_tensor():
    fed = fg.Federation.from_arrays(
        [
            ([[1, 2]], [0]),
            (np.array([[3.0, 4.0], [5, 6]]), np.array([1, 0])),
            (torch.ones(1, 2), torch.tensor([True])),
        ],
        test=([[0.0, 0.0]], [1]),
    )
    assert fed.sizes.tolist() == [1, 2, 1]
    assert fed.weights.tolist() == [0.25, 0.5, 0.25]
    assert fed.targets.tolist() == [0, 1, 0, 1]
    assert fed.num_clients == 3
    assert fed.num_classes == 2


def test_digits_are_real_and_split_always_alike():
    fed = fg.Federation.load("digits", clients=10, partition=fg.Dirichlet(0.3), seed=4)
    assert len(fed.inputs) == 1437
    assert len(fed.test[0]) == 360
    assert float(fed.inputs.max()) == 1.0
    assert np.bincount(fed.targets).min() > 130  # every class is there
    other = fg.Federation.load("digits", clients=3, seed=9)
    assert torch.equal(other.test[0], fed.test[0])
    assert abs(fed.weights.sum() - 1) < 1e-12
    assert fed.sizes.sum() == 1437


def test_digits_are_those_of_scikit_learn_and_its_stratified_split():
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split

    X, y = load_digits(return_X_y=True)
    expected = train_test_split(
        (X / 16).astype(np.float32), y.astype(np.int64), test_size=360, stratify=y, random_state=0
    )
    samples = digits()
    for ours, theirs in zip(
        (samples.train[0], samples.test[0], samples.train[1], samples.test[1]), expected, strict=True
    ):
        assert ours.dtype == theirs.dtype
        assert np.array_equal(ours, theirs)


def test_synthetic_follows_the_fedprox_recipe():
    fed = fg.Federation.load("synthetic", clients=30, alpha=0.0, beta=0.0, seed=0)
    assert fed.inputs.shape[1] == 60
    assert fed.num_classes == 10
    assert fed.sizes.min() >= 45  # 50 less the tenth that is the test set
    variance = fed.inputs[fed.samples_of(int(np.argmax(fed.sizes)))].var(0).numpy()
    assert np.allclose(variance, np.arange(1, 61) ** -1.2, rtol=0.5)
    again = fg.Federation.load("synthetic", clients=30, alpha=0.0, beta=0.0, seed=0)
    assert torch.equal(again.inputs, fed.inputs)


def test_beta_moves_the_inputs_of_synthetic_apart():
    def spread_of_means(beta):
        fed = fg.Federation.load("synthetic", clients=40, beta=beta, seed=1)
        return np.std([float(fed.inputs[fed.samples_of(i)].mean()) for i in range(40)])

    assert spread_of_means(0.0) < 0.3 < 0.8 < spread_of_means(1.0) < 1.3 < 2.5 < spread_of_means(3.0)


def test_alpha_does_not_change_the_labels_of_synthetic():
    """A surprise of the published recipe: u_k shifts all logits of a client alike, and argmax ignores it."""
    a, b = (fg.Federation.load("synthetic", clients=20, alpha=alpha, seed=1) for alpha in (0.0, 1.0))
    assert torch.equal(a.targets, b.targets)
    assert torch.equal(a.inputs, b.inputs)


def test_the_picture_shows_every_holding():
    fed = fg.Federation.load("digits", clients=8, partition=fg.Shards(3), seed=0)
    figure = fed.plot()
    dots = figure.axes[0].collections[0]
    assert len(dots.get_offsets()) == 8 * 3
    assert "digits" in figure.axes[0].get_title()


# bad input


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"clients": []}, "at least one"),
        ({"clients": [([[1.0]], [0]), (np.zeros((0, 1)), [])]}, "client 1.*at least one sample"),
        ({"clients": [([[1.0]], [0, 1])]}, "client 0.*as many targets"),
        ({"clients": [([[1.0]], [0]), ([[1.0, 2.0]], [0])]}, "client 1 inputs"),
        ({"clients": [([[1.0]], [0]), ([[float("nan")]], [0])]}, "NaN or infinity in sample 1"),
        ({"clients": [([[1.0]], [float("inf")])]}, "targets.*NaN or infinity"),
        ({"clients": [([[1.0]], [0])], "test": ([[1.0, 2.0]], [0])}, "test inputs"),
        ({"clients": [([[1.0]], [0])], "test": ([[float("nan")]], [0])}, "test inputs.*NaN"),
        ({"clients": [("text", "label")]}, "client 0"),
        ({"clients": [7]}, "client 0.*pair"),
        ({"clients": [([[1.0]], [0])] * 2, "weights": [0.5]}, "one weight for each of 2"),
        ({"clients": [([[1.0]], [0])] * 2, "weights": [0.5, 0.6]}, "sum of 1.1.*divide"),
        ({"clients": [([[1.0]], [0])] * 2, "weights": [1.5, -0.5]}, "above 0"),
    ],
)
def test_bad_arrays_are_refused(arguments, message):
    with pytest.raises(fg.InputError, match=message):
        fg.Federation.from_arrays(**arguments)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("digit", {}, "did you mean 'digits'"),
        ("digits", {"clients": 0}, "clients"),
        ("digits", {"clients": 2000}, "1437 samples"),
        ("cifar-10", {}, "did you mean 'cifar10'"),
        ("digits", {"alpha": 1}, "alpha"),
        ("digits", {"partition": "dirichlet"}, "partition"),
        ("digits", {"partition": fg.Shards(11)}, "number of classes in the data, 10"),
        ("digits", {"seed": -1}, "seed"),
        ("synthetic", {"partition": fg.IID()}, "split by nature"),
        ("synthetic", {"alpha": -1.0}, "alpha"),
    ],
)
def test_bad_loads_are_refused(name, options, message):
    with pytest.raises(fg.InputError, match=message):
        fg.Federation.load(name, **options)


@pytest.mark.parametrize(
    "make",
    [
        lambda: fg.Dirichlet(0),
        lambda: fg.Dirichlet(-1),
        lambda: fg.Shards(0),
        lambda: fg.Dirichlet(0.3, least=0),
        lambda: fg.Resample(0),
    ],
)
def test_bad_partitions_are_refused(make):
    with pytest.raises(fg.InputError):
        make()
