"""Run every Triton kernel in Triton's interpreter, on a CPU; print those that differ from torch's operations.

TRITON_INTERPRET=1 PYTHONPATH=src python tests/engines/triton_kernels.py
"""

import numpy as np
import torch

from fedagrac.engines.lanes.convolutions import ROUTES, routes_for
from fedagrac.engines.lanes.kernels import direct, patches
from fedagrac.engines.lanes.kernels.descend_triton import kernel as descend
from fedagrac.engines.lanes.kernels.patches import Convolution

LANES = 2
SHAPES = (
    Convolution((2, 16, 6, 5), (24, 16, 3, 3), (1, 1), (1, 1)),
    Convolution((1, 8, 7, 8), (7, 8, 3, 3), (2, 2), (1, 1)),
    Convolution((2, 40, 9, 8), (5, 40, 3, 2), (2, 1), (1, 0)),
    Convolution((3, 12, 5, 5), (70, 12, 1, 1), (1, 1), (0, 0)),
    Convolution((9, 8, 16, 15), (16, 8, 3, 3), (1, 1), (1, 1)),  # sums over pixels are cut in parts
)
ODD_SHAPES = (
    Convolution((2, 3, 13, 12), (5, 3, 11, 11), (4, 4), (5, 5)),
    Convolution((3, 70, 4, 4), (6, 70, 5, 5), (1, 1), (2, 2)),
    Convolution((2, 5, 6, 7), (3, 5, 1, 1), (2, 2), (0, 0)),
)


def whole_numbers(shape, seed):
    """Small whole numbers, whose sums and products are exact in any order."""
    return torch.from_numpy(np.random.default_rng(seed).integers(-3, 4, shape)).float()


def passes(route, c):
    """The outputs of a route, and the gradients of pictures and weights."""
    x, w = (
        whole_numbers((LANES, *c.inputs), 0).requires_grad_(),
        whole_numbers((LANES, *c.weight), 1).requires_grad_(),
    )
    y = ROUTES[route].run(x, w, c)
    return y.detach(), *torch.autograd.grad(y, (x, w), whole_numbers(y.shape, 2))


def gathered(c, dtype=torch.float32):
    """Patches and pictures by the kernels, and by torch."""
    kernels = patches._kernels()
    x = whole_numbers((LANES, *c.inputs), 3).to(dtype)
    columns, rows = patches.columns_of(x, c, 8), patches.rows_of(x, c, 8)
    for kernel, pictures, expected in (
        (kernels.columns, x, columns),
        (kernels.rows, x, rows),
        (kernels.rows, direct.channels_beside(x), rows),
    ):
        out = torch.full_like(expected, torch.nan)
        patches._launch(kernel, out, pictures, c)
        yield out, expected
    for kernel, matrices, expected in (
        (kernels.pictures, columns, patches.pictures_of(columns, c)),
        (kernels.pictures_of_rows, rows, patches.pictures_of_rows(rows, c)),
    ):
        out = torch.full_like(expected, torch.nan)
        patches._launch(kernel, matrices.contiguous(), out, c)
        yield out, expected


def weighed_as_is(c):
    """The gradient of the weights from pictures as they are, and by torch."""
    x = direct.channels_beside(whole_numbers((LANES, *c.inputs), 4))
    g = direct.channels_beside(whole_numbers((LANES, c.inputs[0], c.weight[0], *c.places), 5))
    takes, direct._takes = direct._takes, lambda x: False
    expected = direct.weigh(x, g, c)
    direct._takes = takes
    return direct._weighed_as_is(direct._kernels(), x, g, c), expected


def update():
    """The fused update by the kernel, and by torch."""
    X, G, C = (whole_numbers((LANES, 1500), seed) for seed in range(3))
    eta = torch.tensor([0.5, 2.0])
    expected = X - eta[:, None] * (G + C)
    descend[(2, LANES)](X, G, C, eta, 1500, BLOCK=1024)
    return X, expected


def main():
    """Print the kernels that differ; nothing if none does."""
    for c in SHAPES:
        assert "direct" in routes_for(c)
        expected = passes("direct", c)
        takes, direct._takes = direct._takes, lambda x: True
        found = passes("direct", c)
        direct._takes = takes
        for what, ours, theirs in zip(("outputs", "pictures", "weights"), found, expected, strict=True):
            if not torch.equal(ours, theirs):
                print(f"direct, {what} of {c}")
        if not torch.equal(*weighed_as_is(c)):
            print(f"weigh_as_is of {c}")
    for dtype, shapes in ((torch.float32, SHAPES), (torch.bfloat16, ODD_SHAPES)):
        for c in shapes:
            for number, (ours, theirs) in enumerate(gathered(c, dtype)):
                if not torch.equal(ours, theirs):
                    print(f"patches, kernel {number} of {c} in {dtype}")
    if not torch.equal(*update()):
        print("descend")
    print("done")


if __name__ == "__main__":
    main()
