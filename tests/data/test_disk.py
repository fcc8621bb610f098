"""Arrays that stay on disk: the right rows, few reads, no memory, and damaged files refused."""

import copy
import json
import os
import pickle
import subprocess
import sys

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

import fedagrac as fg
from fedagrac.data.disk import DiskArray

RNG = np.random.default_rng(0)
PICTURES = RNG.integers(0, 256, (60, 3, 4, 4), dtype=np.uint8)


@pytest.fixture
def pictures(tmp_path):
    np.save(tmp_path / "pictures.npy", PICTURES)
    return tmp_path / "pictures.npy"


@pytest.fixture
def reads(monkeypatch):
    """The reads that happen, as (position, bytes)."""
    seen, real = [], os.preadv

    def counted(file, buffers, position):
        seen.append((position, len(buffers[0])))
        return real(file, buffers, position)

    monkeypatch.setattr(os, "preadv", counted)
    return seen


numbers = st.lists(st.integers(0, 59), max_size=100).map(lambda rows: np.array(rows, np.int64))
SHARED = {}


@settings(max_examples=60, deadline=None)
@given(numbers, st.sampled_from(["uint8", "int16", "uint16", "float32", "float64", ">f4", ">i8", "bool"]))
def test_gather_returns_the_rows_that_numpy_would(tmp_path_factory, rows, kind):
    if kind not in SHARED:
        values = (RNG.random((60, 5)) * 200).astype(kind)
        path = tmp_path_factory.mktemp("kinds") / "values.npy"
        np.save(path, values)
        SHARED[kind] = values, DiskArray.open(path)
    values, array = SHARED[kind]
    found = array.gather(rows)
    assert found.dtype == array.dtype
    assert np.array_equal(found.numpy(), values[rows].astype(values.dtype.newbyteorder("=")))


def test_types_stay_as_stored_unless_torch_cannot_compute_with_them(tmp_path):
    found = {}
    for kind in ("uint8", "int8", "float16", "uint16", "uint32", "bool"):
        np.save(tmp_path / "a.npy", np.ones((2, 2), kind))
        found[kind] = DiskArray.open(tmp_path / "a.npy").dtype
    assert found == {
        "uint8": torch.uint8, "int8": torch.int8, "float16": torch.float16, "uint16": torch.int32,
        "uint32": torch.int64, "bool": torch.bool,
    }  # fmt: skip


def test_parts_of_a_memory_map_begin_where_they_begin(tmp_path):
    """The `offset` of a part is that of the whole map, so it must come from the addresses."""
    values = np.arange(6000, dtype=np.int32).reshape(2000, 3)
    (tmp_path / "raw").write_bytes(b"x" * 5003 + values.tobytes())
    whole = np.memmap(tmp_path / "raw", np.int32, "r", offset=5003, shape=values.shape)
    for part, expected in ((whole, values), (whole[700:], values[700:]), (whole[100:900][50:60], values[150:160])):
        assert torch.equal(DiskArray.from_memmap(part)[:], torch.from_numpy(expected))
    assert DiskArray.from_memmap(np.asarray(whole)[3:5])[0].tolist() == [9, 10, 11]  # a view without the class


def test_rows_can_be_taken_like_those_of_a_tensor(pictures):
    array, tensor = DiskArray.open(pictures), torch.from_numpy(PICTURES)
    mask = torch.zeros(60, dtype=torch.bool)
    mask[[5, 9]] = True
    for key in (3, -1, slice(4, 50, 7), torch.tensor([[1, 2], [5, 5]]), [0, -2], mask):
        assert torch.equal(array[key], tensor[key])
    assert (len(array), array.ndim, array.nbytes, array.is_floating_point()) == (60, 4, 60 * 48, False)
    assert repr(array) == "DiskArray((60, 3, 4, 4), torch.uint8, 2,880 bytes in 1 file(s))"


def test_neighbouring_rows_are_read_together_and_repeated_rows_once(tmp_path, reads):
    values = RNG.random((100, 1250)).astype(np.float32)  # rows of 5,000 bytes: more than a page
    np.save(tmp_path / "rows.npy", values)
    array = DiskArray.open(tmp_path / "rows.npy")
    found = array.gather(np.array([41, 7, 40, 7, 42, 90, 7]))
    assert np.array_equal(found.numpy(), values[[41, 7, 40, 7, 42, 90, 7]])
    assert [size for _, size in reads] == [5000, 3 * 5000, 5000]
    assert [position for position, _ in reads] == sorted(position for position, _ in reads)


def test_small_rows_on_the_same_pages_are_read_together(tmp_path, reads):
    values = np.arange(100_000, dtype=np.int64)[:, None]
    np.save(tmp_path / "rows.npy", values)
    rows = np.array([9, 400, 0, 99_999, 99_900])
    assert DiskArray.open(tmp_path / "rows.npy").gather(rows)[:, 0].tolist() == rows.tolist()
    assert [size for _, size in reads] == [401 * 8, 100 * 8]


def test_rows_ahead_are_announced_to_the_system_and_not_read_by_the_process(pictures, reads, monkeypatch):
    array, announced = DiskArray.open(pictures), []
    monkeypatch.setattr(os, "posix_fadvise", lambda file, *place: announced.append(place))
    rows = np.array([5, 2, 5, 59])
    array.ahead(rows)
    assert reads == []
    first = 128  # the header of a small .npy file
    assert [place[:2] for place in announced] == [(first + 2 * 48, 58 * 48)]  # the whole file is one page
    assert {place[2] for place in announced} == {os.POSIX_FADV_WILLNEED}
    assert torch.equal(array.gather(rows), torch.from_numpy(PICTURES[rows]))


def test_every_read_of_a_batch_is_announced_before_the_first(tmp_path, monkeypatch):
    np.save(tmp_path / "rows.npy", np.zeros((50, 5000), np.uint8))
    order, read, announce = [], os.preadv, os.posix_fadvise
    monkeypatch.setattr(os, "preadv", lambda *arguments: order.append("read") or read(*arguments))
    monkeypatch.setattr(os, "posix_fadvise", lambda *arguments: order.append("announce") or announce(*arguments))
    DiskArray.open(tmp_path / "rows.npy").gather(np.array([40, 3, 20]))
    assert order == ["announce"] * 3 + ["read"] * 3


def test_without_that_system_call_ahead_does_nothing(pictures, monkeypatch):
    monkeypatch.delattr(os, "posix_fadvise")
    array = DiskArray.open(pictures)
    array.ahead(np.array([7]))
    assert torch.equal(array[7], torch.from_numpy(PICTURES[7]))


def test_rows_outside_the_array_are_refused(pictures):
    array = DiskArray.open(pictures)
    for read in (array.ahead, array.gather):
        with pytest.raises(fg.InputError, match=r"0 to 60.*from 0 to 59"):
            read(np.array([0, 60]))
        with pytest.raises(fg.InputError, match="-1 to 3"):
            read(np.array([-1, 3]))


def test_a_file_that_became_shorter_is_named(pictures):
    array = DiskArray.open(pictures)
    os.truncate(pictures, 1000)
    assert array.gather(np.array([0])).shape == (1, 3, 4, 4)
    with pytest.raises(fg.InputError, match=r"pictures.npy.*1,000 bytes.*shorter"):
        array.gather(np.array([59]))


def test_copies_read_the_same_rows(pictures):
    array = DiskArray.open(pictures)
    array.ahead(np.array([1]))
    for other in (pickle.loads(pickle.dumps(array)), copy.deepcopy(array)):
        assert torch.equal(other[7], torch.from_numpy(PICTURES[7]))


def test_many_files_are_one_array_and_few_are_open(tmp_path):
    for i in range(100):
        np.save(tmp_path / f"{i}.npy", np.full((2, 3), i, np.float32))
    array = DiskArray.join("inputs", [DiskArray.open(tmp_path / f"{i}.npy") for i in range(100)])
    before = len(os.listdir("/proc/self/fd"))
    assert array[:][:, 0].tolist() == [i // 2 for i in range(200)]
    assert len(os.listdir("/proc/self/fd")) - before <= 64


def test_safetensors_are_read_in_place(tmp_path):
    tensors = {
        "pixels": torch.from_numpy(PICTURES),
        "half": torch.arange(12, dtype=torch.bfloat16).reshape(6, 2),
        "wide": torch.arange(8, dtype=torch.float64),
    }
    save_file(tensors, tmp_path / "data.safetensors", metadata={"made": "here"})
    for name, tensor in tensors.items():
        array = DiskArray.from_safetensors(tmp_path / "data.safetensors", name)
        assert array.dtype == tensor.dtype
        assert torch.equal(array.gather(np.arange(len(tensor))[::-1].copy()), tensor.flip(0))
    with pytest.raises(fg.InputError, match=r"'pixel'.*did you mean 'pixels'"):
        DiskArray.from_safetensors(tmp_path / "data.safetensors", "pixel")


GOOD = {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 16]}


@pytest.mark.parametrize(
    ("header", "message"),
    [
        (b"", "a safetensors file"),
        (b"\xff" * 8, "a safetensors file"),
        (b"{", "a safetensors file"),
        (b"\xff\xfe{}", "a safetensors file"),
        (b"[1]", "a safetensors file"),
        (b"[" * 5000, "a safetensors file"),
        ({"x": 3}, "dtype"),
        ({"x": {**GOOD, "dtype": "F4"}}, "dtype = 'F4'.*F32"),
        ({"x": {**GOOD, "dtype": ["F32"]}}, "dtype"),
        ({"x": {**GOOD, "shape": [2, -2]}}, "shape"),
        ({"x": {**GOOD, "shape": []}}, "shape.*the samples"),
        ({"x": {**GOOD, "shape": [2, True]}}, "shape"),
        ({"x": {**GOOD, "shape": [2, 3]}}, "data_offsets.*24 bytes within the 16"),
        ({"x": {**GOOD, "data_offsets": [8, 24]}}, "data_offsets.*within the 16"),
        ({"x": {**GOOD, "data_offsets": [-8, 8]}}, "data_offsets"),
        ({"x": {**GOOD, "data_offsets": [0]}}, "data_offsets"),
        ({"x": {**GOOD, "shape": [2**40, 2**40], "data_offsets": [0, 16]}}, "data_offsets"),
    ],
)
def test_damaged_safetensors_are_refused(tmp_path, header, message):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    content = text if header in (b"", b"\xff" * 8) else len(text).to_bytes(8, "little") + text + bytes(16)
    (tmp_path / "bad.safetensors").write_bytes(content)
    with pytest.raises(fg.InputError, match=message):
        DiskArray.from_safetensors(tmp_path / "bad.safetensors", "x")


def test_arrays_that_cannot_be_read_by_rows_are_refused_with_advice(tmp_path):
    fortran = np.memmap(tmp_path / "f", np.float32, "w+", shape=(4, 3), order="F")
    plain = np.memmap(tmp_path / "p", np.float32, "w+", shape=(4, 3))
    plain.flush()
    private = np.memmap(tmp_path / "p", np.float32, "c", shape=(4, 3))
    for array, message in (
        (fortran, "C order.*ascontiguousarray"),
        (plain[::2], "C order"),
        (private, "mode 'c'"),
        (np.zeros(3), "a memory map of a named file"),
        (np.memmap(tmp_path / "p", [("a", "f4"), ("b", "f4")], "r"), "type of numbers"),
    ):
        with pytest.raises(fg.InputError, match=message):
            DiskArray.from_memmap(array)
    np.save(tmp_path / "object.npy", np.array([{}]), allow_pickle=True)
    (tmp_path / "text.npy").write_text("hello")
    for name in ("object.npy", "text.npy", "missing.npy"):
        with pytest.raises(fg.InputError, match=rf"{name}.*\.npy file of numbers"):
            DiskArray.open(tmp_path / name)
    with pytest.raises(fg.InputError, match="missing"):
        DiskArray.from_safetensors(tmp_path / "missing", "x")


# federations on disk


def test_a_memory_mapped_pool_stays_on_disk_and_its_labels_do_not(pictures, tmp_path):
    np.save(tmp_path / "labels.npy", (np.arange(60) % 3).astype(np.uint8))
    fed = fg.Federation.from_pool(
        np.load(pictures, mmap_mode="r"),
        np.load(tmp_path / "labels.npy", mmap_mode="r"),
        clients=4,
        partition=fg.Shards(2),
        images=fg.Images((0.5,) * 3, (0.25,) * 3),
    )
    assert isinstance(fed.inputs, DiskArray)
    assert fed.inputs.dtype == torch.uint8
    assert (fed.targets.dtype, fed.num_classes) == (torch.int64, 3)
    mine = fed.samples_of(2)
    assert torch.equal(fed.inputs.gather(mine), torch.from_numpy(PICTURES[mine]))
    assert all(len(np.unique(fed.targets[fed.samples_of(i)])) == 2 for i in range(4))
    assert repr(fed).endswith("on disk)")


def test_clients_in_files_of_their_own_are_pooled_on_disk(tmp_path):
    sizes = [3, 1, 4]
    for i, size in enumerate(sizes):
        np.save(tmp_path / f"{i}.npy", np.full((size, 2), i, np.uint8))
    maps = [np.load(tmp_path / f"{i}.npy", mmap_mode="r") for i in range(3)]
    clients = [({"x": x}, np.zeros(len(x), int)) for x in maps]
    fed = fg.Federation.from_arrays(clients, tests=[clients[0], None, None])
    assert isinstance(fed.inputs["x"], DiskArray)
    assert isinstance(fed.test[0]["x"], DiskArray)
    for i, size in enumerate(sizes):
        assert fed.inputs["x"].gather(fed.samples_of(i)).tolist() == [[i, i]] * size
    with pytest.raises(fg.InputError, match=r"inputs\['x'\] = '1 of 2 clients on disk'"):
        fg.Federation.from_arrays([({"x": maps[0]}, [0] * 3), ({"x": np.array(maps[1])}, [0])])


def test_slices_of_one_map_join_to_one_stretch(pictures):
    whole = np.load(pictures, mmap_mode="r")
    fed = fg.Federation.from_arrays([(whole[:10], [0] * 10), (whole[10:25], [1] * 15), (whole[40:], [2] * 20)])
    assert [stretch.rows for stretch in fed.inputs.stretches] == [25, 20]
    assert torch.equal(fed.inputs[fed.samples_of(2)], torch.from_numpy(PICTURES[40:]))


def test_targets_of_many_numbers_stay_on_disk_as_labels(tmp_path):
    tokens = RNG.integers(0, 50, (20, 8)).astype(np.uint16)
    np.save(tmp_path / "tokens.npy", tokens)
    whole = np.load(tmp_path / "tokens.npy", mmap_mode="r")
    fed = fg.Federation.from_pool(whole, whole, clients=2, partition=fg.IID())
    assert isinstance(fed.targets, DiskArray)
    assert fed.targets[:3].dtype == torch.int64
    assert fed.num_classes == tokens.max() + 1


def test_nan_on_disk_is_found_unless_the_caller_vouches_for_the_file(tmp_path, reads):
    values = np.zeros((30_000, 200), np.float32)  # 24 MB: six pages
    values[25_000, 1] = np.nan
    np.save(tmp_path / "values.npy", values)
    labels = np.zeros(30_000, int)
    with pytest.raises(fg.InputError, match=r"inputs.*NaN or infinity in sample 25000"):
        fg.Federation.from_pool(DiskArray.open(tmp_path / "values.npy"), labels, 2, fg.IID())
    assert max(size for _, size in reads) <= 2**22
    reads.clear()
    fg.Federation.from_pool(DiskArray.open(tmp_path / "values.npy", finite=True), labels, 2, fg.IID())
    assert reads == []


def test_reading_a_file_leaves_nothing_resident(tmp_path):
    """100 MB are read twice; the process grows by less than a quarter of the file."""
    code = f"""
import numpy as np, resource
from fedagrac.data.disk import DiskArray
whole = np.lib.format.open_memmap({str(tmp_path / "big.npy")!r}, "w+", np.uint8, (25_000, 4000))
del whole
array = DiskArray.open({str(tmp_path / "big.npy")!r})
array[:100]
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
for _, page in array.pages(): page[0]
for rows in np.random.default_rng(0).permutation(25_000).reshape(-1, 100): array.gather(rows)
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert int(out.stdout) < 25_000
