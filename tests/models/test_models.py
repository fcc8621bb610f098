"""The paper's models, to the last parameter, and pictures."""

import sys
import tomllib
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import fedagrac as fg
from fedagrac.core.streams import first_weights
from fedagrac.data.pictures import Images, crop_and_flip, draw_shifts

# the paper's tables: trainable parameters and output shapes, layer by layer
CNN = {"parameters": [260, 5020, 16050, 510], "shapes": [(10, 24, 24), (20, 8, 8), (50,), (10,)]}
ALEXNET = {
    "parameters": [23296, 307392, 663936, 884992, 590080, 526336, 4196352, 20490],
    "shapes": [(64, 8, 8), (192, 4, 4), (384, 2, 2), (256, 2, 2), (256, 2, 2), (2048,), (2048,), (10,)],
}
VGG_BLOCKS = [38720, 221440, 2065408, 8259584, 9439232]
VGG_DENSE = [262656, 262656, 5130]


def layers(model, shape):
    """Parameters and output shape of every layer that has parameters, and all shapes, by running one picture."""
    counted, every = [], []

    def look(layer, inputs, output):
        every.append((type(layer).__name__, tuple(output.shape[1:])))
        own = sum(p.numel() for p in layer.parameters())
        if own:
            counted.append((own, tuple(output.shape[1:])))

    for layer in model:
        layer.register_forward_hook(look)
    model(torch.zeros(2, *shape))
    return counted, every


@pytest.mark.parametrize(
    ("name", "shape", "table"), [("cnn", (1, 28, 28), CNN), ("alexnet", (3, 32, 32), ALEXNET)]
)
def test_every_layer_is_the_papers(name, shape, table):
    counted, _ = layers(fg.models.build(name), shape)
    assert [n for n, _ in counted] == table["parameters"]
    assert [s for _, s in counted] == table["shapes"]


def test_vgg19_is_the_papers_block_by_block():
    counted, every = layers(fg.models.build("vgg19"), (3, 32, 32))
    sizes = [n for n, _ in counted]
    ends = np.cumsum([2, 2, 4, 4, 4])
    blocks = [sum(sizes[a:b]) for a, b in zip([0, *ends[:-1]], ends, strict=True)]
    assert blocks == VGG_BLOCKS
    assert sizes[16:] == VGG_DENSE
    pools = [shape for kind, shape in every if kind == "MaxPool2d"]
    assert pools == [(64, 16, 16), (128, 8, 8), (256, 4, 4), (512, 2, 2), (512, 1, 1)]


@pytest.mark.parametrize(("name", "millions"), [("alexnet", 7.21), ("vgg19", 20.55)])
def test_totals_are_the_papers(name, millions):
    total = sum(p.numel() for p in fg.models.build(name).parameters())
    assert round(total / 1e6, 2) == millions


@pytest.mark.parametrize(
    ("name", "kinds"),
    [
        ("cnn", "Conv2d ReLU MaxPool2d Conv2d ReLU Dropout2d MaxPool2d Flatten Linear ReLU Dropout Linear"),
        (
            "alexnet",
            "Conv2d ReLU MaxPool2d Conv2d ReLU MaxPool2d Conv2d ReLU Conv2d ReLU Conv2d ReLU MaxPool2d Flatten "
            "Dropout Linear ReLU Dropout Linear ReLU Linear",
        ),
    ],
)
def test_the_order_of_layers_is_the_papers(name, kinds):
    assert [type(layer).__name__ for layer in fg.models.build(name)] == kinds.split()


def test_dropout_is_where_the_tables_say():
    for name in ("cnn", "alexnet", "vgg19"):
        drops = [layer for layer in fg.models.build(name) if isinstance(layer, nn.Dropout | nn.Dropout2d)]
        assert [layer.p for layer in drops] == [0.5, 0.5]


def start(name, seed=0):
    with first_weights(seed):
        return fg.models.build(name)


def test_vgg19_starts_as_the_authors_draw_it():
    """Convolutions: Normal(0, sqrt(2 / (k k out))) and zero biases. Dense layers: as torch makes them."""
    for layer in start("vgg19"):
        if isinstance(layer, nn.Conv2d):
            expected = (2 / (3 * 3 * layer.out_channels)) ** 0.5
            weights = layer.weight.detach()
            error = 1 / (2 * weights.numel()) ** 0.5  # relative standard error of a standard deviation
            assert abs(float(weights.std()) / expected - 1) < 5 * error
            assert abs(float(weights.mean())) < 5 * expected / weights.numel() ** 0.5
            assert not layer.bias.any()
        elif isinstance(layer, nn.Linear):
            bound = layer.in_features**-0.5
            assert 0.9 * bound < float(layer.weight.abs().max()) <= bound
            assert layer.bias.any()


def test_the_seed_decides_the_start_of_vgg19():
    first, again, other = (start("vgg19", seed)[0].weight for seed in (0, 0, 1))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_alexnet_starts_as_torch_makes_it():
    for layer in start("alexnet"):
        if isinstance(layer, nn.Conv2d):
            bound = (layer.in_channels * layer.kernel_size[0] * layer.kernel_size[1]) ** -0.5
            assert 0.9 * bound < float(layer.weight.abs().max()) <= bound
            assert layer.bias.any()


def test_the_tables_agree_with_the_targets_file():
    path = Path(__file__).parents[3] / "shared" / "paper" / "targets.toml"
    if not path.exists():
        pytest.skip("the paper's figures as data are not beside this checkout")
    targets = tomllib.loads(path.read_text())
    assert list(targets["table_cnn"].values()) == CNN["parameters"]
    assert targets["table_alexnet"]["conv"] + targets["table_alexnet"]["dense"] == ALEXNET["parameters"]
    assert targets["table_vgg19"]["conv"] == VGG_BLOCKS
    assert targets["table_vgg19"]["dense"] == VGG_DENSE


def test_a_model_of_the_users_by_import_path(tmp_path, monkeypatch):
    (tmp_path / "mine_for_test.py").write_text(
        "import torch\n\ndef net(width=3):\n    return torch.nn.Linear(width, 2)\n\ndef text():\n    return 'no'\n"
    )
    monkeypatch.chdir(tmp_path)
    before = list(sys.path)
    assert fg.models.build("mine_for_test:net", width=7).in_features == 7
    assert sys.path == before
    for path, message in (
        ("mine_for_test:nett", "nett"),
        ("no_such_module_here:net", "no_such_module_here"),
        ("mine_for_test:text", "it returned str"),
        (":net", "module:factory"),
    ):
        with pytest.raises(fg.InputError, match=message):
            fg.models.build(path)
    with pytest.raises(fg.InputError, match="takes wdth"):
        fg.models.build("mine_for_test:net", wdth=7)


# pictures


def test_bytes_become_normalised_numbers():
    pixels = torch.tensor([[[[0, 255]], [[51, 102]]]], dtype=torch.uint8)
    out = Images(mean=(0.5, 0.1), std=(0.5, 0.2))(pixels, torch.float64)
    expected = [[[[-1.0, 1.0]], [[0.5, 1.5]]]]
    assert torch.allclose(out, torch.tensor(expected, dtype=torch.float64))


def by_hand(picture, down, right, flip, padding):
    """One picture cropped and flipped with plain NumPy slices."""
    framed = np.pad(picture, ((0, 0), (padding, padding), (padding, padding)))
    crop = framed[:, down : down + picture.shape[1], right : right + picture.shape[2]]
    return crop[:, :, ::-1] if flip else crop


def test_crop_and_flip_is_what_slicing_does():
    rng = np.random.default_rng(0)
    pixels = rng.integers(0, 256, (40, 3, 6, 5), dtype=np.uint8)
    shifts = draw_shifts(1, 40, padding=4, seed=3, round=1, client=2)[0]
    ours = crop_and_flip(torch.from_numpy(pixels), torch.from_numpy(shifts), 4)
    for i, (down, right, flip) in enumerate(shifts):
        assert np.array_equal(ours[i].numpy(), by_hand(pixels[i], down, right, flip, 4))


def test_shifts_cover_their_range_and_flip_half_the_time():
    shifts = draw_shifts(200, 25, padding=4, seed=0, round=0, client=0).reshape(-1, 3)
    for axis in (0, 1):
        shares = np.bincount(shifts[:, axis], minlength=9) / len(shifts)
        assert np.abs(shares - 1 / 9).max() < 0.025
    assert abs(shifts[:, 2].mean() - 0.5) < 0.04


def test_shifts_are_keyed_and_do_not_depend_on_how_many_follow():
    long = draw_shifts(30, 7, 4, seed=1, round=2, client=3)
    assert np.array_equal(draw_shifts(11, 7, 4, seed=1, round=2, client=3), long[:11])
    assert not np.array_equal(draw_shifts(30, 7, 4, seed=1, round=2, client=4), long)
    assert not np.array_equal(draw_shifts(30, 7, 4, seed=1, round=3, client=3), long)
