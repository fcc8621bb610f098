"""The catalogue: the data sets that are read from files, with the size and SHA-256 of every file.

Sizes and hashes describe the decompressed content, because that is what a run depends on: two gzip files of the
same bytes differ in their headers. Only the standard library is imported.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from fedagrac.errors import one_of

__all__ = ["DATA_FILES", "DataFile", "DataSet", "Download", "data_set"]


@dataclass(frozen=True)
class DataFile:
    """One file of a data set.

    Attributes:
        path: its path in the data set's folder, with forward slashes.
        sha256: the hash of the decompressed content.
        size: the bytes of the decompressed content.
        compression: how the file is compressed on disk.
    """

    path: str
    sha256: str
    size: int
    compression: Literal["gzip"] | None = None


@dataclass(frozen=True)
class Download:
    """One official address and the files that it provides.

    Attributes:
        url: the address.
        targets: the paths of the data files; inside an archive the members have these names.
        size: the bytes to download, for display only.
        archive: how the files are packed; None if the address provides the one target itself.
    """

    url: str
    targets: tuple[str, ...]
    size: int
    archive: Literal["tar.gz"] | None = None


@dataclass(frozen=True)
class DataSet:
    """A data set that is not shipped with the package.

    Attributes:
        name: the name, also of its folder in a data root.
        title: a description in one line.
        files: all files of the data set.
        downloads: the addresses of the files.
        licence: the terms of use.
        homepage: the page that describes the data set.
        cites: the keys of its papers in `fedagrac.citations.ENTRIES`.
        elsewhere: folders outside the data roots where a distribution may have installed these files.

    Examples:
        >>> [file.path for file in DATA_FILES["a9a"].files]
        ['a9a', 'a9a.t']
    """

    name: str
    title: str
    files: tuple[DataFile, ...]
    downloads: tuple[Download, ...]
    licence: str
    homepage: str
    cites: tuple[str, ...]
    elsewhere: tuple[str, ...] = ()


def _a9a() -> DataSet:
    base = "https://www.csie.ntu.edu.tw/~cjlin/libsvmtools/datasets/binary/"
    files = (
        DataFile("a9a", "f5d5ffd8d865ff41328e7ee043e4b020816914ff6843ff15b98905ddbedce906", 2_329_875),
        DataFile("a9a.t", "1f448a153f0320399a7e40836eb207655b0bde0f21fc941cc472193daa9f5de9", 1_164_628),
    )
    return DataSet(
        name="a9a",
        title="census income (UCI Adult), 123 binary features, 2 classes; 32,561 + 16,281 samples",
        files=files,
        downloads=tuple(Download(base + file.path, (file.path,), file.size) for file in files),
        licence="CC BY 4.0 (UCI Adult, from which LIBSVM derived it)",
        homepage="https://www.csie.ntu.edu.tw/~cjlin/libsvmtools/datasets/binary.html#a9a",
        cites=("a9a",),
    )


def _fashion_mnist() -> DataSet:
    base = "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/"
    hashes = {
        "train-images-idx3-ubyte.gz": "c59f468a2f672dc815687fe0f83887768d799fd8a3f3276145d20f83aa44d888",
        "train-labels-idx1-ubyte.gz": "bad3541b69d912435c50bb6ba87bec294ff4f6a2e1246121d8633921760443d9",
        "t10k-images-idx3-ubyte.gz": "5b4141f0afbad91edebe8549f8fcffe087ea10ca49f1dbef5c9a5cd8815ce37b",
        "t10k-labels-idx1-ubyte.gz": "0402a96d92fd2663957122ceb108a494c5af83dab82d92729df917d7dec38c34",
    }
    sizes = (16 + 60_000 * 28 * 28, 8 + 60_000, 16 + 10_000 * 28 * 28, 8 + 10_000)  # idx headers and bytes
    packed = (26_421_880, 29_515, 4_422_102, 5_148)
    return DataSet(
        name="fashion-mnist",
        title="28x28 grey images of clothing, 10 classes; 60,000 + 10,000 samples",
        files=tuple(
            DataFile(name, sha256, size, "gzip")
            for (name, sha256), size in zip(hashes.items(), sizes, strict=True)
        ),
        downloads=tuple(Download(base + name, (name,), size) for name, size in zip(hashes, packed, strict=True)),
        licence="MIT (Zalando SE)",
        homepage="https://github.com/zalandoresearch/fashion-mnist",
        cites=("fashion-mnist",),
        elsewhere=("/usr/share/datasets/fashion-mnist",),
    )


def _cifar10() -> DataSet:
    hashes = {
        "data_batch_1": "cee916563c9f80d84e3cc88e17fdc0941787f1244f00a67874d45b261883ada5",
        "data_batch_2": "a591ca11fa1708a91ee40f54b3da4784ccd871ecf2137de63f51ada8b3fa57ed",
        "data_batch_3": "bbe8596564c0f86427f876058170b84dac6670ddf06d79402899d93ceea26f67",
        "data_batch_4": "014e562d6e23c72197cc727519169a60359f5eccd8945ad5a09d710285ff4e48",
        "data_batch_5": "755304fc0b379caeae8c14f0dac912fbc7d6cd469eb67a1029a08a39453a9add",
        "test_batch": "8e2eb146ae340b09e24670f29cabc6326dba54da8789dab6768acf480273f65b",
    }
    size = 10_000 * (1 + 3 * 32 * 32)  # a label byte and three colour planes
    files = tuple(DataFile(f"cifar-10-batches-bin/{name}.bin", sha256, size) for name, sha256 in hashes.items())
    # the binary release: the better known Python release consists of pickles, which can run code when read
    address = "https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz"
    return DataSet(
        name="cifar10",
        title="32x32 colour photographs, 10 classes; 50,000 + 10,000 samples",
        files=files,
        downloads=(Download(address, tuple(file.path for file in files), 170_052_171, "tar.gz"),),
        licence="none stated; research use, cite the report",
        homepage="https://www.cs.toronto.edu/~kriz/cifar.html",
        cites=("cifar10",),
    )


DATA_FILES: dict[str, DataSet] = {data.name: data for data in (_a9a(), _fashion_mnist(), _cifar10())}
"""The data sets that are read from files, by name."""


def data_set(data: str | DataSet) -> DataSet:
    """Return the data set of a name in `DATA_FILES`; a data set is returned as it is."""
    return data if isinstance(data, DataSet) else DATA_FILES[one_of("data set", data, DATA_FILES)]
