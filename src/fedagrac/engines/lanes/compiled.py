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
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch.utils import _pytree as pytree

from fedagrac.engines.lanes.kernels.products import with_faster_products
from fedagrac.files import cache_folder

if TYPE_CHECKING:
    from torch import Tensor
    from torch.fx import GraphModule

__all__ = ["CannotCompileError", "compile_step", "without_identities"]

log = logging.getLogger("fedagrac")


class CannotCompileError(Exception):
    """A step could not be compiled. The message gives the reason in one line."""


def compile_step(step: Callable[[Any], None], buffers: Any) -> Callable[[], Any]:
    """Return the step, which changes the buffers in place, compiled for exactly their shapes.

    The compiled step runs once on the buffers.

    Raises:
        CannotCompileError: compiling failed for any reason; uncompiled steps give the same numbers.
    """
    from torch.fx.experimental.proxy_tensor import make_fx

    cache = cache_folder()
    if cache is not None:
        os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(cache / "compiled"))
    begun = time.perf_counter()
    leaves, shape = pytree.tree_flatten(buffers)
    tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]

    def flat(*values: Tensor) -> None:
        rest = iter(values)
        step(
            pytree.tree_unflatten(
                [next(rest) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves], shape
            )
        )

    try:
        gpus = {tensor.device for tensor in tensors if tensor.is_cuda}
        with warnings.catch_warnings(), torch.random.fork_rng(gpus):  # the state of dropout stays unchanged
            warnings.simplefilter("ignore")  # they concern torch's internals; users cannot act on them
            traced = _with_own_memory(with_faster_products(make_fx(flat)(*tensors)))
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
