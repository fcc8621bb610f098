"""A federation: one pool of samples, and the share of every client.

The samples exist once; a client is a list of sample numbers. Weights are omega_i = n_i / n, or the user's.
"""

from __future__ import annotations

import copy
import inspect
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from fedagrac.core.streams import Purpose, stream
from fedagrac.data.arrays import Tree, as_pair, check_finite, check_like, is_tree, largest, pool
from fedagrac.data.datasets import by_client, read_dataset, read_datasets
from fedagrac.data.disk import DiskArray
from fedagrac.data.download import ready
from fedagrac.data.partitions import IID, Partition, Shares, StoredShares, held_out
from fedagrac.data.pictures import Images
from fedagrac.data.shakespeare import shakespeare
from fedagrac.data.sources import Samples, a9a, cifar10, digits, fashion_mnist, synthetic
from fedagrac.data.tables import Table, split_clients
from fedagrac.data.trees import leaves, map_leaves, named_leaves, num_samples
from fedagrac.errors import MOST_CLIENTS, InputError, count, fraction, nearest, one_of, unknown

if TYPE_CHECKING:
    import numpy.typing as npt
    import pandas as pd
    from matplotlib.figure import Figure

__all__ = ["DATASETS", "ClientTests", "Federation", "Transform"]

Transform = Callable[[Tree, torch.Generator], Tree]
"""(the stored inputs of a client's batch, a generator keyed by seed, round and client) -> inputs.

Bytes of pictures are normalised afterwards.
"""

READERS = {"a9a": a9a, "fashion-mnist": fashion_mnist, "cifar10": cifar10}
"""The readers of the data sets that are read from files, by name."""

NATURAL: dict[str, Callable[..., Samples]] = {"synthetic": synthetic, "shakespeare": shakespeare}
"""The data sets that are split by nature, client by client; their readers take options."""

DATASETS = (*READERS, "digits", *NATURAL)
"""The names that `Federation.load` accepts."""


@dataclass(frozen=True, eq=False)
class ClientTests:
    """The test sets of the clients, pooled.

    Attributes:
        inputs, targets: the samples of all test sets, in the order of the clients.
        shares: each client's sample numbers in them; a client without test samples has none.

    Examples:
        >>> pair = ([[0.0], [1.0]], [0, 1])
        >>> tests = Federation.from_arrays([pair, pair], tests=[pair, None]).tests
        >>> tests.shares.sizes.tolist()
        [2, 0]
    """

    inputs: Tree
    targets: Tree
    shares: Shares


class Federation:
    """M clients and their data.

    Attributes:
        name: the name in tables and run folders.
        cites: the keys of its papers in `fedagrac.citations.ENTRIES`.
        inputs, targets: the pooled training samples, [n, ...] each; a tensor or `DiskArray`, or a tuple or dict of
            them. Pictures stay bytes, integers stay integers.
        images: how bytes become inputs, or None.
        transform: what every training batch goes through, or None.
        test: the test inputs and targets, or None.
        tests: the clients' own test sets, or None.
        validation: the samples of each client that are held out of training, or None.
        sizes: n_i, the training samples of each client, [M].
        weights: omega_i, [M], summing to 1.
        masses: the exact weights before normalisation: sample counts, or the user's weights as fractions.
        class_names: the names of the classes, or None.

    Examples:
        >>> fed = Federation.from_arrays([([[0.0], [1.0]], [0, 1]), ([[2.0]], [1])])
        >>> fed.num_clients, fed.sizes.tolist()
        (2, [2, 1])
    """

    def __init__(
        self,
        inputs: Tree,
        targets: Tree,
        shares: Shares,
        test: tuple[Tree, Tree] | None = None,
        weights: Sequence[float] | npt.NDArray[np.float64] | None = None,
        name: str = "custom",
        cites: tuple[str, ...] = (),
        images: Images | None = None,
        names: Sequence[str] | None = None,
        tests: ClientTests | None = None,
        transform: Transform | None = None,
        class_names: Sequence[str] | None = None,
    ) -> None:
        if test is None and tests is not None:
            test = (tests.inputs, tests.targets)
        self.name, self.cites, self.images, self.transform = name, cites, images, transform
        self.inputs, self.targets, self.test, self.tests = inputs, targets, test, tests
        self.class_names = None if class_names is None else tuple(class_names)
        self.validation: Shares | None = None
        self._set_shares(shares, weights)
        self._names: Sequence[object] | npt.NDArray[Any] | None = _checked_names(names, self.num_clients)
        _check_samples(inputs, targets, test, tests)
        if tests is not None and len(tests.shares.sizes) != self.num_clients:
            raise InputError(
                "tests", f"{len(tests.shares.sizes)} test sets", f"one for each of {self.num_clients}"
            )
        if images is not None:
            _check_pictures(images, inputs)
        if transform is not None and not callable(transform):
            raise InputError("transform", transform, "a function (inputs, generator) -> inputs")

    def _set_shares(self, shares: Shares, weights: Any) -> None:
        self.shares, self.sizes, self._given_weights = shares, shares.sizes, weights
        if not len(self.sizes):
            raise InputError("clients", 0, "at least one client")
        if self.sizes.min() == 0:
            raise InputError(f"client {self.sizes.argmin()}", "no samples", "at least one sample per client")
        self.masses: Sequence[int | Fraction] = self.sizes.tolist()
        self.weights = self.sizes / self.sizes.sum()
        if weights is not None:
            self.masses = _exact_weights(weights, len(self.sizes))
            total = sum(self.masses)
            self.weights = np.array([float(mass / total) for mass in self.masses])

    @property
    def num_clients(self) -> int:
        """M."""
        return len(self.sizes)

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the clients; without names of their own their numbers."""
        return tuple(map(self.name_of, range(self.num_clients)))

    @property
    def has_names(self) -> bool:
        """Whether clients have names of their own."""
        return self._known_names is not None

    def name_of(self, client: int) -> str:
        """Return the client's name.

        Examples:
            >>> Federation.from_arrays({"ann": ([[0.0]], [1]), "bob": ([[1.0]], [0])}).name_of(1)
            'bob'
        """
        known = self._known_names
        return str(client if known is None else known[client])

    def known_name(self, client: int) -> str | None:
        """Return the client's own name, or None if clients have only numbers."""
        return self.name_of(client) if self.has_names else None

    @property
    def _known_names(self) -> Sequence[object] | npt.NDArray[Any] | None:
        if self._names is None and isinstance(self.shares, StoredShares):
            return self.shares.names
        return self._names

    @property
    def num_classes(self) -> int | None:
        """The number of classes, or None if targets are not labels; negative labels, such as -100, are padding."""
        if self.class_names is not None:
            return len(self.class_names)
        labels = [self.targets, *([self.test[1]] if self.test else [])]
        if any(is_tree(part) or part.dtype != torch.int64 for part in labels):
            return None
        return max(0, 1 + max(map(largest, labels)))

    def samples_of(self, client: int) -> npt.NDArray[np.int64]:
        """Return the client's sample numbers in the pool, without those held out for validation."""
        return self.shares[client]

    def split_validation(self, share: float, seed: int = 0) -> Federation:
        """Return a federation that holds out a share of every client's training samples for validation.

        A client keeps at least one sample to train on. The draw is keyed by the seed and the client. A sample that
        a client holds several times, as with `Resample`, is held out as a whole. Weights follow the samples that
        remain, unless they were given.

        Examples:
            >>> fed = Federation.from_arrays([([[0.0]] * 10, [0] * 10), ([[1.0]], [1])])
            >>> split = fed.split_validation(0.2)
            >>> split.sizes.tolist(), split.validation.sizes.tolist()
            ([8, 1], [2, 0])
        """
        if not fraction("share", share) < 1:
            raise InputError("share", share, "a fraction below 1")
        count("seed", seed, least=0)
        if self.validation is not None:
            raise InputError("split_validation", "a federation with a validation split", "one without")
        kept, held = [], []
        for client in range(self.num_clients):
            samples = self.samples_of(client)
            distinct = np.unique(samples)
            generator = stream(seed, Purpose.VALIDATION, client=client)
            held.append(distinct[held_out(len(distinct), share, generator)])
            kept.append(samples[~np.isin(samples, held[-1])])
        other = copy.copy(self)
        other._names = self._known_names
        other._set_shares(StoredShares(kept), self._given_weights)
        other.validation = StoredShares(held)
        return other

    def __repr__(self) -> str:
        shapes = map_leaves(lambda leaf: tuple(leaf.shape[1:]), self.inputs)
        known = self._known_names
        few = "" if known is None else f" ({', '.join(map(str, itertools.islice(known, 3)))}"
        if known is not None:
            few += ", ...)" if self.num_clients > 3 else ")"
        parts = [
            f"{self.num_clients} clients{few}",
            f"{self.sizes.sum()} samples of shape {shapes}",
            f"{self.sizes.min()} to {self.sizes.max()} each",
        ]
        if self.validation is not None:
            parts.append(f"{self.validation.sizes.sum()} for validation")
        if self.tests is not None:
            parts.append("a test set per client")
        if any(isinstance(leaf, DiskArray) for leaf in leaves(self.inputs)):
            parts.append("on disk")
        return f"Federation({self.name!r}, {', '.join(parts)})"

    @classmethod
    def from_arrays(
        cls,
        clients: Sequence[tuple[Any, Any]] | Mapping[str, tuple[Any, Any]],
        test: tuple[Any, Any] | None = None,
        weights: Sequence[float] | npt.NDArray[np.float64] | None = None,
        name: str = "custom",
        names: Sequence[str] | None = None,
        tests: Sequence[tuple[Any, Any] | None] | Mapping[str, tuple[Any, Any] | None] | None = None,
        images: Images | None = None,
        transform: Transform | None = None,
        class_names: Sequence[str] | None = None,
    ) -> Federation:
        """Make a federation from each client's (inputs, targets), which may be anything that becomes a tensor.

        Integer targets are class labels 0..C-1; floating-point targets are regression targets. All clients have
        samples of one structure, shape and type. A `numpy.memmap` or `DiskArray` stays on disk.

        Args:
            clients: one (inputs, targets) per client, as a list, or as a dict by client name. Inputs are one
                array, or a tuple or dict of arrays.
            test: (inputs, targets) of a test set for all; by default the test sets of the clients together.
            weights: positive, summing to 1; without them a client's weight is its share of the samples.
            name: the name in tables and run folders.
            names: a name for each client.
            tests: one (inputs, targets) per client, or None for a client without a test set; a list, or a dict by
                client name.
            images: how bytes become pictures.
            transform: (inputs of a client's batch, torch.Generator) -> inputs, in training.
            class_names: the names of the classes 0, 1, ...

        Examples:
            >>> pair = ({"ids": [[1, 2]], "mask": [[1, 0]]}, [0])
            >>> Federation.from_arrays({"ann": pair, "bob": pair})
            Federation('custom', 2 clients (ann, bob), 2 samples of shape {'ids': (2,), 'mask': (2,)}, 1 to 1 each)
        """
        pairs, own = by_client("clients", clients)
        if not pairs:
            raise InputError("clients", [], "at least one (inputs, targets) pair")
        names = _checked_names(own if names is None else names, len(pairs))
        fields = [f"client {i}" if names is None else f"client {names[i]!r}" for i in range(len(pairs))]
        inputs, targets, sizes = pool(list(zip(fields, pairs, strict=True)))
        return cls(
            inputs,
            targets,
            _in_order(sizes),
            None if test is None else as_pair("test", test, like=(inputs, targets)),
            weights,
            name,
            images=images,
            names=names,
            tests=None if tests is None else _client_tests(tests, names, len(pairs)),
            transform=transform,
            class_names=class_names,
        )

    @classmethod
    def from_pool(
        cls,
        inputs: Any,
        targets: Any,
        clients: int,
        partition: Partition,
        test: tuple[Any, Any] | None = None,
        seed: int = 0,
        name: str = "custom",
        images: Images | None = None,
        transform: Transform | None = None,
    ) -> Federation:
        """Split a data set of your own over clients by a partition.

        Inputs may be a tuple or dict of arrays. A `numpy.memmap` or `DiskArray` stays on disk.

        Examples:
            >>> from fedagrac import Natural
            >>> fed = Federation.from_pool([[0.0], [1.0], [2.0]], [0, 1, 1], 2, Natural(["ann", "bob", "ann"]))
            >>> fed.sizes.tolist(), fed.names
            ([2, 1], ('ann', 'bob'))
        """
        X, y = as_pair("pool", (inputs, targets))
        _check_partition(partition)
        shares = partition.split(_labels(y), clients, count("seed", seed, least=0))
        both = None if test is None else as_pair("test", test, like=(X, y))
        return cls(X, y, shares, both, None, name, images=images, transform=transform)

    @classmethod
    def from_datasets(
        cls,
        datasets: Any,
        test: Any = None,
        weights: Sequence[float] | npt.NDArray[np.float64] | None = None,
        name: str = "custom",
        names: Sequence[str] | None = None,
        tests: Any = None,
        inputs: str | Sequence[str] | None = None,
        targets: str | Sequence[str] | None = None,
        images: Images | None = None,
        transform: Transform | None = None,
    ) -> Federation:
        """Make a federation from each client's data set.

        Every data set is read once into memory. So its own random transforms are drawn once: use `transform`.

        Args:
            datasets: one per client, as a list, or as a dict by client name: torch `Dataset`, `Subset` or
                `DataLoader` (its data set is read, whatever its batches), Hugging Face `datasets.Dataset`, or a
                list of samples. Also a partitioner or `FederatedDataset` of flwr-datasets.
            test: a data set to test on; by default the clients' test sets together.
            weights: as in `from_arrays`.
            name: the name in tables and run folders.
            names: a name for each client.
            tests: one data set per client, or None for a client without one; a list, or a dict by client name.
            inputs: where samples are dicts, the key of the inputs; a list of keys gives a dict; by default all
                keys that are not targets.
            targets: the key or keys of the targets; by default label, labels, target, targets or y.
            images: how bytes become pictures.
            transform: (inputs of a client's batch, torch.Generator) -> inputs, in training.

        Examples:
            >>> from torch.utils.data import TensorDataset, random_split
            >>> whole = TensorDataset(torch.arange(10.0)[:, None], torch.arange(10) % 2)
            >>> Federation.from_datasets(random_split(whole, [7, 3])).sizes.tolist()
            [7, 3]
        """
        return cls.from_arrays(
            clients=read_datasets("client", datasets, inputs, targets),
            test=None if test is None else read_dataset("test", test, inputs, targets),
            weights=weights,
            name=name,
            names=names,
            tests=None if tests is None else read_datasets("test of client", tests, inputs, targets),
            images=images,
            transform=transform,
        )

    @classmethod
    def from_pandas(
        cls,
        frame: pd.DataFrame,
        client: str,
        target: str | Sequence[str],
        features: Sequence[str] | None = None,
        test: pd.DataFrame | None = None,
        test_share: float = 0.0,
        seed: int = 0,
        weights: Sequence[float] | npt.NDArray[np.float64] | None = None,
        name: str = "custom",
        transform: Transform | None = None,
    ) -> Federation:
        """Make a federation from a data frame with a row per sample and a column that names the client.

        Clients are numbered in the order in which they first appear. Feature columns must be numeric or boolean
        and become one float32 matrix. Integer and boolean targets are class labels, floating-point ones regression
        targets. Text and categories are numbered in sorted order; `class_names` keeps them.

        Args:
            frame: the samples.
            client: the column of the client.
            target: the column of the target; a list of columns for several regression targets.
            features: the columns of the inputs; all others by default, in the order of the frame.
            test: a data frame of test samples. If it has the client column, each client gets its own test set.
            test_share: a share of every client's rows that becomes its test set; a client keeps at least one row.
            seed: the seed of that draw.
            weights: as in `from_arrays`.
            name: the name in tables and run folders.
            transform: (inputs of a client's batch, torch.Generator) -> inputs, in training.

        Examples:
            >>> import pandas as pd
            >>> table = {"who": ["bob", "ann", "bob"], "age": [30, 41, 35], "buys": ["no", "yes", "no"]}
            >>> frame = pd.DataFrame(table)
            >>> fed = Federation.from_pandas(frame, client="who", target="buys")
            >>> fed.names, fed.targets.tolist(), fed.class_names
            (('bob', 'ann'), [0, 0, 1], ('no', 'yes'))
        """
        table = Table.of(frame, client, target, features)
        clients: Any = table.clients(frame)
        tests: Any = None
        whole = None
        if test_share:
            if test is not None:
                raise InputError("test_share", test_share, "0 where test is given")
            clients, tests = split_clients(
                clients, fraction("test_share", test_share), count("seed", seed, least=0)
            )
        elif test is not None and client in test.columns:
            own = table.clients(test)
            tests = {key: pair for key, pair in own.items() if key in clients}
            whole = None if len(tests) == len(own) else table.pair(test)
        elif test is not None:
            whole = table.pair(test)
        classes = None if table.classes is None else [str(label) for label in table.classes]
        return cls.from_arrays(
            clients, whole, weights, name, tests=tests or None, transform=transform, class_names=classes
        )

    @classmethod
    def load(
        cls,
        name: str,
        clients: int | None = 20,
        partition: Partition | None = None,
        seed: int = 0,
        data_dir: str | Path | None = None,
        **options: Any,
    ) -> Federation:
        """Load a built-in data set and split it over clients.

        Args:
            name: a9a, fashion-mnist, cifar10, digits, synthetic or shakespeare.
            clients: M; of shakespeare, None for all roles.
            partition: how to split; IID by default. Synthetic and shakespeare are split by client and take none.
            seed: the seed of the partition, of synthetic's samples, and of the choice of shakespeare's roles.
            data_dir: a folder to search for files before the usual ones.
            options: alpha and beta of synthetic; least, stride and test_stride of shakespeare.

        Examples:
            >>> Federation.load("digits", clients=5, seed=0)
            Federation('digits', 5 clients, 1437 samples of shape (64,), 287 to 288 each)
        """
        one_of("name", name, DATASETS)
        if clients is None and name != "shakespeare":
            raise InputError("clients", None, f"a number: {name} does not say how many clients there are")
        number = count("clients", 1 if clients is None else clients, most=MOST_CLIENTS)
        count("seed", seed, least=0)
        fixed = ("folder", "clients", "seed")
        reader = NATURAL.get(name)
        allowed = [key for key in inspect.signature(reader).parameters if key not in fixed] if reader else []
        for key, value in options.items():
            if key not in allowed:
                raise unknown(f"{name}.{key}", value, allowed)
        if partition is not None:
            _check_partition(partition)
        if reader and partition is not None:
            raise InputError("partition", partition, f"none: {name} is split by nature, client by client")
        if name == "synthetic":
            samples = synthetic(number, seed=seed, **options)
        elif name == "shakespeare":
            samples = shakespeare(ready(name, data_dir), clients, seed=seed, **options)
        elif name == "digits":
            samples = digits()
        else:
            samples = READERS[name](ready(name, data_dir))
        return cls._of_samples(name, samples, lambda labels: (partition or IID()).split(labels, number, seed))

    @classmethod
    def _of_samples(
        cls, name: str, samples: Samples, split: Callable[[npt.NDArray[np.int64]], Shares]
    ) -> Federation:
        """Return the federation of a built-in data set; `split` shares samples that nature has not split."""
        inputs, targets = map(torch.from_numpy, samples.train)
        test = (torch.from_numpy(samples.test[0]), torch.from_numpy(samples.test[1]))
        return cls(
            inputs,
            targets,
            split(samples.train[1]) if samples.natural is None else StoredShares(samples.natural),
            test,
            None,
            name,
            (name,),
            samples.images,
            samples.names,
            None if samples.tests is None else ClientTests(*test, StoredShares(samples.tests)),
        )

    def plot(self) -> Figure:
        """Draw the labels of every client: one column per client, one row per class, area by sample count."""
        from fedagrac.data.plot import plot_federation

        return plot_federation(self)


def _check_partition(partition: Any) -> None:
    if not isinstance(partition, Partition):
        raise InputError("partition", partition, "a partition such as Dirichlet(0.3), Shards(5) or IID()")


def _labels(targets: Tree) -> npt.NDArray[np.int64]:
    """Return the labels for a partition; if targets are not class labels, all samples are of one class."""
    if isinstance(targets, torch.Tensor) and targets.dtype == torch.int64 and targets.ndim == 1:
        return targets.cpu().numpy()
    return np.zeros(num_samples(targets), np.int64)


def _in_order(sizes: Sequence[int]) -> StoredShares:
    """Return shares of samples that are pooled in the order of the clients."""
    return StoredShares(np.split(np.arange(sum(sizes)), np.cumsum(sizes)[:-1]))


def _checked_names(names: Sequence[Any] | None, clients: int) -> tuple[str, ...] | None:
    """Check that names are unique strings, one per client. Return them."""
    if names is None:
        return None
    if isinstance(names, str) or len(names) != clients:
        raise InputError("names", names, f"one name for each of {clients} clients")
    seen: set[str] = set()
    for name in names:
        if not isinstance(name, str) or not name:
            raise InputError("names", name, "strings that are not empty")
        if name in seen:
            raise InputError("names", name, "a different name for every client")
        seen.add(name)
    return tuple(names)


def _client_tests(tests: Any, names: Sequence[str] | None, clients: int) -> ClientTests | None:
    """Pool the clients' test sets, given as a list or as a dict by client name."""
    pairs, own = by_client("tests", tests)
    if own is not None:
        known = names or []
        for name in own:
            if name not in known:
                accepted = f"a client{nearest(name, known)}" if known else "a list: the clients have no names"
                raise InputError("tests", name, accepted)
        pairs = [tests.get(name) for name in known]
    if len(pairs) != clients:
        raise InputError("tests", f"{len(pairs)} test sets", f"one for each of {clients} clients, or None for it")
    given = [(f"test of client {names[i] if names else i}", p) for i, p in enumerate(pairs) if p is not None]
    if not given:
        return None
    inputs, targets, found = pool(given)
    sizes = iter(found)
    return ClientTests(inputs, targets, _in_order([0 if pair is None else next(sizes) for pair in pairs]))


def _check_samples(inputs: Tree, targets: Tree, test: tuple[Tree, Tree] | None, tests: ClientTests | None) -> None:
    """Refuse NaN, infinity, and test samples unlike the training samples."""
    parts = [("inputs", inputs), ("targets", targets)]
    samples = num_samples(inputs)
    for field, leaf in (named for part in parts for named in named_leaves(*part)):
        if len(leaf) != samples:
            raise InputError(field, f"{len(leaf)} samples", f"as many as inputs, {samples}")
    both = [("test", test)] if test is not None else []
    if tests is not None and (test is None or test[0] is not tests.inputs):
        both.append(("tests", (tests.inputs, tests.targets)))
    for field, (X, y) in both:
        check_like(f"{field} inputs", X, inputs, "the training samples")
        check_like(f"{field} targets", y, targets, "the training samples")
        parts += [(f"{field} inputs", X), (f"{field} targets", y)]
    for field, tree in parts:
        check_finite(field, tree)


def _check_pictures(images: Any, inputs: Tree) -> None:
    """Refuse `images` where no input is a stored picture."""
    if not isinstance(images, Images):
        raise InputError("images", images, "Images(mean, std, padding)")
    channels = len(images.mean)
    shapes = [tuple(leaf.shape) for leaf in leaves(inputs) if leaf.dtype == torch.uint8]
    if not any(len(shape) == 4 and shape[1] == channels for shape in shapes):
        value = [(tuple(leaf.shape), leaf.dtype) for leaf in leaves(inputs)]
        raise InputError("inputs", value, f"bytes (uint8) of shape [n, {channels}, height, width] for images")


def _exact_weights(weights: Any, clients: int) -> tuple[Fraction, ...]:
    values = np.asarray(weights, dtype=np.float64)
    if values.shape != (clients,):
        raise InputError("weights", weights, f"one weight for each of {clients} clients")
    if not np.isfinite(values).all() or (values <= 0).any():
        raise InputError("weights", weights, "weights above 0")
    if abs(values.sum() - 1) > 1e-6:
        raise InputError("weights", f"a sum of {values.sum():.6g}", "a sum of 1 (divide the weights by their sum)")
    return tuple(Fraction(float(v)) for v in values)
