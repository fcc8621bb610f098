"""Which layers of a module read the input, which make the output, and what lies between.

Algorithms that cut a network into parts need the order in which layers run. The order in which a module registers
them says nothing of it, so the forward pass is traced by `torch.fx`, without data. A module that cannot be traced,
such as one that branches on values, is recorded while it computes an example.
"""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import torch
from torch import fx, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from fedagrac.core.layout import INPUT, Call, Flow

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

__all__ = ["follow"]


def follow(module: nn.Module, example: tuple[tuple[Any, ...], dict[str, Any]] | None = None) -> Flow:
    """Follow the forward pass of a module. The module and torch's random numbers stay as they are.

    `example` are arguments of the module, positional and by name, for modules that cannot be traced without data.

    Examples:
        >>> flow = follow(nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2)))
        >>> [(call.layer, sorted(call.reads)) for call in flow.calls], sorted(flow.output)
        ([('0', ['<input>']), ('1', ['0']), ('2', ['0'])], ['2'])
    """
    tracer = _Tracer()
    if tracer.is_leaf_module(module, ""):
        made = frozenset([""]) if _makes_channels(module) else frozenset([INPUT])
        return Flow((Call("", _kind(module), frozenset([INPUT])),), made)
    try:
        with torch.random.fork_rng(devices=[]):
            graph = tracer.trace(copy.deepcopy(module))
        return _flow(graph, dict(module.named_modules()))
    except Exception as error:  # whatever a module does with a stand-in for a tensor
        if example is None:
            return _unknown(error)
    try:
        return _recorded(copy.deepcopy(module), *example)
    except Exception as error:
        return _unknown(error)


def _unknown(error: Exception) -> Flow:
    """Return that a module could not be followed, and why."""
    return Flow(unknown=str(error).strip().split("\n")[0] or type(error).__name__)


class _StandIn(fx.Proxy):
    """What stands for a tensor in a traced forward pass. It has a length, so that a module may ask for it."""

    def __len__(self) -> int:
        return 2  # samples; what the layers read does not depend on how many there are


class _Tracer(fx.Tracer):
    """Traces a module with stand-ins that have a length."""

    def proxy(self, node: fx.Node) -> fx.Proxy:
        """Return the stand-in for the value of a node."""
        return _StandIn(node, self)


def _flow(graph: fx.Graph, layers: Mapping[str, nn.Module]) -> Flow:
    """Return what the nodes of a graph read. Layers with matrices of weights make channels, others keep them."""
    made: dict[fx.Node, frozenset[str]] = {}
    calls, apart, output = [], [], frozenset[str]()
    for node in graph.nodes:
        reads = frozenset[str]().union(*(made[argument] for argument in node.all_input_nodes))
        made[node] = reads
        if node.op == "placeholder":
            made[node] = frozenset([INPUT])
        elif node.op == "get_attr":
            apart += [str(node.target)] if any(map(_uses_numbers, node.users)) else []
        elif node.op == "call_module":
            layer = layers[str(node.target)]
            calls.append(Call(str(node.target), _kind(layer), reads))
            if _makes_channels(layer):
                made[node] = frozenset([str(node.target)])
        elif node.op == "output":
            output = reads
        else:
            calls.append(Call(None, _function_name(node.target), reads))
    return Flow(tuple(calls), output, tuple(apart))


def _uses_numbers(node: fx.Node) -> bool:
    """Return whether a node uses the numbers of a tensor, and not only its type or shape."""
    return node.target is not getattr or node.args[1] not in ("dtype", "device", "shape", "ndim")


def _recorded(module: nn.Module, args: tuple[Any, ...], options: dict[str, Any]) -> Flow:
    """Run a module once. Return what its layers and functions read."""
    record, tracer = _Record(module), _Tracer()
    for name, layer in module.named_modules():
        if tracer.is_leaf_module(layer, name):
            layer.register_forward_pre_hook(record.enters, with_kwargs=True)
            layer.register_forward_hook(record.leaves(name, layer), with_kwargs=True)
    record.mark((args, options), frozenset([INPUT]))
    with torch.random.fork_rng(), torch.no_grad(), record:
        output = module(*args, **options)
    reads = record.reads(output)
    return Flow(tuple(record.calls), reads, tuple(record.apart), "" if reads else "its output reads no layer")


class _Record(TorchFunctionMode):
    """Keeps which layers made every tensor, while a module computes.

    Attributes:
        calls, apart: as in `Flow`.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.calls: list[Call] = []
        self.apart: list[str] = []
        self._names = {id(parameter): name for name, parameter in module.named_parameters()}
        self._made: dict[int, tuple[torch.Tensor, frozenset[str]]] = {}  # tensors are kept, so ids stay unique
        self._within = 0  # layers that are computing

    def mark(self, values: Any, made: frozenset[str]) -> None:
        """Say which layers made some tensors."""
        self._made |= {id(leaf): (leaf, made) for leaf in tree_leaves(values) if isinstance(leaf, torch.Tensor)}

    def reads(self, values: Any) -> frozenset[str]:
        """Return which layers made some tensors."""
        known = (self._made.get(id(leaf)) for leaf in tree_leaves(values))
        return frozenset[str]().union(*(entry[1] for entry in known if entry is not None))

    def enters(self, layer: nn.Module, args: Any, options: Any) -> None:
        """Begin a call of a layer."""
        self._within += 1

    def leaves(self, name: str, layer: nn.Module) -> Callable[[nn.Module, Any, Any, Any], None]:
        """Return what ends a call of the layer with this name."""
        kind, makes_channels = _kind(layer), _makes_channels(layer)

        def end(layer: nn.Module, args: Any, options: Any, output: Any) -> None:
            self._within -= 1
            if not self._within:
                reads = self.reads((args, options))
                self.calls.append(Call(name, kind, reads))
                self.mark(output, frozenset([name]) if makes_channels else reads)

        return end

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Compute a function of tensors, and keep what it read."""
        output = func(*args, **(kwargs or {}))
        if not self._within and any(isinstance(leaf, torch.Tensor) for leaf in tree_leaves(output)):
            given = (args, kwargs or {})
            self.apart += [self._names[id(leaf)] for leaf in tree_leaves(given) if id(leaf) in self._names]
            self.calls.append(Call(None, _function_name(func), reads := self.reads(given)))
            self.mark(output, reads)
        return output


def _makes_channels(layer: nn.Module) -> bool:
    """Return whether a layer has a matrix of weights, or anything larger."""
    return any(parameter.dim() > 1 for parameter in layer.parameters())


def _kind(layer: nn.Module) -> str:
    """Return the class of a layer, and whether it keeps moving statistics though it need not."""
    name = type(layer).__name__
    tracks = isinstance(layer, nn.modules.instancenorm._InstanceNorm) and layer.track_running_stats
    return f"{name} with moving statistics" if tracks else name


def _function_name(target: Any) -> str:
    """Return the name of a function or of a method."""
    return target if isinstance(target, str) else str(getattr(target, "__name__", target))
