"""Steps compiled to machine code.

A step is traced to a flat list of operations: forward, backward and update of all lanes. Torch's inductor then
compiles it. Compiled code stays on disk, so the next process needs a few seconds instead of tens.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shlex
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.utils import _pytree as pytree

from fedagrac.engines.lanes.kernels.products import with_faster_products
from fedagrac.files import cache_folder

if TYPE_CHECKING:
    from torch import Tensor
    from torch.fx import GraphModule, Node

__all__ = ["CannotCompileError", "compile_step", "traced_step", "with_roundings", "without_identities"]

log = logging.getLogger("fedagrac")


class CannotCompileError(Exception):
    """A step could not be compiled. The message gives the reason in one line."""


def compile_step(
    step: Callable[[Any], None], buffers: Any, rounded: Sequence[tuple[Tensor, Tensor]] = ()
) -> Callable[[], Any]:
    """Return the step, which changes the buffers in place, compiled for exactly their shapes.

    The compiled step runs once on the buffers.

    Args:
        step: makes one step, given the buffers.
        buffers: a tree of tensors.
        rounded: some of the tensors, and for each a tensor with the same numbers rounded to another type. The step
            reads these instead of rounding, and leaves them rounded to what it has made of the numbers.

    Raises:
        CannotCompileError: compiling failed for any reason; uncompiled steps give the same numbers.
    """
    cache = cache_folder()
    if cache is not None:
        os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(cache / "compiled"))
    begun = time.perf_counter()
    try:
        gpus = {
            leaf.device for leaf in pytree.tree_leaves(buffers) if isinstance(leaf, torch.Tensor) and leaf.is_cuda
        }
        with warnings.catch_warnings(), torch.random.fork_rng(gpus):  # the state of dropout stays unchanged
            warnings.simplefilter("ignore")  # they concern torch's internals; users cannot act on them
            traced, tensors = traced_step(step, buffers, rounded)
            if gpus:
                traced = without_identities(traced)
            with _quoted_library_path():
                compiled = _compiled(traced, tensors)
                compiled(*tensors)
    except Exception as error:
        lines = [line for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
        raise CannotCompileError(lines[0][:200]) from error
    log.info("compiled a step in %.1f s", time.perf_counter() - begun)
    return lambda: compiled(*tensors)


def traced_step(
    step: Callable[[Any], None], buffers: Any, rounded: Sequence[tuple[Tensor, Tensor]]
) -> tuple[GraphModule, list[Tensor]]:
    """Return a step as a graph of operations, and its inputs; the arguments are those of `compile_step`."""
    from torch.fx.experimental.proxy_tensor import make_fx

    leaves, shape = pytree.tree_flatten(buffers)
    tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]

    def flat(*values: Tensor) -> None:
        rest = iter(values)
        step(
            pytree.tree_unflatten(
                [next(rest) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves], shape
            )
        )

    graph = _with_pixels(_with_own_memory(with_faster_products(make_fx(flat)(*tensors))))
    places = {id(tensor): i for i, tensor in enumerate(tensors)}
    copies = [copy for _, copy in rounded]
    return with_roundings(graph, [places[id(exact)] for exact, _ in rounded], copies), tensors + copies


def _compiled(graph: GraphModule, tensors: list[Tensor]) -> Callable[..., Any]:
    """Return the graph as machine code for tensors of exactly these shapes; code on disk is used again.

    `torch.compile` would trace the graph once more, and look at its arguments in every call. Torch finds code on
    disk only in a context of tracing with a fake mode and symbolic shapes; here all shapes are numbers.
    """
    from torch._guards import TracingContext, tracing
    from torch._inductor import compile as compile_graph
    from torch._subclasses import FakeTensorMode
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    fake = FakeTensorMode(shape_env=ShapeEnv())
    with tracing(TracingContext(fake)), torch.no_grad():
        arguments: list[Any] = [fake.from_tensor(tensor, static_shapes=True) for tensor in tensors]
        compiled: Callable[..., Any] = compile_graph(graph, arguments)
    return compiled


def _with_own_memory(graph: GraphModule) -> GraphModule:
    """Copy what lanes share before numbers are written into it; change the graph in place and return it.

    A tensor that the module makes is the same for all lanes, so vmap expands it without memory for each lane. If
    numbers are then written into it by index, inductor's code writes those of all lanes to one place (torch 2.13).
    """
    aten: Any = torch.ops.aten
    written = (
        aten.index_add.default,
        aten.index_copy.default,
        aten.index_put.default,
        aten._unsafe_index_put.default,
    )
    for node in list(graph.graph.nodes):
        if node.target in written and _overlaps(node.args[0].meta["val"]):
            with graph.graph.inserting_before(node):
                copied = graph.graph.call_function(
                    aten.clone.default, (node.args[0],), {"memory_format": torch.contiguous_format}
                )
            node.replace_input_with(node.args[0], copied)
    graph.recompile()
    return graph


def _with_pixels(graph: GraphModule) -> GraphModule:
    """Write rows of pixels in torch's operations, which a compiler fuses; change the graph in place and return it.

    Inductor would write them in the order of its neighbours, once for each product that takes them, though a copy
    in one order is asked for; so the order is forced.
    """
    from torch._inductor import inductor_prims  # it registers the operation that forces an order

    aten: Any = torch.ops.aten
    for node in list(graph.graph.nodes):
        if node.target != torch.ops.fedagrac.pixels.default:
            continue
        source: Any = node.args[0]
        steps: list[tuple[Any, tuple[Any, ...], dict[str, Any]]] = [
            (aten.permute.default, ([0, 1, 3, 4, 2],), {}),
            (aten.clone.default, (), {"memory_format": torch.contiguous_format}),
            (aten.view.default, (list(node.meta["val"].shape),), {}),
            (inductor_prims.force_stride_order, (list(node.meta["val"].stride()),), {}),
        ]
        with graph.graph.inserting_before(node):
            for operation, arguments, options in steps:
                source = graph.graph.call_function(operation, (source, *arguments), options)
                source.meta = {"val": operation(source.args[0].meta["val"], *arguments, **options)}
        node.replace_all_uses_with(source)
        graph.graph.erase_node(node)
    graph.recompile()
    return graph


def with_roundings(graph: GraphModule, places: Sequence[int], rounded: Sequence[Tensor]) -> GraphModule:
    """Let a graph read rounded inputs instead of rounding them; change the graph in place and return it.

    The rounded ones become further inputs. At the end of the graph they are rounded again from what it has made of
    the exact ones, which a compiler does while it writes those. Inputs that the graph rounds only after it has
    changed them, or not at all, stay as they are.

    Args:
        graph: the graph.
        places: the places of the exact numbers among its inputs.
        rounded: tensors of their shapes and of another type.
    """
    aten: Any = torch.ops.aten
    inputs = [node for node in graph.graph.nodes if node.op == "placeholder"]
    copies = {}
    last = inputs[-1]
    for place, tensor in zip(places, rounded, strict=True):
        with graph.graph.inserting_after(last):
            last = graph.graph.placeholder(f"rounded_{place}")
        copies[inputs[place]] = last, tensor.dtype
    memory = {exact: exact for exact in copies}  # the input in whose memory a node's numbers lie
    first_lanes = {exact: exact for exact in copies}  # nodes that are an input's first lanes as they are
    changed, read = set(), {}
    for node in list(graph.graph.nodes):
        if node.op != "call_function" or not isinstance(node.target, torch._ops.OpOverload):
            continue
        schema = node.target._schema
        for argument, value in zip(schema.arguments, node.args, strict=False):
            if not isinstance(value, torch.fx.Node) or value not in memory or argument.alias_info is None:
                continue
            memory[node] = memory[value]
            if argument.alias_info.is_write:
                changed.add(memory[value])
        source = node.args[0] if node.args else None
        if not isinstance(source, torch.fx.Node) or source not in first_lanes:
            continue
        exact = first_lanes[source]
        if node.target in (aten.alias.default, aten.detach.default) or _is_first_rows(node):
            first_lanes[node] = exact
        elif node.target == aten._to_copy.default and exact not in changed:
            copy, dtype = copies[exact]
            if {k: v for k, v in node.kwargs.items() if k not in ("layout", "device")} != {"dtype": dtype}:
                continue  # to another type or layout
            lanes = source.meta["val"].shape[0]
            with graph.graph.inserting_before(node):
                taken = graph.graph.call_function(aten.slice.Tensor, (copy, 0, 0, lanes))
            taken.meta = dict(node.meta)
            node.replace_all_uses_with(taken)
            graph.graph.erase_node(node)
            read[exact] = lanes
    with graph.graph.inserting_before(next(node for node in graph.graph.nodes if node.op == "output")):
        for exact, lanes in read.items():
            into, of = (
                graph.graph.call_function(aten.slice.Tensor, (tensor, 0, 0, lanes))
                for tensor in (copies[exact][0], exact)
            )
            graph.graph.call_function(aten.copy_.default, (into, of))
    graph.recompile()
    return graph


def _is_first_rows(node: Node) -> bool:
    """Return whether a node takes the first rows of a tensor."""
    return node.target == torch.ops.aten.slice.Tensor and node.args[1:3] == (0, 0) and len(node.args) < 5


def without_identities(graph: GraphModule) -> GraphModule:
    """Remove views that change neither shape nor strides; change the graph in place and return it.

    Vmap leaves many of them. Inductor lays out what is looked at through a view in the default order, not in the
    order of its neighbours, and then copies it from the one to the other (torch 2.13).
    """
    aten: Any = torch.ops.aten
    views = aten.permute.default, aten.view.default, aten._unsafe_view.default
    for node in list(graph.graph.nodes):
        if node.target not in views:
            continue
        before, after = node.args[0].meta["val"], node.meta["val"]
        if before.shape == after.shape and before.stride() == after.stride():
            node.replace_all_uses_with(node.args[0])
            graph.graph.erase_node(node)
    graph.recompile()
    return graph


def _overlaps(tensor: Tensor) -> bool:
    return any(size > 1 and stride == 0 for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


@contextlib.contextmanager
def _quoted_library_path() -> Iterator[None]:
    """Quote the folder of torch's libraries: inductor splits the linker's options at spaces (torch 2.13)."""
    from torch.utils import cpp_extension

    path = cpp_extension.TORCH_LIB_PATH
    if os.name == "posix":
        cpp_extension.TORCH_LIB_PATH = shlex.quote(path)
    try:
        yield
    finally:
        cpp_extension.TORCH_LIB_PATH = path
