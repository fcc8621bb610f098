"""The three tables of architectures: parameters layer by layer, from the code."""

from __future__ import annotations

from torch import nn

from fedagrac import models
from fedagrac.paper.recipe import Recipe, Scale, Table, TrialRecords, Verdict

__all__ = ["RECIPE"]

PAPER = {  # trainable parameters: convolutions (VGG-19: per block), dense layers, and all in millions
    "cnn": ([260, 5020], [16050, 510], None),
    "alexnet": ([23296, 307392, 663936, 884992, 590080], [526336, 4196352, 20490], 7.21),
    "vgg19": ([38720, 221440, 2065408, 8259584, 9439232], [262656, 262656, 5130], 20.55),
}


def _ours(name: str) -> tuple[list[int], list[int]]:
    """Return the parameters of convolutions, for VGG-19 summed between pools, and of dense layers."""
    convolutions, dense, block = [], [], 0
    for layer in models.build(name):  # type: ignore[attr-defined]
        count = sum(p.numel() for p in layer.parameters())
        if isinstance(layer, nn.Conv2d):
            if name == "vgg19":
                block += count
            else:
                convolutions.append(count)
        elif isinstance(layer, nn.MaxPool2d) and block:
            convolutions.append(block)
            block = 0
        elif isinstance(layer, nn.Linear):
            dense.append(count)
    return convolutions, dense


def _table(records: TrialRecords, scale: Scale) -> Table:
    rows = []
    for name, (convolutions, dense, millions) in PAPER.items():
        ours = _ours(name)
        for kind, mine, theirs in (("convolution", ours[0], convolutions), ("dense", ours[1], dense)):
            for i, (a, b) in enumerate(zip(mine, theirs, strict=True), 1):
                rows.append((name, f"{kind} {i}", f"{a:,}", f"{b:,}"))
        total = sum(ours[0]) + sum(ours[1])
        rows.append(
            (name, "total", f"{total:,}", f"{millions} M" if millions else f"{sum(convolutions + dense):,}")
        )
    return Table(("model", "layer", "ours", "paper"), tuple(rows))


def _claims(records: TrialRecords) -> list[Verdict]:
    verdicts = []
    for name, (convolutions, dense, _) in PAPER.items():
        same = _ours(name) == (convolutions, dense)
        verdicts.append(
            Verdict(
                f"{name} has the paper's parameters layer by layer",
                "holds" if same else "does not hold",
                f"{sum(map(sum, _ours(name))):,} in all",
            )
        )
    return verdicts


RECIPE = Recipe(
    name="table-models",
    title="The three architectures, parameters layer by layer",
    assumptions=("VGG-19's convolutions are listed per block, as in the paper",),
    trials=lambda scale: [],
    table=_table,
    claims=_claims,
)
