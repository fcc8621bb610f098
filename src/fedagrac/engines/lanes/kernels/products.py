"""Matrix products of lanes on a CPU: in the fastest layout, and by oneDNN where torch's own library is slow.

On a CPU torch multiplies float32 matrices with Intel's MKL, which uses only a part of the vector units of other
vendors' processors: on an AMD EPYC (Zen 5) it reaches 118 GFLOP/s on one core, and oneDNN, which torch has for its
convolutions, reaches 270. The choice depends on the processor alone, so that a resumed run takes the same kernels.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from torch.fx import GraphModule, Node

__all__ = ["FEWEST_OPERATIONS", "LaneProduct", "fast", "faster_products", "product", "with_faster_products"]

FEWEST_OPERATIONS = 4_000_000
"""The fewest floating-point operations of a product that oneDNN gets, whose calls cost some microseconds more."""


@functools.cache
def faster_products() -> bool:
    """Return whether oneDNN multiplies matrices faster than torch's own library on this machine's CPU."""
    usable = torch.backends.mkl.is_available() and torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    return usable and _vendor() == "AuthenticAMD" and hasattr(torch.ops.mkldnn, "_linear_pointwise")


def _vendor() -> str:
    """Return the vendor of the CPU as Linux names it; an empty text elsewhere."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            return next(line.split(":")[1].strip() for line in file if line.startswith("vendor_id"))
    except (OSError, StopIteration):
        return ""


@torch.library.custom_op("fedagrac::product", mutates_args=())
def product(a: Tensor, b: Tensor) -> Tensor:
    """Return a @ b for two matrices, or for two stacks of as many matrices, by oneDNN.

    Examples:
        >>> product(torch.eye(2), torch.tensor([[1.0, 2.0], [3.0, 4.0]])).tolist()
        [[1.0, 2.0], [3.0, 4.0]]
    """
    if a.ndim == 2:
        return _multiply(a, b)
    if len(a) == 1:
        return _multiply(a[0], b[0])[None]
    return torch.stack([_multiply(x, y) for x, y in zip(a, b, strict=True)])


def _multiply(a: Tensor, b: Tensor) -> Tensor:
    if not (b.is_contiguous() or b.t().is_contiguous()):
        b = b.contiguous()  # for a second matrix with gaps oneDNN has plain loops alone, a thousand times slower
    output: Tensor = torch.ops.mkldnn._linear_pointwise(a, b.t(), None, "none", [], "")
    return output


@product.register_fake
def _(a: Tensor, b: Tensor) -> Tensor:
    return a.new_empty((*a.shape[:-1], b.shape[-1]))


class LaneProduct(torch.autograd.Function):
    """x w^T of every lane, [m, rows, n], from inputs [m, rows, k] and weights [m, n, k].

    The gradient of w is g^T x, which lies in memory as w does. Torch's own rule for stacks of matrices computes
    x^T g and transposes it, which takes MKL four times as long if n is small.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        """Return the products."""
        ctx.save_for_backward(x, w)
        return _product(x, w.transpose(1, 2))

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, Tensor | None]:
        """Return the gradients of both."""
        x, w = ctx.saved_tensors
        to_x, to_w = ctx.needs_input_grad
        return _product(g, w) if to_x else None, _product(g.transpose(1, 2), x) if to_w else None


def _product(a: Tensor, b: Tensor) -> Tensor:
    """Return the products of two stacks of matrices by the faster library."""
    output: Tensor = product(a, b) if fast(a, b) else torch.bmm(a, b)
    return output


def fast(a: Tensor, b: Tensor, times: float = 1.0) -> bool:
    """Return whether oneDNN should multiply two matrices, or two stacks of them: float32 and large enough.

    `times` says how many times as many rows the first one will have.

    Examples:
        >>> fast(torch.zeros(2, 2), torch.zeros(2, 2))
        False
    """
    fits = a.device.type == "cpu" and a.dtype == b.dtype == torch.float32
    operations = 2 * times * a.shape[-2] * a.shape[-1] * b.shape[-1]
    return fits and operations >= FEWEST_OPERATIONS and faster_products()


def with_faster_products(graph: GraphModule) -> GraphModule:
    """Let large float32 products of a traced step run on oneDNN; change the graph in place and return it."""
    aten: Any = torch.ops.aten
    multiply = torch.ops.fedagrac.product.default
    for node in list(graph.graph.nodes):
        if node.target in (aten.mm.default, aten.bmm.default) and _fast(node.args):
            node.target = multiply
        elif node.target == aten.addmm.default and not node.kwargs and _fast(node.args[1:]):
            with graph.graph.inserting_before(node):
                multiplied = graph.graph.call_function(multiply, node.args[1:])
                added = graph.graph.call_function(aten.add.Tensor, (node.args[0], multiplied))
            node.replace_all_uses_with(added)
            graph.graph.erase_node(node)
    graph.recompile()
    return graph


def _fast(factors: tuple[Node, ...]) -> bool:
    a, b = (factor.meta["val"] for factor in factors)
    return fast(a, b)
