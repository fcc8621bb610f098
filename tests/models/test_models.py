"""The built-in models, to the last parameter, and pictures."""

import math
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
            assert 0.9 * bound < float(layer.weight.detach().abs().max()) <= bound
            assert layer.bias.any()


def test_a_few_steps_reduce_the_loss_of_vgg19():
    """Two pictures, dropout off: 25 steps tell them apart, where torch's start leaves the loss at log 2."""
    with first_weights(0):
        model = fg.models.build("vgg19", classes=2).eval()
    pictures, labels = torch.stack([torch.full((3, 32, 32), 2.0), torch.full((3, 32, 32), -2.0)]), torch.arange(2)
    losses = []
    for _ in range(25):
        loss = nn.functional.cross_entropy(model(pictures), labels)
        gradients = torch.autograd.grad(loss, list(model.parameters()))
        losses.append(loss.item())
        with torch.no_grad():
            for parameter, gradient in zip(model.parameters(), gradients, strict=True):
                parameter.sub_(0.1 * gradient)
    assert losses[0] == pytest.approx(np.log(2), abs=0.05)
    assert losses[-1] < 0.3


def test_the_seed_decides_the_start_of_vgg19():
    first, again, other = (start("vgg19", seed)[0].weight for seed in (0, 0, 1))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_alexnet_starts_as_torch_makes_it():
    for layer in start("alexnet"):
        if isinstance(layer, nn.Conv2d):
            bound = (layer.in_channels * layer.kernel_size[0] * layer.kernel_size[1]) ** -0.5
            assert 0.9 * bound < float(layer.weight.detach().abs().max()) <= bound
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


# residual networks and networks of characters


def size(model):
    return sum(parameter.numel() for parameter in model.parameters())


def test_the_residual_networks_have_the_published_numbers_of_parameters():
    """ResNet-18 for CIFAR: 11.17 M (public PyTorch code). ResNet-20: 0.27 M (He et al. 2016, Table 6)."""
    for norm in ("group", "batch"):
        assert round(size(fg.models.build("resnet18", norm=norm)) / 1e6, 2) == 11.17
        assert round(size(fg.models.build("resnet20", norm=norm)) / 1e6, 2) == 0.27


def test_resnet20_is_counted_layer_by_layer():
    """Table 6 of He et al.: 16, 32, 64 filters, 6 n + 2 layers with n = 3, no weights in shortcuts."""
    model = fg.models.build("resnet20", classes=7)
    convolutions = [layer for layer in model.modules() if isinstance(layer, nn.Conv2d)]
    shapes = [(layer.in_channels, layer.out_channels, layer.stride[0]) for layer in convolutions]
    assert (
        shapes
        == [(3, 16, 1)] + [(16, 16, 1)] * 6 + [(16, 32, 2)] + [(32, 32, 1)] * 5 + [(32, 64, 2)] + [(64, 64, 1)] * 5
    )
    assert all(layer.kernel_size == (3, 3) and layer.bias is None for layer in convolutions)
    norms = 2 * (7 * 16 + 6 * 32 + 6 * 64)
    assert size(model) == sum(9 * a * b for a, b, _ in shapes) + norms + 65 * 7


def test_resnet18_projects_its_shortcuts_where_the_shape_changes():
    model = fg.models.build("resnet18", norm="batch")
    convolutions = [layer for layer in model.modules() if isinstance(layer, nn.Conv2d)]
    assert len(convolutions) == 17 + 3
    projections = [layer for layer in convolutions if layer.kernel_size == (1, 1)]
    assert [(p.in_channels, p.out_channels, p.stride) for p in projections] == [
        (64, 128, (2, 2)), (128, 256, (2, 2)), (256, 512, (2, 2)),
    ]  # fmt: skip
    assert convolutions[0].stride == (1, 1)  # the stem for 32 x 32
    before = model.stem(torch.zeros(1, 3, 32, 32))
    assert before.shape == (1, 64, 32, 32)
    assert model.stages(before).shape == (1, 512, 4, 4)


@pytest.mark.parametrize("name", ["resnet18", "resnet20"])
@pytest.mark.parametrize(("norm", "kind"), [("group", nn.GroupNorm), ("batch", nn.BatchNorm2d)])
def test_residual_networks_use_the_norm_that_is_asked_for(name, norm, kind):
    model = fg.models.build(name, norm=norm, classes=5)
    norms = [layer for layer in model.modules() if isinstance(layer, nn.GroupNorm | nn.BatchNorm2d)]
    assert {type(layer) for layer in norms} == {kind}
    if norm == "group":
        assert {layer.num_groups for layer in norms} == {8}
        assert not list(model.buffers())
    out = model(torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(0)))
    assert out.shape == (2, 5)
    out.sum().backward()
    assert all(bool(p.grad.abs().sum() > 0) for p in model.parameters() if p.dim() > 1)


def test_the_shortcut_of_resnet20_takes_every_second_pixel_and_adds_zeros():
    """With the branch of the first wider block at zero, its output is the shortcut alone."""
    block = next(b for b in fg.models.build("resnet20").stages if not isinstance(b.shortcut, nn.Identity))
    nn.init.zeros_(block.branch[-1].weight)
    x = torch.rand(2, 16, 6, 6, generator=torch.Generator().manual_seed(0))
    out = block(x)
    assert out.shape == (2, 32, 3, 3)
    assert torch.equal(out[:, 8:24], x[:, :, ::2, ::2])
    assert not out[:, :8].any()
    assert not out[:, 24:].any()


@pytest.mark.parametrize(
    ("name", "sizes", "message"),
    [
        ("resnet18", {"norm": "layer"}, "norm = 'layer': expected one of group, batch"),
        ("resnet20", {"groups": 32}, "groups = 32: expected a divisor of 16"),
        ("char-lstm", {"vocabulary": 1}, "vocabulary = 1"),
        ("char-lstm", {"hidden": 10**9}, "hidden = 1000000000"),
        ("char-gpt", {"heads": 3}, "heads = 3: expected a divisor of the width 128"),
        ("char-gpt", {"dropout": 1.0}, "dropout = 1.0: expected a probability below 1"),
        ("char-gpt", {"vocab": 80}, "did you mean 'vocabulary'"),
    ],
)
def test_wrong_sizes_are_named(name, sizes, message):
    with pytest.raises(fg.InputError, match=message):
        fg.models.build(name, **sizes)


def test_char_lstm_is_leafs():
    """Embedding 80 x 8, two LSTM layers of 256 with one bias, dense 256 -> 80: LEAF's stacked LSTM, 0.82 M."""
    leaf = 80 * 8 + 4 * 256 * (8 + 256 + 1) + 4 * 256 * (256 + 256 + 1) + 80 * 257
    assert round(leaf / 1e6, 2) == 0.82
    assert size(fg.models.build("char-lstm")) == leaf + 2 * 4 * 256  # torch's second bias


def test_char_lstm_is_the_recurrence_written_out():
    """One layer, float64: gates i, f, g, o of W x + U h + b, and the linear layer on the last state."""
    with first_weights(0):
        model = fg.models.build("char-lstm", vocabulary=7, embedding=3, hidden=4, layers=1).double()
    text = np.array([[1, 6, 0, 3, 3], [5, 2, 2, 4, 1]], np.uint8)
    weights = {name: p.detach().numpy() for name, p in model.named_parameters()}
    h, c = np.zeros((2, 4)), np.zeros((2, 4))
    for characters in text.T:
        gates = weights["embedding.weight"][characters] @ weights["lstm.weight_ih_l0"].T
        gates += h @ weights["lstm.weight_hh_l0"].T + weights["lstm.bias_ih_l0"] + weights["lstm.bias_hh_l0"]
        i, f, g, o = np.split(gates, 4, axis=1)
        i, f, o = (1 / (1 + np.exp(-x)) for x in (i, f, o))
        c = f * c + i * np.tanh(g)
        h = o * np.tanh(c)
    expected = h @ weights["head.weight"].T + weights["head.bias"]
    assert np.allclose(model(torch.from_numpy(text)).detach().numpy(), expected, atol=1e-12)


def test_char_gpt_has_its_parameters():
    block = 2 * 2 * 128 + (128 + 1) * 384 + (128 + 1) * 128 + (128 + 1) * 512 + (512 + 1) * 128
    assert size(fg.models.build("char-gpt")) == (90 + 80) * 128 + 4 * block + 2 * 128 + 129 * 90
    assert round(size(fg.models.build("char-gpt")) / 1e6, 1) == 0.8


def norm(x, weight, bias):
    centred = x - x.mean(-1, keepdims=True)
    return centred / np.sqrt((centred**2).mean(-1, keepdims=True) + 1e-5) * weight + bias


def test_char_gpt_is_causal_attention_written_out():
    """One block with two heads in NumPy, float64."""
    with first_weights(0):
        model = fg.models.build("char-gpt", vocabulary=7, context=6, width=4, layers=1, heads=2).double()
    for parameter in model.parameters():  # away from the start, where biases are zero and norms do nothing
        nn.init.normal_(parameter, std=0.5, generator=torch.Generator().manual_seed(parameter.numel()))
    text = np.array([[1, 6, 0, 3, 3], [5, 2, 2, 4, 1]], np.uint8)
    w = {name.removeprefix("blocks.0."): p.detach().numpy() for name, p in model.named_parameters()}
    x = w["characters.weight"][text] + w["positions.weight"][:5]
    mixed = norm(x, w["attention_norm.weight"], w["attention_norm.bias"])
    q, k, v = np.split(mixed @ w["queries_keys_values.weight"].T + w["queries_keys_values.bias"], 3, axis=-1)
    attended = np.zeros_like(x)
    for own in (slice(0, 2), slice(2, 4)):
        for t in range(5):
            scores = np.einsum("nd,nsd->ns", q[:, t, own], k[:, : t + 1, own]) / np.sqrt(2)
            shares = np.exp(scores) / np.exp(scores).sum(1, keepdims=True)
            attended[:, t, own] = np.einsum("ns,nsd->nd", shares, v[:, : t + 1, own])
    x = x + attended @ w["attention_output.weight"].T + w["attention_output.bias"]
    wide = norm(x, w["layer_norm.weight"], w["layer_norm.bias"]) @ w["layer.0.weight"].T + w["layer.0.bias"]
    gelu = wide * 0.5 * (1 + np.vectorize(math.erf)(wide / np.sqrt(2)))
    x = x + gelu @ w["layer.2.weight"].T + w["layer.2.bias"]
    last = norm(x[:, -1], w["norm.weight"], w["norm.bias"])
    expected = last @ w["head.weight"].T + w["head.bias"]
    assert np.allclose(model(torch.from_numpy(text)).detach().numpy(), expected, atol=1e-12)


@pytest.mark.parametrize("name", ["char-lstm", "char-gpt"])
def test_characters_may_be_integers_of_any_type(name):
    model = fg.models.build(name).eval()
    text = torch.arange(160).view(2, 80) % 80
    kinds = (torch.uint8, torch.int16, torch.int32, torch.int64)
    first, *others = (model(text.to(kind)) for kind in kinds)
    assert first.shape == (2, model.head.out_features)
    assert all(torch.equal(first, other) for other in others)


def test_char_gpt_takes_texts_up_to_its_context():
    model = fg.models.build("char-gpt", context=8, width=8)
    assert model(torch.zeros(1, 3, dtype=torch.long)).shape == (1, 90)
    with pytest.raises(fg.InputError, match="at most 8, the context of the model"):
        model(torch.zeros(1, 9, dtype=torch.long))


def test_dropout_of_char_gpt_is_only_there_when_asked_for():
    def drops(**sizes):
        return [m.p for m in fg.models.build("char-gpt", **sizes).modules() if isinstance(m, nn.Dropout)]

    assert drops() == []
    assert drops(layers=2, dropout=0.1) == [0.1] * 5


def test_models_of_characters_learn_a_federation_of_characters():
    """Two clients, each a text of its own period: the loss falls far below log(4), the loss of guessing."""
    clients = []
    for letters in ([0, 1], [2, 3, 3]):
        text = np.array(letters * 40, np.uint8)
        windows = np.lib.stride_tricks.sliding_window_view(text, 9)
        clients.append((windows[:60, :8].copy(), windows[:60, 8].astype(np.int64)))
    fed = fg.Federation.from_arrays(clients, test=clients[0])
    sizes = {"char-lstm": {"hidden": 16, "layers": 1}, "char-gpt": {"context": 8, "width": 16, "layers": 1}}
    for name, small in sizes.items():
        with first_weights(0):
            model = fg.models.build(name, vocabulary=4, **small)
        result = fg.simulate(
            model, fed, fg.FedAvg(lr=0.5), rounds=8, steps=fg.Constant(10), batch_size=10, device="cpu",
            engine="serial",
        )  # fmt: skip
        assert result.history[-1]["train_loss"] < 0.7


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


@pytest.mark.parametrize(("name", "lr", "rounds"), [("resnet20", 0.05, 6), ("resnet18", 0.01, 3)])
def test_residual_networks_with_batch_norm_train_and_their_statistics_move(name, lr, rounds):
    rng = np.random.default_rng(0)
    labels = np.arange(24) % 3
    pictures = (rng.normal(size=(24, 3, 32, 32)) + labels[:, None, None, None]).astype(np.float32)
    fed = fg.Federation.from_pool(pictures, labels, 2, fg.IID(), test=(pictures, labels))
    torch.manual_seed(0)
    model = fg.models.build(name, classes=3, norm="batch")
    result = fg.simulate(model, fed, fg.FedAvg(lr=lr), rounds=rounds, steps=fg.Constant(2), batch_size=6)
    losses = result.history.column("train_loss")
    assert losses[-1] < 0.8 * losses[0]
    moved = [key for key, value in result.buffers.items() if not torch.equal(value, model.state_dict()[key])]
    assert moved == [key for key in model.state_dict() if key not in result.params]
    assert result.buffers["stem.1.num_batches_tracked"] == 2 * rounds
