"""Kinds of modules that users bring, each with data and a loss, in float64; and plain PyTorch training of them.

`works(kind, engine)` says what an engine does with a kind: the table "What works" in docs/models.md is made of it.
Print the table with `python tests/module_kinds.py`.
"""

import copy
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import fedagrac as fg
from fedagrac.data.batches import batch_positions
from fedagrac.models.residual import ResNet
from fedagrac.models.sequences import CharGPT

ENGINES = {
    "serial": {"engine": "serial"},
    "lanes": {"engine": "lanes", "compile": False},
    "compiled": {"engine": "lanes", "compile": True},
}
SIZES = (9, 12)
CLASSES, LENGTH, VOCABULARY, LR, BATCH, ROUNDS = 3, 5, 11, 0.1, 4, 2
RNG = np.random.default_rng()


@dataclass(frozen=True)
class Kind:
    """A module, data for two clients, and a loss.

    Attributes:
        title: the row of the table.
        module: makes the module.
        inputs: draws the inputs of n samples.
        loss: (output, target) -> mean.
        call: the module's output for a batch of inputs.
    """

    title: str
    module: Callable[[], nn.Module]
    inputs: Callable[[int], Any]
    loss: Callable[[Any, Any], Any] = functional.cross_entropy
    call: Callable[[nn.Module, Any], Any] = lambda module, inputs: module(inputs)


def pictures(n):
    return RNG.normal(size=(n, 3, 8, 8))


def characters(n):
    return RNG.integers(0, VOCABULARY, (n, LENGTH))


def numbers(n):
    return RNG.normal(size=(n, 6))


def padded(n):
    mask = (np.arange(LENGTH) < RNG.integers(2, LENGTH + 1, n)[:, None]).astype(np.int64)
    return {"input_ids": characters(n) * mask, "attention_mask": mask}


class Recurrent(nn.Module):
    def __init__(self, layer, *args, **options):
        super().__init__()
        self.embed, self.layer = nn.Embedding(VOCABULARY, 4), layer(4, 6, *args, batch_first=True, **options)
        width = options.get("proj_size", 6) * (2 if options.get("bidirectional") else 1)
        self.out = nn.Linear(width, CLASSES)

    def forward(self, ids):
        return self.out(self.layer(self.embed(ids))[0].mean(1))


class Packed(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.layer = nn.Embedding(VOCABULARY, 4), nn.LSTM(4, 6, batch_first=True)
        self.out = nn.Linear(6, CLASSES)

    def forward(self, input_ids, attention_mask):
        lengths = attention_mask.sum(1).cpu()
        packed = nn.utils.rnn.pack_padded_sequence(
            self.embed(input_ids), lengths, batch_first=True, enforce_sorted=False
        )
        return self.out(self.layer(packed)[1][0][-1])


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, 8)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.out = nn.Linear(8, CLASSES)

    def forward(self, ids):
        x = self.embed(ids)
        return self.out(self.attention(x, x, x, need_weights=False)[0].mean(1))


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.hidden = nn.Embedding(VOCABULARY, 6), nn.Linear(6, 6)
        self.out = nn.Linear(6, VOCABULARY, bias=False)
        self.out.weight = self.embed.weight

    def forward(self, ids):
        return self.out(torch.tanh(self.hidden(self.embed(ids).mean(1))))


class Frozen(nn.Module):
    """A backbone without gradients in eval(), whose dropout must stay off, and a head that trains."""

    def __init__(self):
        super().__init__()
        self.backbone = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Dropout(0.5)).eval()
        self.backbone.requires_grad_(False)
        self.head = nn.Linear(8, CLASSES)

    def forward(self, x):
        return self.head(self.backbone(x))


class LoRA(nn.Module):
    def __init__(self):
        super().__init__()
        self.base = nn.Linear(6, CLASSES).requires_grad_(False)
        self.a, self.b = nn.Parameter(torch.randn(2, 6) / 3), nn.Parameter(torch.randn(CLASSES, 2) / 3)

    def forward(self, x):
        return self.base(x) + x @ self.a.T @ self.b.T


class TwoInputs(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.out = nn.Embedding(VOCABULARY, 4), nn.Linear(10, CLASSES)

    def forward(self, x, ids):
        return self.out(torch.cat([x, self.embed(ids).mean(1)], 1))


class Outputs(nn.Module):
    def __init__(self):
        super().__init__()
        self.hidden, self.out, self.value = nn.Linear(6, 5), nn.Linear(5, CLASSES), nn.Linear(5, 1)

    def forward(self, x):
        h = torch.tanh(self.hidden(x))
        return {"logits": self.out(h), "value": self.value(h).squeeze(1)}


def two_losses(output, target):
    return functional.cross_entropy(output["logits"], target) + (output["value"] ** 2).mean()


class Running(nn.Module):
    """A module with a buffer of its own, which it replaces in every forward pass, also in eval()."""

    def __init__(self):
        super().__init__()
        self.out = nn.Linear(6, CLASSES)
        self.register_buffer("mean", torch.zeros(6))

    def forward(self, x):
        self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
        return self.out(x - self.mean)


class Bert(nn.Module):
    def __init__(self):
        from transformers import BertConfig, BertForSequenceClassification

        super().__init__()
        config = BertConfig(
            vocab_size=VOCABULARY, hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8,
            max_position_embeddings=LENGTH, num_labels=CLASSES, hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
        )  # fmt: skip
        self.net = BertForSequenceClassification(config)

    def forward(self, input_ids, attention_mask):
        return self.net(input_ids, attention_mask).logits


class Cautious(nn.Module):
    """Drops the last feature where it is 0 everywhere; as modules of transformers, it looks only if it may."""

    def __init__(self):
        super().__init__()
        self.out = nn.Linear(6, CLASSES)

    def forward(self, x):
        if not torch.compiler.is_compiling() and (x[:, -1] == 0).all():
            return functional.linear(x[:, :-1], self.out.weight[:, :-1], self.out.bias)
        return self.out(x)


class Mobile(nn.Module):
    """Depthwise convolutions and squeeze-and-excitation."""

    def __init__(self):
        super().__init__()
        self.wide, self.norm = nn.Conv2d(3, 8, 1), nn.BatchNorm2d(8)
        self.depthwise = nn.Conv2d(8, 8, 3, stride=2, padding=1, groups=8)
        self.squeeze, self.excite, self.out = nn.Conv2d(8, 2, 1), nn.Conv2d(2, 8, 1), nn.Linear(8, CLASSES)

    def forward(self, x):
        h = functional.hardswish(self.depthwise(functional.relu6(self.norm(self.wide(x)))))
        gate = torch.sigmoid(self.excite(functional.relu(self.squeeze(h.mean((2, 3), keepdim=True)))))
        return self.out(functional.adaptive_avg_pool2d(h * gate, 1).flatten(1))


class UNet(nn.Module):
    """A transposed convolution, bilinear upsampling, and a skipped connection."""

    def __init__(self):
        super().__init__()
        self.down, self.up = nn.Conv2d(3, 4, 3, stride=2, padding=1), nn.ConvTranspose2d(4, 4, 2, stride=2)
        self.out = nn.Conv2d(11, CLASSES, 1)

    def forward(self, x):
        low = functional.relu(self.down(x))
        fine = functional.interpolate(low, scale_factor=2, mode="bilinear")
        return self.out(torch.cat([x, self.up(low), fine], 1)).mean((2, 3))


class ViT(nn.Module):
    def __init__(self):
        super().__init__()
        self.patches, self.norm = nn.Conv2d(3, 8, 4, stride=4), nn.LayerNorm(8)
        self.token, self.places = nn.Parameter(torch.randn(1, 1, 8)), nn.Parameter(torch.randn(1, 5, 8))
        self.attention, self.out = nn.Linear(8, 24), nn.Linear(8, CLASSES)

    def forward(self, x):
        h = self.patches(x).flatten(2).transpose(1, 2)
        h = torch.cat([self.token.expand(len(x), -1, -1), h], 1) + self.places
        h = h + functional.scaled_dot_product_attention(*self.attention(self.norm(h)).chunk(3, -1))
        return self.out(h[:, 0])


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True, norm_first=True)
        self.embedding = nn.Embedding(VOCABULARY, 8)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.out = nn.Linear(8, CLASSES)

    def forward(self, x):
        return self.out(self.layers(self.embedding(x), src_key_padding_mask=x == 0)[:, 0])


class Graph(nn.Module):
    """Nodes on a ring, two messages each, added by index."""

    def __init__(self):
        super().__init__()
        self.message, self.out = nn.Linear(1, 4), nn.Linear(4, CLASSES)

    def forward(self, x):
        h = functional.relu(self.message(x[..., None]))
        ends = torch.arange(12, device=x.device) % 6
        sums = torch.zeros(len(x), 6, 4, dtype=h.dtype, device=x.device).index_add(
            1, ends, torch.cat([h, h.roll(1, 1)], 1)
        )
        return self.out(sums.amax(1))


class Experts(nn.Module):
    """The two experts of three that a gate scores highest."""

    def __init__(self):
        super().__init__()
        self.gate, self.experts = nn.Linear(6, 3), nn.ModuleList(nn.Linear(6, CLASSES) for _ in range(3))

    def forward(self, x):
        scores, chosen = torch.softmax(self.gate(x), -1).topk(2, -1)
        weights = torch.zeros(len(x), 3, dtype=x.dtype).scatter(-1, chosen, scores)
        return sum(weights[:, k : k + 1] * expert(x) for k, expert in enumerate(self.experts))


class Pairs(nn.Module):
    def __init__(self):
        super().__init__()
        self.bag, self.pairs = nn.EmbeddingBag(VOCABULARY, 4, mode="sum"), nn.Bilinear(4, 4, CLASSES)

    def forward(self, x):
        return self.pairs(self.bag(x), self.bag(x[:, :2]))


class Branch(nn.Module):
    """One of two layers, chosen by the samples."""

    def __init__(self):
        super().__init__()
        self.one, self.other = nn.Linear(6, CLASSES), nn.Linear(6, CLASSES)

    def forward(self, x):
        return self.one(x) if x.sum() > 0 else self.other(x)


class Recomputed(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.out = nn.Linear(6, 8), nn.Linear(8, CLASSES)

    def forward(self, x):
        return self.out(checkpoint(lambda h: torch.tanh(self.inner(h)), x, use_reentrant=False))


def residual(norm, widths):
    return lambda: ResNet(widths, 1, CLASSES, norm, 2, projected=True)


def mlp(*layers):
    return lambda: nn.Sequential(*(layer() for layer in layers))


KINDS = {
    "resnet-group": Kind("residual network, GroupNorm", residual("group", (4, 8)), pictures),
    "resnet-batch": Kind("residual network, BatchNorm", residual("batch", (4,)), pictures),
    "lstm": Kind("LSTM", lambda: Recurrent(nn.LSTM), characters),
    "gru": Kind("GRU", lambda: Recurrent(nn.GRU), characters),
    "packed": Kind("LSTM, packed sequences", Packed, padded, call=lambda module, x: module(**x)),
    "gpt": Kind("GPT, scaled_dot_product_attention", lambda: CharGPT(VOCABULARY, LENGTH, 8, 1, 2), characters),
    "attention": Kind("MultiheadAttention", Attention, characters),
    "bert": Kind("BERT of transformers, padding mask", Bert, padded, call=lambda module, x: module(**x)),
    "tied": Kind("tied weights", Tied, characters),
    "frozen": Kind("frozen backbone in eval(), with dropout and BatchNorm", Frozen, numbers),
    "lora": Kind("LoRA", LoRA, numbers),
    "two-inputs": Kind(
        "two inputs, a tuple", TwoInputs, lambda n: (numbers(n), characters(n)), call=lambda module, x: module(*x)
    ),
    "dict-output": Kind("a dict as output, a loss of its own", Outputs, numbers, two_losses),
    "own-buffer": Kind("a buffer of its own", Running, numbers),
    "spectral-norm": Kind(
        "spectral_norm", mlp(lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(6, 3))), numbers
    ),
    "weight-norm": Kind(
        "weight_norm",
        mlp(lambda: nn.utils.parametrizations.weight_norm(nn.Linear(6, 8)), nn.Tanh, lambda: nn.Linear(8, 3)),
        numbers,
    ),
    "mobile": Kind("depthwise convolutions, squeeze-and-excitation", Mobile, pictures),
    "unet": Kind("transposed convolution, bilinear upsampling", UNet, pictures),
    "vit": Kind("vision transformer", ViT, pictures),
    "encoder": Kind("TransformerEncoder, padding mask", Encoder, characters),
    "graph": Kind("messages on a graph, index_add", Graph, numbers),
    "experts": Kind("mixture of experts, topk and scatter", Experts, numbers),
    "pairs": Kind("EmbeddingBag, Bilinear", Pairs, characters),
    "cautious": Kind("a look at the samples, unless torch.compiler.is_compiling()", Cautious, numbers),
    "branch": Kind("a branch that depends on the samples", Branch, numbers),
    "checkpoint": Kind("activation checkpointing", Recomputed, numbers),
}


def make(name):
    """Return the module in float64 and each client's inputs and targets."""
    RNG.bit_generator.state = np.random.default_rng(0).bit_generator.state
    torch.manual_seed(0)
    kind = KINDS[name]
    module = kind.module().double()
    classes = VOCABULARY if name in ("tied", "gpt") else CLASSES
    return kind, module, [(kind.inputs(n), RNG.integers(0, classes, n)) for n in SIZES]


def plain(name, steps, rounds=ROUNDS, lr=LR):
    """Train by FedAvg with ordinary PyTorch, client after client; return parameters and buffers by name."""
    kind, module, clients = make(name)
    if not all(layer.training for layer in module.modules()):
        modes = [layer.training for layer in module.modules()]
    else:
        modes = None
    state = copy.deepcopy(module.state_dict())
    for t in range(rounds):
        ends = []
        for client, (inputs, targets) in enumerate(clients):
            local = copy.deepcopy(module)
            local.load_state_dict(state)
            if modes is None:
                local.train()
            optimizer = torch.optim.SGD([p for p in local.parameters() if p.requires_grad], lr=lr)
            for rows in batch_positions(len(targets), steps[client], BATCH, "replacement", 0, t, client):
                batch = _map(lambda array, rows=rows: torch.from_numpy(array[rows]), inputs)
                loss = kind.loss(kind.call(local, batch), torch.from_numpy(targets[rows]))
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
            ends.append(local.state_dict())
        weights = np.array(SIZES) / sum(SIZES)
        for key, value in state.items():
            mean = sum(w * end[key].double() for w, end in zip(weights, ends, strict=True))
            state[key] = mean if value.is_floating_point() else mean.round().to(value.dtype)
    return state


def _map(function, tree):
    if isinstance(tree, dict):
        return {key: function(value) for key, value in tree.items()}
    return tuple(map(function, tree)) if isinstance(tree, tuple) else function(tree)


def simulated(name, engine, steps, algorithm=None, **options):
    """Train by FedAvg with an engine; return the result and the warnings."""
    kind, module, clients = make(name)
    fed = fg.Federation.from_arrays(clients, test=clients[0])
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        result = fg.simulate(
            module, fed, algorithm or fg.FedAvg(lr=LR), rounds=ROUNDS, steps=fg.Explicit([steps]),
            batch_size=BATCH, loss=kind.loss, device="cpu", **ENGINES[engine], **options,
        )  # fmt: skip
    return result, [str(warning.message) for warning in caught]


def difference(result, state):
    """Return the largest difference to a state_dict, relative to the largest number of each tensor."""
    ours = result.model().state_dict()
    return max(
        float((ours[key].double() - value.double()).abs().max() / value.double().abs().max().clamp(min=1e-3))
        for key, value in state.items()
    )


def works(name, engine):
    """Return what an engine does with a kind: "yes", or why clients run one after another."""
    steps = [1, 1] if engine == "compiled" else [2, 5]  # compiling one step per kind is enough
    result, said = simulated(name, engine, steps)
    assert difference(result, plain(name, steps)) < 1e-12
    fallback = [text for text in said if "lanes cannot batch" in text or "uncompiled" in text]
    assert said == fallback, said
    if not fallback:
        return "yes"
    reason = fallback[0].split(": ", 1)[1].split(". ")[0].split("; ")[0]
    layer = fallback[0].removeprefix("lanes cannot batch ").split(",")[0]
    return f"one client after another: {layer} ({reason[:90].rstrip(' .,')})"


def table(cells):
    """Return the table in Markdown; cells are by (kind, engine)."""
    lines = ["| module | serial | lanes | compiled |", "|---|---|---|---|"]
    for name, kind in KINDS.items():
        lines.append(f"| {kind.title} | " + " | ".join(cells[name, engine] for engine in ENGINES) + " |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(table({(name, engine): works(name, engine) for name in KINDS for engine in ENGINES}))
