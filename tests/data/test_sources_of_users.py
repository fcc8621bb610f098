"""Data that users bring: trees of arrays, data sets of torch and Hugging Face, data frames, names, tests."""

import importlib.util
import time
from collections import OrderedDict

import numpy as np
import pandas as pd
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import (
    BatchSampler,
    ConcatDataset,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    Subset,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
    random_split,
)

import fedagrac as fg
from fedagrac.data.describe import describe
from fedagrac.data.partitions import StoredShares

X = np.arange(24.0).reshape(12, 2)
Y = np.arange(12) % 3


def samples(fed, client):
    """The inputs and targets of a client."""
    mine = fed.samples_of(client)
    return fed.inputs[mine], fed.targets[mine]


# trees of arrays


def tokens(n, length=4, start=0):
    ids = np.arange(start, start + n * length, dtype=np.int32).reshape(n, length)
    return {"ids": ids, "mask": ids % 2 == 0}, np.arange(n)


def test_a_dict_of_inputs_is_pooled_leaf_by_leaf_and_keeps_its_types():
    fed = fg.Federation.from_arrays([tokens(3), tokens(2, start=100)])
    assert list(fed.inputs) == ["ids", "mask"]
    assert (fed.inputs["ids"].dtype, fed.inputs["mask"].dtype) == (torch.int32, torch.bool)
    assert fed.inputs["ids"][fed.samples_of(1)].tolist() == [[100, 101, 102, 103], [104, 105, 106, 107]]
    assert fed.sizes.tolist() == [3, 2]
    assert "{'ids': (4,), 'mask': (4,)}" in repr(fed)


def test_a_tuple_of_inputs_is_a_tuple_of_tensors_and_a_tuple_of_numbers_is_one():
    pair = (X[:2], X[2:4].astype(np.float32)), [0, 1]
    fed = fg.Federation.from_arrays([pair, pair])
    assert [leaf.shape for leaf in fed.inputs] == [(4, 2), (4, 2)]
    plain = fg.Federation.from_arrays([(((0.0, 1.0), (2.0, 3.0)), (0, 1))])
    assert plain.inputs.tolist() == [[0.0, 1.0], [2.0, 3.0]]
    assert plain.targets.tolist() == [0, 1]


def test_the_order_of_keys_does_not_matter():
    (inputs, targets), other = tokens(2), tokens(2)
    swapped = OrderedDict(reversed(inputs.items()))
    fed = fg.Federation.from_arrays([other, (swapped, targets)])
    assert torch.equal(fed.inputs["ids"][:2], fed.inputs["ids"][2:])


def test_bytes_stay_bytes_and_integers_stay_integers():
    for kind in (np.uint8, np.int16, np.int64):
        assert fg.Federation.from_arrays([(X.astype(kind), Y)]).inputs.numpy().dtype == kind
    fed = fg.Federation.from_arrays([(X.astype(np.uint16), Y.astype(np.uint8))])
    assert (fed.inputs.dtype, fed.targets.dtype) == (torch.int32, torch.int64)


def test_lists_follow_the_types_of_the_others():
    fed = fg.Federation.from_arrays([([[1, 2]], [0]), (X, Y)], test=([[0, 0]], [1]))
    assert fed.inputs.dtype == fed.test[0].dtype == torch.float64


def ragged(change):
    inputs, targets = tokens(2)
    return change(inputs), targets


@pytest.mark.parametrize(
    ("second", "message"),
    [
        (ragged(lambda x: {"ids": x["ids"]}), r"client 1 inputs.*\['ids'\].*structure of client 0.*\['mask'\]"),
        (ragged(lambda x: (x["ids"], x["mask"])), r"client 1 inputs.*structure of client 0"),
        (ragged(lambda x: x["ids"]), r"client 1 inputs = 'one array'"),
        (
            ragged(lambda x: {**x, "mask": x["mask"][:, :3]}),
            r"client 1 inputs\['mask'\].*\(3,\).*client 0, \(4,\)",
        ),
        (ragged(lambda x: {**x, "ids": x["ids"] * 1.0}), r"client 1 inputs\['ids'\] = torch.float64.*torch.int32"),
        (ragged(lambda x: {**x, "ids": x["ids"].astype(np.int64)}), r"inputs\['ids'\] = torch.int64.*torch.int32"),
        (ragged(lambda x: {**x, "mask": x["mask"][:1]}), r"client 1.*inputs\['mask'\] \(1, 4\).*as many"),
        (ragged(lambda x: {}), r"client 1 inputs = 'no arrays'"),
        ((tokens(2)[0], np.zeros((2, 1), int)), r"client 1 targets.*\(1,\).*client 0, \(\)"),
        ((tokens(2)[0], np.zeros(2)), r"client 1 targets = torch.float64.*client 0, torch.int64"),
        (({"ids": "text", "mask": [0]}, [0]), r"client 1 inputs\['ids'\]"),
    ],
)
def test_clients_of_another_kind_are_refused_by_name(second, message):
    with pytest.raises(fg.InputError, match=message):
        fg.Federation.from_arrays([tokens(2), second])


def test_nan_is_refused_with_the_leaf_and_the_sample():
    good, bad = ({"a": X[:3], "b": (X[:3], X[:3])}, Y[:3]), ({"a": X[:3], "b": (X[:3], X[:3] * np.nan)}, Y[:3])
    with pytest.raises(fg.InputError, match=r"^inputs\['b'\]\[1\] = 'NaN or infinity in sample 3'"):
        fg.Federation.from_arrays([good, bad])
    with pytest.raises(fg.InputError, match=r"^test inputs\['b'\]\[1\].*sample 0"):
        fg.Federation.from_arrays([good], test=bad)


@pytest.mark.parametrize(
    ("test", "message"),
    [
        ((X, Y[:, None]), r"test targets.*\(1,\).*training samples, \(\)"),
        ((X, Y * 1.0), r"test targets = torch.float64.*torch.int64"),
        (({"x": X}, Y), "test inputs.*one array"),
        ((X.astype(np.uint8), Y), "test inputs = torch.uint8.*torch.float64"),
        ((X[:3], Y), "test.*as many targets"),
    ],
)
def test_test_samples_unlike_the_training_samples_are_refused(test, message):
    with pytest.raises(fg.InputError, match=message):
        fg.Federation.from_arrays([(X, Y)], test=test)


def test_classes_are_counted_where_targets_are_labels_and_padding_is_none():
    padded = np.where(np.arange(12).reshape(6, 2) < 8, np.arange(12).reshape(6, 2), -100)
    assert fg.Federation.from_arrays([(X[:6], padded)]).num_classes == 8
    assert fg.Federation.from_arrays([(X[:2], [-100, -100])]).num_classes == 0
    assert fg.Federation.from_arrays([(X[:2], [0, 1])], test=(X[:1], [6])).num_classes == 7
    assert fg.Federation.from_arrays([(X[:2], [0.5, 1.0])]).num_classes is None
    assert fg.Federation.from_arrays([(X[:2], {"a": np.array([0, 1])})]).num_classes is None


def test_padding_is_no_class_in_descriptions_and_pictures():
    fed = fg.Federation.from_arrays([(X[:4], [0, -100, 2, 2]), (X[:1], [1])], names=["ann", "bob"])
    assert describe(fed, np.array([1, 1])).labels == [[1, 0, 2], [0, 1, 0]]
    assert describe(fed, np.array([1, 1])).names == ["ann", "bob"]
    assert [label.get_text() for label in fed.plot().axes[0].get_xticklabels()] == ["ann", "bob"]
    of_tokens = fg.Federation.from_arrays([(X[:2], [[0, 1], [2, 3]])])
    assert describe(of_tokens, np.array([1])).labels is None


def test_a_pool_may_be_a_tree():
    inputs, _ = tokens(12)
    fed = fg.Federation.from_pool(inputs, Y, 2, fg.Indices([[0, 5], [1]]), test=(inputs, Y))
    assert fed.inputs["ids"][fed.samples_of(0)].tolist() == inputs["ids"][[0, 5]].tolist()


# names


def test_a_dict_of_clients_names_them():
    fed = fg.Federation.from_arrays({"ann": (X[:3], Y[:3]), "bob": (X[3:4], Y[3:4])})
    assert fed.names == ("ann", "bob")
    assert fed.name_of(1) == "bob"
    assert fed.has_names
    assert repr(fed) == "Federation('custom', 2 clients (ann, bob), 4 samples of shape (2,), 1 to 3 each)"
    many = fg.Federation.from_arrays([(X[:1], Y[:1])] * 5, names=list("abcde"))
    assert "5 clients (a, b, c, ...)" in repr(many)


def test_without_names_clients_are_called_by_their_numbers():
    fed = fg.Federation.from_arrays([(X, Y)] * 3)
    assert fed.names == ("0", "1", "2")
    assert not fed.has_names
    assert describe(fed, np.ones(3, np.int64)).names is None


def test_a_natural_partition_names_its_clients():
    fed = fg.Federation.from_pool(X, Y, 2, fg.Natural(["v", "u"] * 6))
    assert fed.names == ("u", "v")
    assert fed.split_validation(0.5).names == ("u", "v")


def test_errors_name_the_client():
    with pytest.raises(fg.InputError, match="client 'bob' inputs"):
        fg.Federation.from_arrays({"ann": (X, Y), "bob": (X[:, :1], Y)})


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["ann"], "one name for each of 2"),
        (["ann", "ann"], "different name for every client"),
        (["ann", 3], "strings"),
        (["ann", ""], "not empty"),
        ("ab", "one name for each"),
    ],
)
def test_bad_names_are_refused(names, message):
    with pytest.raises(fg.InputError, match=message):
        fg.Federation.from_arrays([(X, Y)] * 2, names=names)


def test_a_million_clients_cost_no_names():
    begin = time.process_time()
    fed = fg.Federation.from_pool(X, Y, 1_000_000, fg.Resample(2))
    assert fed.name_of(999_999) == "999999"
    assert "1000000 clients," in repr(fed)
    assert time.process_time() - begin < 5


# test sets of the clients


def test_test_sets_are_pooled_in_the_order_of_the_clients():
    pairs = {"ann": (X[:2], Y[:2]), "bob": (X[2:5], Y[2:5]), "eve": (X[5:], Y[5:])}
    own = {"eve": (X[:4], Y[:4]), "ann": (X[4:6], Y[4:6])}
    fed = fg.Federation.from_arrays(pairs, tests=own)
    assert fed.tests.shares.sizes.tolist() == [2, 0, 4]
    assert fed.tests.targets[fed.tests.shares[2]].tolist() == Y[:4].tolist()
    assert fed.tests.inputs[fed.tests.shares[0]].tolist() == X[4:6].tolist()
    assert fed.test[0] is fed.tests.inputs
    assert len(fed.test[1]) == 6
    assert "a test set per client" in repr(fed)
    both = fg.Federation.from_arrays(list(pairs.values()), tests=[(X, Y), None, (X, Y)], test=(X[:1], Y[:1]))
    assert len(both.test[0]) == 1
    assert both.tests.shares.sizes.tolist() == [12, 0, 12]


@pytest.mark.parametrize(
    ("tests", "message"),
    [
        ([(X, Y)], "1 test sets.*one for each of 2"),
        ([(X, Y), (X[:, :1], Y)], "test of client bob inputs"),
        ([(X[:, :1], Y)] * 2, r"test inputs.*\(1,\).*training samples"),
        ({"anne": (X, Y)}, "'anne'.*did you mean 'ann'"),
        ([(X, Y), (X + np.inf, Y)], "test inputs.*sample 12"),
    ],
)
def test_bad_test_sets_are_refused(tests, message):
    with pytest.raises(fg.InputError, match=message):
        fg.Federation.from_arrays({"ann": (X, Y), "bob": (X, Y)}, tests=tests)


# validation


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(1, 30), min_size=1, max_size=8), st.floats(0.01, 0.99), st.integers(0, 2**32))
def test_a_validation_split_covers_each_client_once_and_leaves_something_to_train_on(sizes, share, seed):
    pool = np.arange(sum(sizes), dtype=np.float64)[:, None]
    parts = np.split(np.arange(sum(sizes)), np.cumsum(sizes)[:-1])
    fed = fg.Federation.from_pool(pool, np.zeros(len(pool), int), len(sizes), fg.Indices(parts))
    split = fed.split_validation(share, seed)
    for i, n in enumerate(sizes):
        train, held = split.samples_of(i), split.validation[i]
        assert np.array_equal(np.sort(np.concatenate([train, held])), parts[i])
        assert len(held) == min(int(share * n + 0.5), n - 1)
    assert split.weights == pytest.approx(split.sizes / split.sizes.sum())
    assert fed.validation is None


def test_the_seed_and_the_client_decide_the_validation_split():
    fed = fg.Federation.from_arrays([(np.zeros((40, 1)), [0] * 40)] * 2)
    a, b, c = (fed.split_validation(0.5, seed) for seed in (0, 0, 1))
    assert np.array_equal(a.validation[1], b.validation[1])
    assert not np.array_equal(a.validation[1], c.validation[1])
    assert not np.array_equal(a.validation[0], a.validation[1] - 40)


def test_a_sample_held_twice_is_not_on_both_sides():
    fed = fg.Federation.from_pool(X, Y, 50, fg.Resample(30)).split_validation(0.3)
    for i in range(50):
        assert not set(fed.samples_of(i)) & set(fed.validation[i])
        assert len(fed.samples_of(i))


def test_given_weights_survive_a_validation_split():
    fed = fg.Federation.from_arrays([(X, Y), (X, Y)], weights=[0.25, 0.75]).split_validation(0.5)
    assert fed.weights.tolist() == [0.25, 0.75]
    assert "12 for validation" in repr(fed)
    for share in (0, 1.0, -0.1, "a"):
        with pytest.raises(fg.InputError, match="share"):
            fg.Federation.from_arrays([(X, Y)]).split_validation(share)
    with pytest.raises(fg.InputError, match="validation split"):
        fed.split_validation(0.1)


# pictures and transforms


def test_images_are_checked_against_the_inputs():
    bytes_ = np.zeros((4, 3, 5, 5), np.uint8)
    fed = fg.Federation.from_arrays([(bytes_, [0] * 4)], images=fg.Images([0.5] * 3, [0.25] * 3, padding=2))
    assert fed.images.mean == (0.5, 0.5, 0.5)
    assert fed.images(fed.inputs[:1], torch.float32).unique().tolist() == [-2.0]
    for inputs, mean in ((bytes_, 0.5), (bytes_ / 255, [0.5] * 3), (bytes_[:, 0], [0.5] * 3)):
        with pytest.raises(fg.InputError, match=r"bytes \(uint8\) of shape \[n, "):
            fg.Federation.from_arrays([(inputs, [0] * 4)], images=fg.Images(mean, np.ones(np.size(mean)).tolist()))
    for arguments in ((0.5, 0.0), (0.5, -1.0), ((0.5, 0.5), 0.2), (np.nan, 1.0), (0.5, 1.0, -1), ("a", 1.0)):
        with pytest.raises(fg.InputError, match="Images"):
            fg.Images(*arguments)
    with pytest.raises(fg.InputError, match="images"):
        fg.Federation.from_arrays([(bytes_, [0] * 4)], images=(0.5, 0.5))


def test_a_transform_must_be_a_function():
    fed = fg.Federation.from_arrays([(X, Y)], transform=lambda inputs, generator: inputs + 1)
    assert fed.split_validation(0.5).transform(1, None) == 2
    with pytest.raises(fg.InputError, match="transform"):
        fg.Federation.from_arrays([(X, Y)], transform=3)


# torch data sets


class Squares(Dataset):
    """Sample i is (i, i squared); counts what is read."""

    def __init__(self, size, make=lambda i: (torch.tensor([float(i)]), i * i)):
        self.size, self.make, self.read = size, make, 0

    def __len__(self):
        return self.size

    def __getitem__(self, i):
        self.read += 1
        return self.make(i)


def test_data_sets_and_subsets_become_clients():
    whole = Squares(10)
    fed = fg.Federation.from_datasets(
        [Subset(whole, [9, 2]), Subset(Subset(whole, [1, 3, 5]), [2, 0]), Squares(4)]
    )
    assert [samples(fed, i)[1].tolist() for i in range(3)] == [[81, 4], [25, 1], [0, 1, 4, 9]]
    assert samples(fed, 1)[0].tolist() == [[5.0], [1.0]]
    assert whole.read == 4


def test_a_tensor_data_set_is_read_without_a_loop(monkeypatch):
    whole = TensorDataset(torch.arange(20.0).reshape(10, 2), torch.arange(10))
    parts = random_split(whole, [6, 4], torch.Generator().manual_seed(0))
    monkeypatch.setattr(TensorDataset, "__getitem__", lambda dataset, number: pytest.fail("a loop"))
    fed = fg.Federation.from_datasets({"ann": parts[0], "bob": parts[1]}, tests={"bob": whole}, test=whole)
    for i, part in enumerate(parts):
        assert samples(fed, i)[1].tolist() == list(part.indices)
    assert fed.names == ("ann", "bob")
    assert fed.tests.shares.sizes.tolist() == [0, 10]


def test_a_tensor_data_set_with_its_own_getitem_is_asked_for_every_sample():
    class Shifted(TensorDataset):
        def __getitem__(self, i):
            x, y = super().__getitem__(i)
            return x + 100, y

    fed = fg.Federation.from_datasets([Shifted(torch.zeros(3, 1), torch.arange(3))])
    assert fed.inputs.tolist() == [[100.0]] * 3


def test_a_hundred_thousand_samples_of_tensors_take_no_time():
    whole = TensorDataset(torch.zeros(200_000, 3), torch.zeros(200_000, dtype=torch.int64))
    begin = time.process_time()
    fg.Federation.from_datasets([Subset(whole, range(i, 200_000, 10)) for i in range(10)])
    assert time.process_time() - begin < 2


@pytest.mark.parametrize(
    ("make", "inputs", "targets"),
    [
        (lambda i: (i, float(i), i % 2), ([0, 1, 2], [0.0, 1.0, 2.0]), [0, 1, 0]),
        (lambda i: [np.float32(i), i % 2], [0.0, 1.0, 2.0], [0, 1, 0]),
        (lambda i: {"x": [i, 1], "label": i}, [[0, 1], [1, 1], [2, 1]], [0, 1, 2]),
        (lambda i: {"a": i, "b": i, "y": 0.5}, {"a": [0, 1, 2], "b": [0, 1, 2]}, [0.5] * 3),
        (lambda i: ({"ids": [i], "mask": [1]}, i), {"ids": [[0], [1], [2]], "mask": [[1]] * 3}, [0, 1, 2]),
        (lambda i: ((np.ones(1) * i, np.ones(2)), i), ([[0.0], [1.0], [2.0]], [[1.0, 1.0]] * 3), [0, 1, 2]),
    ],
)
def test_samples_may_be_tuples_and_dicts(make, inputs, targets):
    fed = fg.Federation.from_datasets([Squares(3, make)])
    found = fed.inputs
    if isinstance(found, dict):
        found = {key: value.tolist() for key, value in found.items()}
    elif isinstance(found, tuple):
        found = tuple(value.tolist() for value in found)
    else:
        found = found.tolist()
    assert found == inputs
    assert fed.targets.tolist() == targets


def test_inputs_and_targets_of_dicts_can_be_named():
    rows = [{"id": i, "image": [i, i], "fine": i, "coarse": i // 2} for i in range(4)]
    fed = fg.Federation.from_datasets([rows], inputs="image", targets="coarse")
    assert fed.inputs.tolist() == [[i, i] for i in range(4)]
    assert fed.targets.tolist() == [0, 0, 1, 1]
    both = fg.Federation.from_datasets([rows], inputs=["image"], targets=["fine", "coarse"])
    assert {key: value.tolist() for key, value in both.targets.items()} == {
        "fine": [0, 1, 2, 3],
        "coarse": [0, 0, 1, 1],
    }
    assert list(both.inputs) == ["image"]


def test_a_loader_gives_the_samples_of_its_data_set_in_order():
    whole = Squares(7)
    loaders = [
        DataLoader(whole, batch_size=3, shuffle=True, drop_last=True),
        DataLoader(ConcatDataset([Squares(2), Squares(2)]), batch_size=None),
        DataLoader(whole, batch_size=2, sampler=SubsetRandomSampler([6, 1, 3])),
    ]
    fed = fg.Federation.from_datasets(loaders)
    assert [samples(fed, i)[0][:, 0].tolist() for i in range(3)] == [
        [0, 1, 2, 3, 4, 5, 6],
        [0, 1, 0, 1],
        [1, 3, 6],
    ]


def test_a_loaders_own_collate_function_makes_the_samples():
    def pad(rows):
        padded = torch.zeros(len(rows), 4)
        for i, (x, _) in enumerate(rows):
            padded[i, : len(x)] = x
        return padded, torch.tensor([y for _, y in rows])

    lines = [(torch.ones(n), n) for n in (1, 4, 2)]
    fed = fg.Federation.from_datasets([DataLoader(lines, batch_size=2, collate_fn=pad)])
    assert fed.inputs.sum(1).tolist() == [1.0, 4.0, 2.0]
    assert fed.targets.tolist() == [1, 4, 2]


class Stream(IterableDataset):
    def __iter__(self):
        yield from [(0.0, 1)]


@pytest.mark.parametrize(
    ("datasets", "options", "message"),
    [
        ([Squares(2), Squares(0)], {}, "client 1 = 'no samples'"),
        ([Stream()], {}, r"client 0 = 'Stream'.*list\(dataset\)"),
        ([DataLoader(Stream())], {}, "client 0 = 'Stream'"),
        ([iter([])], {}, "list_iterator"),
        (Squares(3), {}, "clients = 'Squares'.*one entry per client"),
        ([Squares(3, lambda i: (torch.ones(i + 1), i))], {}, r"client 0\[0\].*\(1,\) and \(2,\).*pad"),
        ([Squares(3, lambda i: ("a word", i))], {}, r"client 0\[0\] = 'a word'.*numbers"),
        ([Squares(3, lambda i: torch.ones(2))], {}, "client 0.*one part"),
        ([Squares(3, lambda i: (1, 2) if i else (1, 2, 3))], {}, "client 0 sample 1.*structure of sample 0"),
        ([Squares(3)], {"targets": "label"}, "without keys.*inputs= and targets="),
        ([[{"x": 1, "label": 0}]], {"targets": "labels"}, "'labels'.*did you mean 'label'"),
        ([[{"x": 1, "z": 0}]], {}, "keys x, z.*targets="),
        ([[{"x": 1, "y": 0, "label": 0}]], {}, "targets="),
        ({"ann": Squares(2), "bob": Squares(0)}, {}, "client 'bob' = 'no samples'"),
        (
            [DataLoader(Squares(3), sampler=WeightedRandomSampler([1, 1, 9], 9))],
            {},
            "WeightedRandomSampler.*Subset",
        ),
        ([DataLoader(Squares(4), batch_sampler=[[0], [3]])], {}, "a DataLoader with a list"),
        ([Squares(2)], {"tests": [Squares(2), Squares(2)]}, "2 test sets"),
        ([Squares(2)], {"test": Squares(0)}, "test = 'no samples'"),
    ],
)
def test_data_sets_that_cannot_be_read_are_refused_with_advice(datasets, options, message):
    with pytest.raises(fg.InputError, match=message):
        fg.Federation.from_datasets(datasets, **options)


def test_loaders_that_visit_only_some_samples_are_not_taken_for_the_whole():
    whole = Squares(4)
    batches = BatchSampler(SubsetRandomSampler([3, 0]), 2, False)
    fed = fg.Federation.from_datasets(
        [
            DataLoader(whole, batch_sampler=batches),
            DataLoader(whole, batch_sampler=BatchSampler(SequentialSampler(whole), 3, False)),
            DataLoader(whole, sampler=RandomSampler(whole)),
        ]
    )
    assert [samples(fed, i)[1].tolist() for i in range(3)] == [[0, 9], [0, 1, 4, 9], [0, 1, 4, 9]]
    for sampler in (RandomSampler(whole, num_samples=2), RandomSampler(whole, True), SequentialSampler(range(2))):
        with pytest.raises(fg.InputError, match=r"DataLoader with a .*Sampler.*every sample once"):
            fg.Federation.from_datasets([DataLoader(whole, sampler=sampler)])


# Hugging Face and Flower


class Table:
    """As much of `datasets.Dataset` as is used: columns, formats, slices."""

    def __init__(self, columns, kind=None, made=None, decoded=None):
        self.columns, self.format, self.made = columns, {"type": kind}, made
        self.decoded = [] if decoded is None else decoded

    @property
    def column_names(self):
        return list(self.columns)

    def __len__(self):
        return len(next(iter(self.columns.values())))

    def with_format(self, kind):
        return Table(self.columns, kind, decoded=self.decoded)

    def with_transform(self, made):
        return Table(self.columns, "custom", made, decoded=self.decoded)

    def select_columns(self, names):
        return Table({name: self.columns[name] for name in names}, decoded=self.decoded)

    def __getitem__(self, key):
        assert isinstance(key, slice)
        self.decoded += list(self.columns)
        rows = {name: values[key] for name, values in self.columns.items()}
        if self.format["type"] == "custom":
            return self.made(rows)
        assert self.format["type"] == "numpy"
        return {name: self._array(values) for name, values in rows.items()}

    @staticmethod
    def _array(values):
        if len({np.shape(value) for value in values}) == 1:
            return np.array(values)
        ragged = np.empty(len(values), object)
        ragged[:] = [np.array(value) for value in values]
        return ragged


def partition(n=4):
    return Table({"image": [[i, i] for i in range(n)], "label": [i % 2 for i in range(n)]})


def test_hugging_face_data_sets_become_clients_column_by_column():
    fed = fg.Federation.from_datasets([partition(4), partition(2)], test=partition(3))
    assert fed.inputs.tolist() == [[0, 0], [1, 1], [2, 2], [3, 3], [0, 0], [1, 1]]
    assert fed.targets.tolist() == [0, 1, 0, 1, 0, 1]
    assert len(fed.test[0]) == 3


def test_only_the_named_columns_are_decoded():
    table = Table({"ids": [[1, 2]], "mask": [[1, 1]], "text": ["a word"], "stars": [3]})
    fed = fg.Federation.from_datasets([table], inputs=["ids", "mask"], targets="stars")
    assert list(fed.inputs) == ["ids", "mask"]
    assert table.decoded == ["ids", "mask", "stars"]
    with pytest.raises(fg.InputError, match=r"client 0 'text' = 'text'.*inputs="):
        fg.Federation.from_datasets([table], targets="stars")
    with pytest.raises(fg.InputError, match=r"'star'.*did you mean 'stars'"):
        fg.Federation.from_datasets([table], inputs="ids", targets="star")


def test_a_transform_that_the_user_set_on_a_table_is_kept():
    def scaled(rows):
        return {"pixels": [torch.tensor(x) / 2.0 for x in rows["image"]], "label": rows["label"]}

    fed = fg.Federation.from_datasets([partition(3).with_transform(scaled)])
    assert fed.inputs.tolist() == [[0.0, 0.0], [0.5, 0.5], [1.0, 1.0]]


def test_sentences_of_different_lengths_are_refused_with_advice_to_pad():
    table = Table({"input_ids": [[1, 2], [1, 2, 3]], "label": [0, 1]})
    with pytest.raises(fg.InputError, match=r"client 0 'input_ids'.*\(2,\) and \(3,\).*pad"):
        fg.Federation.from_datasets([table])


class Partitioner:
    """As much of a flwr-datasets partitioner as is used."""

    def __init__(self, sizes):
        self.sizes, self.num_partitions = sizes, len(sizes)

    def load_partition(self, number):
        return partition(self.sizes[number])


class FederatedDataset:
    """As much of flwr-datasets' FederatedDataset as is used; its partitioner gets its number at the first load."""

    def __init__(self, **partitioners):
        self.partitioners = partitioners

    def load_partition(self, number, split=None):
        (only,) = self.partitioners.values()
        only.num_partitions = len(only.sizes)
        return only.load_partition(number)


def test_flower_partitions_become_clients():
    assert fg.Federation.from_datasets(Partitioner([3, 1, 2])).sizes.tolist() == [3, 1, 2]
    late = Partitioner([2, 5])
    late.num_partitions = None
    assert fg.Federation.from_datasets(FederatedDataset(train=late)).sizes.tolist() == [2, 5]
    with pytest.raises(fg.InputError, match=r"splits train, test.*load_partition\(i, split\)"):
        fg.Federation.from_datasets(FederatedDataset(train=Partitioner([1]), test=Partitioner([1])))


def test_the_splits_of_one_data_set_are_not_taken_for_clients():
    class Splits(dict):
        column_names = ()

    with pytest.raises(fg.InputError, match=r"Splits of train, test.*splits of one"):
        fg.Federation.from_datasets(Splits(train=partition(), test=partition()))


@pytest.mark.skipif(importlib.util.find_spec("datasets") is None, reason="the package datasets is not installed")
def test_real_hugging_face_data_sets_become_clients():
    import datasets

    def make(n):
        return datasets.Dataset.from_dict({"x": [[float(i), 0.0] for i in range(n)], "label": list(range(n))})

    fed = fg.Federation.from_datasets([make(3), make(2).with_format("torch"), make(4).select([3, 1])])
    assert [samples(fed, i)[1].tolist() for i in range(3)] == [[0, 1, 2], [0, 1], [3, 1]]
    assert fed.inputs.shape == (7, 2)
    ragged = datasets.Dataset.from_dict({"x": [[1], [1, 2]], "label": [0, 1]})
    with pytest.raises(fg.InputError, match="pad"):
        fg.Federation.from_datasets([ragged])


# data frames


def frame():
    return pd.DataFrame(
        {
            "age": [30, 41, 35, 50, 22, 61],
            "who": ["bob", "ann", "bob", "eve", "ann", "bob"],
            "height": [1.7, 1.6, 1.8, 1.9, 1.5, 1.65],
            "member": [True, False, True, False, False, True],
            "buys": [1, 0, 0, 1, 1, 0],
        }
    )


def test_clients_of_a_data_frame_are_numbered_as_they_appear():
    fed = fg.Federation.from_pandas(frame(), client="who", target="buys")
    assert fed.names == ("bob", "ann", "eve")
    assert fed.inputs.dtype == torch.float32
    inputs, targets = samples(fed, 0)
    assert inputs.numpy() == pytest.approx(np.array([[30, 1.7, 1], [35, 1.8, 1], [61, 1.65, 1]]))
    assert targets.tolist() == [1, 0, 0]
    assert (fed.targets.dtype, fed.num_classes, fed.class_names) == (torch.int64, 2, None)
    chosen = fg.Federation.from_pandas(frame(), client="who", target="height", features=["member", "age"])
    assert samples(chosen, 1)[0].tolist() == [[0.0, 41.0], [0.0, 22.0]]
    assert chosen.targets.dtype == torch.float32


def test_words_as_targets_are_numbered_in_sorted_order_and_kept():
    table = frame().assign(buys=["tea", "milk", "tea", "cocoa", "milk", "tea"])
    fed = fg.Federation.from_pandas(table, client="who", target="buys", test=table.iloc[:2])
    assert fed.class_names == ("cocoa", "milk", "tea")
    assert samples(fed, 0)[1].tolist() == [2, 2, 2]
    assert fed.test[1].tolist() == [2, 1]
    assert fed.num_classes == 3
    wrong = table.iloc[:2].assign(buys=["tea", "gin"])
    with pytest.raises(fg.InputError, match=r"'buys' row 1 = 'gin'.*cocoa, milk, tea"):
        fg.Federation.from_pandas(table, client="who", target="buys", test=wrong)


def test_several_targets_and_missing_free_nullable_columns_work():
    table = frame().astype({"age": "Int64", "member": "boolean", "height": "Float64"})
    fed = fg.Federation.from_pandas(table, client="who", target=["age", "height"], features=["member", "buys"])
    assert fed.targets.shape == (6, 2)
    assert samples(fed, 2)[1].numpy() == pytest.approx(np.array([[50, 1.9]]))


def test_a_share_of_each_clients_rows_becomes_its_test_set():
    table = pd.DataFrame({"who": [3] * 20 + [1] * 10 + [2], "x": np.arange(31.0), "y": np.arange(31) % 2})
    fed = fg.Federation.from_pandas(table, client="who", target="y", test_share=0.3, seed=5)
    assert fed.names == ("3", "1", "2")
    assert fed.sizes.tolist() == [14, 7, 1]
    assert fed.tests.shares.sizes.tolist() == [6, 3, 0]
    assert sorted(fed.inputs[:, 0].tolist() + fed.test[0][:, 0].tolist()) == np.arange(31.0).tolist()
    again = fg.Federation.from_pandas(table, client="who", target="y", test_share=0.3, seed=5)
    other = fg.Federation.from_pandas(table, client="who", target="y", test_share=0.3, seed=6)
    assert torch.equal(fed.test[0], again.test[0])
    assert not torch.equal(fed.test[0], other.test[0])


def test_test_rows_go_to_their_clients_and_strangers_to_the_common_test_set():
    train, rows = frame(), frame().iloc[[1, 0, 4]]
    fed = fg.Federation.from_pandas(train, client="who", target="buys", test=rows)
    assert fed.tests.shares.sizes.tolist() == [1, 2, 0]
    assert fed.test[0] is fed.tests.inputs
    stranger = pd.concat([rows, rows.iloc[:1].assign(who="zoe")])
    fed = fg.Federation.from_pandas(train, client="who", target="buys", test=stranger)
    assert (fed.tests.shares.sizes.sum(), len(fed.test[0])) == (3, 4)
    nobody = rows.drop(columns="who")
    assert fg.Federation.from_pandas(train, client="who", target="buys", test=nobody).tests is None


@pytest.mark.parametrize(
    ("change", "options", "message"),
    [
        (lambda t: t.assign(city="Rome"), {}, "column 'city'.*features=.*get_dummies"),
        (lambda t: t.assign(day=pd.Timestamp("2020-01-01")), {}, "column 'day'.*datetime64"),
        (lambda t: t.assign(age=[1, 2, None, 4, 5, 6]), {}, "column 'age' = 'nan in row 2'"),
        (lambda t: t.assign(height=np.inf), {}, "column 'height' = 'inf in row 0'"),
        (lambda t: t.assign(buys=[1, 0, None, 1, 1, 1]), {}, "column 'buys' = 'nan in row 2'"),
        (lambda t: t.assign(buys=["a", "b", None, "b", "b", "b"]), {}, "column 'buys' row 2"),
        (lambda t: t.assign(who=["a", None, "a", "b", "b", "b"]), {}, "column 'who' = 'a missing value in row 1'"),
        (lambda t: t, {"client": "whom"}, "'whom'.*did you mean 'who'"),
        (lambda t: t, {"target": "buy"}, "'buy'.*did you mean 'buys'"),
        (lambda t: t, {"features": []}, "features"),
        (lambda t: t.iloc[:0], {}, "no rows"),
        (lambda t: pd.concat([t, t[["age"]]], axis=1), {}, "column = 'age'.*one column"),
        (lambda t: t, {"test_share": 1.5}, "test_share"),
        (lambda t: t, {"test_share": 0.5, "test": frame()}, "test_share"),
        (lambda t: t, {"test": frame().drop(columns="age")}, "'age'"),
    ],
)
def test_data_frames_that_cannot_be_used_are_refused_by_column(change, options, message):
    with pytest.raises(fg.InputError, match=message):
        fg.Federation.from_pandas(change(frame()), **{"client": "who", "target": "buys", **options})


def test_own_shares_may_name_clients():
    shares = StoredShares([np.array([0]), np.array([1, 2])], names=["x", "y"])
    assert fg.Federation(torch.zeros(3, 1), torch.zeros(3, dtype=torch.int64), shares).names == ("x", "y")
