"""Which layers of a module read the input, which make the output, and what lies between.

Algorithms that cut a network into parts need the order in which layers run. The order in which a module registers
them says nothing of it, so the forward pass is traced by `torch.fx`, without data.
"""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import torch
from torch import fx, nn

from fedagrac.core.layout import INPUT, Call, Flow

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["follow"]


def follow(module: nn.Module) -> Flow:
    """Follow the forward pass of a module, without data. The module and torch's random numbers stay as they are.

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
    except Exception as error:  # whatever a module does with a stand-in for a tensor
        return Flow(unknown=str(error).strip().split("\n")[0] or type(error).__name__)
    return _flow(graph, dict(module.named_modules()))


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
            apart.append(str(node.target))
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
