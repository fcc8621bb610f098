"""The samples of data sets that users bring: torch, Hugging Face and Flower, recognised by what they can do.

Every data set is read once, into arrays. A random transform in a data set would be drawn once and for all; give
such a transform to the federation, which draws it anew in every round.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    Subset,
    SubsetRandomSampler,
    TensorDataset,
    default_collate,
)

from fedagrac.data.arrays import Tree, flatten, rebuild
from fedagrac.errors import InputError, nearest

__all__ = ["by_client", "read_dataset", "read_datasets"]

TARGETS = ("label", "labels", "target", "targets", "y")
"""The keys of samples that are taken as the target if the user names none."""

Names = str | Sequence[str] | None


def by_client(field: str, values: Any) -> tuple[list[Any], list[Any] | None]:
    """Return one value per client, and the clients' names if a dict gives them.

    Accepts a list, a dict by client name, and an object with `load_partition`, such as those of flwr-datasets.

    Examples:
        >>> by_client("clients", {"ann": 1, "bob": 2})
        ([1, 2], ['ann', 'bob'])
    """
    if hasattr(values, "load_partition"):
        return _partitions(field, values), None
    if isinstance(values, Mapping):
        if hasattr(values, "column_names"):
            accepted = "the data sets of the clients, such as a list of partitions; these are the splits of one"
            raise InputError(field, f"{type(values).__name__} of {', '.join(map(str, values))}", accepted)
        return list(values.values()), list(values)
    if isinstance(values, Dataset | DataLoader | str) or not isinstance(values, Iterable):
        raise InputError(field, type(values).__name__, "a list or dict with one entry per client")
    return list(values), None


def read_datasets(field: str, sources: Any, inputs: Names = None, targets: Names = None) -> Any:
    """Return inputs and targets of the data set of every client, as a list, or as a dict if `sources` is one.

    A client whose data set is None gets None.
    """
    values, names = by_client(f"{field}s", sources)
    pairs = [
        None if source is None else read_dataset(f"{field} {label!r}", source, inputs, targets)
        for label, source in zip(names or range(len(values)), values, strict=True)
    ]
    return pairs if names is None else dict(zip(names, pairs, strict=True))


def _partitions(field: str, source: Any) -> list[Any]:
    """Return the partitions of a flwr-datasets partitioner, or of a federated data set with one partitioner."""
    partitioners = getattr(source, "partitioners", None)
    if partitioners is None:
        return [source.load_partition(i) for i in range(source.num_partitions)]
    if len(partitioners) != 1:
        accepted = "one partitioned split; of several give [fds.load_partition(i, split) for i in range(...)]"
        raise InputError(field, f"the splits {', '.join(partitioners)}", accepted)
    first = source.load_partition(
        0
    )  # also hands the data to the partitioner, which may not know its number before
    (partitioner,) = partitioners.values()
    return [first, *(source.load_partition(i) for i in range(1, partitioner.num_partitions))]


def read_dataset(field: str, source: Any, inputs: Names = None, targets: Names = None) -> tuple[Tree, Tree]:
    """Return the inputs and targets of all samples of a data set, in its order.

    Args:
        field: what messages call it.
        source: a torch `Dataset`, `Subset`, `TensorDataset` or `DataLoader`; a Hugging Face `Dataset`; or any
            sequence of samples (input, target), (input, input, ..., target) or dicts.
        inputs: the key of the input, where samples are dicts; a list of keys gives a dict; without it all keys
            that are not targets.
        targets: the key of the target, or keys; without it the one key called label, labels, target, targets or y.

    Examples:
        >>> read_dataset("client 0", TensorDataset(torch.zeros(2, 3), torch.tensor([0, 1])))[1]
        tensor([0, 1])
        >>> read_dataset("client 0", [{"ids": [1, 2], "mask": [1, 0], "label": 5}])[0]
        {'ids': array([[1, 2]]), 'mask': array([[1, 0]])}
    """
    if isinstance(source, DataLoader):
        return _read_loader(field, source, inputs, targets)
    if isinstance(source, IterableDataset) or not (hasattr(source, "__len__") and hasattr(source, "__getitem__")):
        accepted = "a data set with a length, whose samples can be read by number: list(dataset) is one"
        raise InputError(field, type(source).__name__, accepted)
    if not len(source):
        raise InputError(field, "no samples", "at least one sample")
    if hasattr(source, "column_names") and hasattr(source, "with_format"):
        return _divide(field, _read_columns(source, inputs, targets), inputs, targets)
    base, numbers = _base(source)
    if isinstance(base, TensorDataset) and type(base).__getitem__ is TensorDataset.__getitem__:
        chosen = slice(None) if numbers is None else torch.as_tensor(numbers)
        return _divide(field, tuple(tensor[chosen] for tensor in base.tensors), inputs, targets)
    positions = range(len(base)) if numbers is None else numbers
    return _divide(field, _stack(field, [base[int(i)] for i in positions]), inputs, targets)


def _base(source: Any) -> tuple[Any, Sequence[int] | None]:
    """Return the data set that subsets are parts of, and the numbers of their samples; None for all."""
    numbers: Sequence[int] | None = None
    while isinstance(source, Subset) and type(source).__getitem__ is Subset.__getitem__:
        own = list(source.indices)
        numbers = own if numbers is None else [own[i] for i in numbers]
        source = source.dataset
    return source, numbers


def _read_loader(field: str, loader: DataLoader[Any], inputs: Names, targets: Names) -> tuple[Tree, Tree]:
    """Read the data set behind a loader; a collate function of the user's makes one batch of all samples."""
    data, batches = loader.dataset, loader.batch_sampler
    if isinstance(data, IterableDataset):
        return read_dataset(field, data, inputs, targets)
    sampler: Any = batches.sampler if type(batches) is BatchSampler else batches or loader.sampler
    size = len(data)  # type: ignore[arg-type]
    if isinstance(sampler, SubsetRandomSampler):
        data = Subset(data, sorted(int(i) for i in sampler.indices))
    elif not (
        type(sampler) in (SequentialSampler, RandomSampler)
        and len(sampler) == size
        and not getattr(sampler, "replacement", False)
    ):
        kind = f"a DataLoader with a {type(sampler).__name__}"
        raise InputError(field, kind, "one that visits every sample once, or a torch Subset of the client's part")
    if loader.collate_fn is default_collate or loader.batch_size is None:
        return read_dataset(field, data, inputs, targets)
    whole = loader.collate_fn([data[i] for i in range(len(data))])  # type: ignore[arg-type]
    return _divide(field, tuple(whole) if isinstance(whole, list) else whole, inputs, targets)


def _read_columns(source: Any, inputs: Names, targets: Names) -> dict[str, Any]:
    """Return the columns of a Hugging Face data set, in its own format if it has one, else as NumPy arrays."""
    kind = (getattr(source, "format", None) or {}).get("type")
    if kind is None:
        named = [*_listed(inputs), *_listed(targets)] if inputs and targets else []
        if named and set(named) <= set(source.column_names) and hasattr(source, "select_columns"):
            source = source.select_columns(named)
        source = source.with_format("numpy")
    return dict(source[: len(source)])


def _divide(field: str, samples: Any, inputs: Names, targets: Names) -> tuple[Tree, Tree]:
    """Split what a data set returns into inputs and targets."""
    if isinstance(samples, Mapping):
        return _divide_keys(field, samples, inputs, targets)
    if inputs is not None or targets is not None:
        raise InputError(
            field, "samples without keys", "samples that are dicts, where inputs= and targets= name keys"
        )
    if not isinstance(samples, tuple) or len(samples) < 2:
        raise InputError(field, "samples of one part", "samples (input, target), or dicts with a target")
    return samples[0] if len(samples) == 2 else samples[:-1], samples[-1]


def _divide_keys(field: str, columns: Mapping[str, Any], inputs: Names, targets: Names) -> tuple[Tree, Tree]:
    known = ", ".join(map(str, columns))
    for name in (*_listed(inputs), *_listed(targets)):
        if name not in columns:
            raise InputError(f"{field} key", name, f"one of {known}{nearest(name, map(str, columns))}")
    if targets is None:
        likely = [name for name in TARGETS if name in columns]
        if len(likely) != 1:
            raise InputError(f"{field} targets", f"keys {known}", "one target: name it with targets=")
        targets = likely[0]
    if inputs is None:
        rest = [name for name in columns if name not in _listed(targets)]
        inputs = rest[0] if len(rest) == 1 else rest
    for name in (*_listed(inputs), *_listed(targets)):
        _check_column(f"{field} {name!r}", columns[name])
    return _chosen(columns, inputs), _chosen(columns, targets)


def _chosen(columns: Mapping[str, Any], names: str | Sequence[str]) -> Tree:
    return columns[names] if isinstance(names, str) else {name: columns[name] for name in names}


def _listed(names: Names) -> list[str]:
    return [names] if isinstance(names, str) else list(names or ())


def _check_column(field: str, column: Any) -> None:
    """Refuse text, and samples of different lengths, which NumPy holds as objects."""
    kind = getattr(getattr(column, "dtype", None), "kind", "")
    first = column[0] if kind == "O" and len(column) else None
    if kind in ("U", "S") or isinstance(first, str | bytes):
        raise InputError(field, "text", "numbers: turn text into numbers, or name the inputs with inputs=")
    if kind == "O":
        shapes = list(dict.fromkeys(np.shape(value) for value in column))
        _refuse_shapes(field, shapes[0], shapes[-1])


def _stack(field: str, samples: list[Any]) -> Any:
    """Return samples of one structure as one sample whose leaves are arrays [n, ...]."""
    head = samples[0]
    if isinstance(head, list):
        head, samples = tuple(head), [tuple(sample) for sample in samples]
    parts = [dict(_sample(sample)) for sample in samples]
    places = parts[0].keys()
    for i, part in enumerate(parts):
        if part.keys() != places:
            accepted = f"the structure of sample 0, {', '.join(places)}"
            raise InputError(f"{field} sample {i}", ", ".join(part), accepted)
    columns = {place: _column(f"{field}{place}", [part[place] for part in parts]) for place in places}
    return _restored(head, columns)


def _sample(sample: Any) -> dict[str, Any]:
    """Return the leaves of one sample by place; its outermost tuple or dict is always opened."""
    if isinstance(sample, Mapping):
        return {f"[{k!r}]{place}": leaf for k, part in sample.items() for place, leaf in flatten(part).items()}
    if isinstance(sample, tuple):
        return {f"[{k}]{place}": leaf for k, part in enumerate(sample) for place, leaf in flatten(part).items()}
    return {"": sample}


def _restored(sample: Any, columns: dict[str, Any]) -> Any:
    if isinstance(sample, Mapping):
        return {k: rebuild(part, columns, f"[{k!r}]") for k, part in sample.items()}
    if isinstance(sample, tuple):
        return tuple(rebuild(part, columns, f"[{k}]") for k, part in enumerate(sample))
    return columns[""]


def _column(field: str, values: list[Any]) -> Any:
    """Return the values of all samples as one array."""
    if any(isinstance(value, str | bytes) for value in values):
        raise InputError(field, values[0], "numbers: turn text into numbers, or name the inputs with inputs=")
    tensors = isinstance(values[0], torch.Tensor)
    arrays: list[Any] = values if tensors else [np.asarray(value) for value in values]
    for array in arrays:
        if np.shape(array) != arrays[0].shape:
            _refuse_shapes(field, arrays[0].shape, np.shape(array))
    return torch.stack(values) if tensors else np.stack(arrays)


def _refuse_shapes(field: str, first: Sequence[int], other: Sequence[int]) -> None:
    raise InputError(
        field,
        f"samples of shapes {tuple(first)} and {tuple(other)}",
        "one shape for all samples: pad or cut them to one length, and give a mask as a second input",
    )
