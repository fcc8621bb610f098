"""The authors' own splits and step counts, from their public code.

The expected hashes and counts come from running data/utils.py and the draws of get_num_steps in
federated_learning/FedaGrac/learner.py of github.com/HarliWu/FedaGrac on the same labels; that code is not here.
"""

import hashlib

import numpy as np
import pytest

import fedagrac as fg
from fedagrac.data.locating import locate
from fedagrac.errors import InputError
from fedagrac.experiments.build import build_kind
from fedagrac.paper.authors import PARTITIONS, SEED, AuthorsClasses, AuthorsDirichlet, gaussian_steps
from fedagrac.paper.fashion import AUTHORS_SPLIT, AUTHORS_STEPS
from fedagrac.paper.table_variance import AUTHORS

LABELS = np.repeat(np.arange(10), 100)


def fingerprint(shares, clients):
    """Return a hash of all sample numbers, client by client, in their order."""
    return hashlib.sha256(b"".join(shares[i].astype("<i8").tobytes() for i in range(clients))).hexdigest()[:16]


@pytest.mark.parametrize(
    ("partition", "clients", "sizes", "expected"),
    [
        (AuthorsDirichlet(0.1), 10, [114, 72, 115, 11, 110, 72, 98, 150, 141, 117], "19bf4d562712d2b2"),
        (AuthorsDirichlet(0.3), 10, [86, 112, 54, 92, 93, 102, 155, 124, 101, 81], "5ff76501ec83b507"),
        (AuthorsClasses(2), 5, [200] * 5, "240e760ed40c9908"),
        (
            AuthorsClasses(5), 20,
            [65, 42, 48, 54, 44, 56, 53, 43, 60, 48, 47, 49, 43, 47, 46, 47, 44, 57, 46, 45], "593ff3804e808a80",
        ),
    ],
)  # fmt: skip
def test_splits_are_those_of_the_authors_code(partition, clients, sizes, expected):
    shares = partition.split(LABELS, clients, SEED)
    assert shares.sizes.tolist() == sizes
    assert fingerprint(shares, clients) == expected


def settings_of(name):
    return {"fashion": AUTHORS_SPLIT, **AUTHORS}[name]


@pytest.mark.parametrize(
    ("data", "clients", "setting", "expected"),
    [
        ("fashion-mnist", 10, "fashion", "6f552baa2193462a"),
        ("cifar10", 20, "dp1", "7fd86febd7d24fd4"),
        ("cifar10", 20, "dp2", "a6a5866e8f9e5c30"),
    ],
)
def test_named_splits_of_the_real_data(data, clients, setting, expected):
    if locate(data) is None:
        pytest.skip(f"the files of {data} are not here: fedagrac data fetch {data}")
    settings = settings_of(setting)
    labels = fg.Federation.load(data, clients=1).targets.numpy().astype(np.int64)
    shares = build_kind(settings["partition"], PARTITIONS).split(labels, clients, settings["seed"])
    assert fingerprint(shares, clients) == expected


def test_every_sample_of_a_dirichlet_split_is_used_once_and_shares_are_balanced():
    shares = AuthorsDirichlet(0.1).split(LABELS, 10, SEED)
    assert sorted(np.concatenate([shares[i] for i in range(10)]).tolist()) == list(range(1000))
    assert shares.sizes.min() >= 10  # as many as there are classes
    assert shares.sizes.max() <= 100 + 100  # the equal share and one class more


def test_step_counts_are_those_of_the_authors_code():
    """Cut off to integers, not rounded; clients are numbered from 1."""
    counts = [529, 408, 629, 348, 434, 653, 445, 481, 491, 629, 636, 617, 475, 589, 419, 472, 454, 697, 415, 423]
    assert AUTHORS["v10000-fixed"]["table"] == [counts]
    assert gaussian_steps(500, 10_000, clients=3)["table"] == [counts[:3]]
    assert AUTHORS_STEPS["table"] == [[243, 337, 125, 160, 385, 243, 176, 295, 183, 397]]
    every_round = gaussian_steps(500, 10_000, clients=20, rounds=3)["table"]
    assert (len(every_round), every_round[0]) == (3, counts)
    assert [row[:3] for row in every_round[1:]] == [[522, 562, 389], [447, 372, 426]]
    near = np.array(AUTHORS["v100-fixed"]["table"][0])
    assert abs(near - (500 + (np.array(counts) - 500) / 10)).max() <= 1  # the same draws, ten times closer


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: AuthorsDirichlet(0.0), "alpha"),
        (lambda: AuthorsClasses(0), "classes"),
        (lambda: AuthorsClasses(2).split(LABELS, 4, SEED), "classes = 2.*every class"),
        (lambda: AuthorsClasses(11).split(LABELS, 4, SEED), "classes = 11.*at most 10"),
        (lambda: AuthorsDirichlet(0.1).split(LABELS[::90], 3, SEED), "alpha = 0.1.*fewer than 10 samples"),
    ],
)
def test_impossible_splits_are_refused(make, message):
    with pytest.raises(InputError, match=message):
        make()
