"""The paper's data sets, from their real files. Skipped where the files are not there."""

import numpy as np
import pytest
import torch

import fedagrac as fg
from fedagrac.data.batches import batch_positions
from fedagrac.data.locating import locate
from fedagrac.data.pictures import draw_shifts


def real(name):
    if locate(name) is None:
        pytest.skip(f"the files of {name} are not here: fedagrac data fetch {name}")
    return name


def load(name, **options):
    return fg.Federation.load(real(name), **options)


def test_a9a_is_the_published_one():
    fed = load("a9a", clients=1)
    (X, y), (Xt, yt) = (fed.inputs, fed.targets), fed.test
    assert X.shape == (32561, 123)
    assert Xt.shape == (16281, 123)
    assert (int(y.sum()), int(yt.sum())) == (7841, 3846)
    assert set(X.unique().tolist()) == {0.0, 1.0}
    assert float(Xt[:, 122].sum()) == 0  # the test file never mentions feature 123
    assert float(X[:, 122].sum()) > 0
    assert X.dtype == torch.float32


def test_fashion_mnist_is_the_published_one():
    fed = load("fashion-mnist", clients=1)
    assert fed.inputs.shape == (60000, 1, 28, 28)
    assert fed.inputs.dtype == torch.uint8
    assert np.bincount(fed.targets).tolist() == [6000] * 10
    assert np.bincount(fed.test[1]).tolist() == [1000] * 10
    assert float(fed.inputs.double().mean()) / 255 == pytest.approx(0.2860, abs=5e-4)  # known of the data set


def test_cifar10_is_the_published_one():
    fed = load("cifar10", clients=1)
    assert fed.inputs.shape == (50000, 3, 32, 32)
    assert fed.inputs.dtype == torch.uint8
    assert np.bincount(fed.targets).tolist() == [5000] * 10
    assert np.bincount(fed.test[1]).tolist() == [1000] * 10
    means = [float(fed.inputs[:, c].sum(dtype=torch.float64)) / (50000 * 1024 * 255) for c in range(3)]
    assert np.round(means, 4).tolist() == [0.4914, 0.4822, 0.4465]


def test_the_roles_of_shakespeare_are_clients_with_names_and_test_sets():
    fed = load("shakespeare", clients=10, stride=3, test_stride=7, seed=2)
    other = load("shakespeare", clients=10, stride=3, test_stride=7, seed=3)
    assert fed.inputs.dtype == torch.uint8
    assert fed.inputs.shape == (fed.sizes.sum(), 80)
    assert len(set(fed.names)) == 10
    assert set(fed.names) != set(other.names)
    assert torch.equal(fed.tests.inputs, fed.test[0])
    assert fed.tests.shares.sizes.sum() == len(fed.test[1])
    # a role of L characters: targets 80, 83, ... before its last fifth, and every seventh of that fifth
    for train, test in zip(fed.sizes, fed.tests.shares.sizes, strict=True):
        assert any(
            train == (L - L // 5 - 80 + 2) // 3 and test == (L // 5 + 6) // 7
            for L in range(35 * (test - 1), 35 * test + 5)
        )
    assert load("shakespeare", clients=None, stride=1000).num_clients == 1006
    with pytest.raises(fg.InputError, match="shakespeare is split by nature"):
        load("shakespeare", clients=10, partition=fg.IID())
    with pytest.raises(fg.InputError, match="did you mean 'stride'"):
        load("shakespeare", clients=10, strid=3)


@pytest.mark.parametrize(
    ("name", "sizes"), [("char-lstm", {"hidden": 16, "layers": 1}), ("char-gpt", {"width": 16, "layers": 1})]
)
def test_roles_learn_their_next_character(name, sizes):
    fed = load("shakespeare", clients=4, stride=5, test_stride=100, seed=0)
    torch.manual_seed(0)
    result = fg.simulate(
        fg.models.build(name, **sizes), fed, fg.FedaGrac(lr=0.5, init="zeros"), rounds=3, steps=fg.Linear(4, 4),
        batch_size=10, device="cpu", engine="serial",
    )  # fmt: skip
    first, *_, last = result.history
    assert last["train_loss"] < first["train_loss"] < 5  # log(80) = 4.4 for guessing
    assert last["test_accuracy"] is not None


def test_dp2_deals_cifar10_out_completely():
    fed = load("cifar10", clients=20, partition=fg.Shards(5))
    assert fed.sizes.tolist() == [2500] * 20
    assert all(len(fed.targets[fed.samples_of(i)].unique()) == 5 for i in range(20))
    used = np.concatenate([fed.samples_of(i) for i in range(20)])
    assert np.array_equal(np.sort(used), np.arange(50000))


def test_dp1_splits_all_of_cifar10_unequally():
    fed = load("cifar10", clients=20, partition=fg.Dirichlet(0.3), seed=0)
    assert fed.sizes.sum() == 50000
    assert fed.sizes.max() > 2 * fed.sizes.min()


def test_two_classes_cannot_be_dealt_five_each():
    with pytest.raises(fg.InputError, match="number of classes in the data, 2"):
        load("a9a", clients=20, partition=fg.Shards(5))


def test_training_pictures_are_the_keyed_crops_and_test_pictures_are_not_touched():
    """What the module sees in a round, rebuilt by hand from the streams."""
    fed = load("cifar10", clients=3, partition=fg.IID(), seed=0)
    seen = []

    class Spy(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.w = torch.nn.Parameter(torch.zeros(10))

        def forward(self, x):
            seen.append(x.detach().clone())
            return self.w.expand(len(x), 10)

    class ForgetTrials(fg.Callback):
        def on_start(self, run):
            seen.clear()

    options = {"rounds": 1, "steps": fg.Explicit([[2, 1, 1]]), "batch_size": 4, "seed": 5, "device": "cpu"}
    fg.simulate(Spy(), fed, fg.FedAvg(lr=0.1), callbacks=[ForgetTrials()], **options)
    batches = seen[:4]  # the steps of all clients; the rest is the test
    own = fed.samples_of(0)
    positions = batch_positions(len(own), 2, 4, "replacement", 5, 0, 0)
    shifts = draw_shifts(2, 4, 4, seed=5, round=0, client=0)
    mean, std = (np.array(v)[:, None, None] for v in ((0.4914, 0.4822, 0.4465), (0.2023, 0.1994, 0.2010)))
    for k in range(2):
        for j in range(4):
            picture = fed.inputs[own[positions[k, j]]].numpy()
            down, right, flip = shifts[k, j]
            crop = np.pad(picture, ((0, 0), (4, 4), (4, 4)))[:, down : down + 32, right : right + 32]
            expected = ((crop[:, :, ::-1] if flip else crop) / 255 - mean) / std
            assert np.allclose(batches[k][j].numpy(), expected, atol=1e-5)
    test = torch.cat(seen[4:])
    assert len(test) == 10000
    assert np.allclose(test[0].numpy(), (fed.test[0][0].numpy() / 255 - mean) / std, atol=1e-5)


@pytest.mark.parametrize(("data", "model"), [("cifar10", "alexnet"), ("fashion-mnist", "cnn")])
def test_the_papers_networks_train_on_their_data(data, model):
    fed = load(data, clients=4, partition=fg.Dirichlet(0.3), seed=0)
    fed.test = tuple(part[:500] for part in fed.test)  # a quick look is enough here
    torch.manual_seed(0)
    result = fg.simulate(
        fg.models.build(model), fed, fg.FedaGrac(lr=0.03, init="zeros"), rounds=2, steps=fg.Linear(1, 2),
        batch_size=25, participation=2, device="cpu",
    )  # fmt: skip
    assert result.status == "finished"
    assert result.history[-1]["train_loss"] < 2.5
    assert result.history[-1]["bytes_down"] == 2 * 2 * len(result.vector) * 4


def test_a_hundred_thousand_clients_cost_no_index_memory():
    import tracemalloc

    name = real("fashion-mnist")
    one = fg.Federation.load(name, clients=1)
    tracemalloc.start()
    shares = fg.Resample(100).split(one.targets.numpy(), clients=100_000, seed=0)
    fed = fg.Federation(one.inputs, one.targets, shares, one.test, None, name, (name,), one.images)
    used = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert used < 20e6  # ten million sample numbers would be 40 MB even as 4 bytes each
    assert fed.num_clients == 100_000
    again = fg.Resample(100).split(one.targets.numpy(), clients=100_000, seed=0)
    assert np.array_equal(fed.samples_of(99_999), again[99_999])
    result = fg.simulate(
        fg.models.build("logistic", features=784, classes=10), fed, fg.FedaGrac(lr=0.01, init="zeros"), rounds=1,
        steps=fg.Gaussian(5, 4), batch_size=20, participation=50, device="cpu",
    )  # fmt: skip
    assert result.history[0]["clients"] == 50


def test_the_a9a_experiment_ranks_the_algorithms_as_the_paper_does():
    """The paper's LR setting, cut to 8 rounds and to every fifth step with five times the step size."""
    fed = load("a9a", clients=20, partition=fg.Dirichlet(0.3), seed=0)
    accuracy = {}
    for algorithm in (fg.FedAvg(lr=0.025), fg.FedaGrac(lr=0.025), fg.Scaffold(lr=0.025)):
        result = fg.simulate(
            fg.models.build("logistic"), fed, algorithm, rounds=8, steps=fg.Gaussian(100, 400), batch_size=20,
            eval_every=8, device="cpu",
        )  # fmt: skip
        accuracy[algorithm.name] = result.history.last()
    assert accuracy["fedagrac"] > 0.83
    assert accuracy["scaffold"] > 0.83
    assert accuracy["fedavg"] < accuracy["fedagrac"] - 0.01
