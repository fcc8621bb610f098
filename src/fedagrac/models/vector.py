"""Any nn.Module as a function of one vector x in R^d.

Algorithms and engines use vectors; modules use named parameters. `VectorModel` holds a private copy of the user's
module and translates between the two. The user's module is never changed.
"""

from __future__ import annotations

import copy
import functools
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from fedagrac.core.layout import Flow, Layout, Parameter
from fedagrac.errors import InputError
from fedagrac.models.buffers import Buffers
from fedagrac.models.flow import follow

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

__all__ = ["VectorModel"]


class VectorModel:
    """The trainable parameters of a module, in order, as one vector.

    Attributes:
        module: the private copy of the user's module.
        names, parameters: the trainable parameters in the order of the vector.
        size: d, the length of the vector.
        buffers: the buffers that a forward pass changes, as another vector.
        example: arguments of the module for a few samples, positional and by name; None if there are no data.

    Examples:
        >>> model = VectorModel(torch.nn.Linear(3, 2))
        >>> model.size
        8
        >>> {name: tuple(view.shape) for name, view in model.views(model.initial()).items()}
        {'weight': (2, 3), 'bias': (2,)}
    """

    def __init__(
        self, module: nn.Module, device: torch.device | str = "cpu", dtype: torch.dtype | None = None
    ) -> None:
        if not isinstance(module, nn.Module):
            raise InputError("model", module, "a torch.nn.Module")
        for name, parameter in module.named_parameters():
            if isinstance(parameter, nn.parameter.UninitializedParameter):
                raise InputError(
                    f"model parameter {name}",
                    parameter,
                    "initialised parameters: run one batch through the lazy module",
                )
        trainable = {n: p for n, p in module.named_parameters() if p.requires_grad}
        if not trainable:
            raise InputError("model", type(module).__name__, "a module with at least one trainable parameter")
        dtypes = {p.dtype for p in trainable.values()}
        if dtype is None and len(dtypes) > 1:
            raise InputError(
                "model", sorted(map(str, dtypes)), "one dtype for all parameters, or an explicit dtype"
            )
        self.dtype = dtype or dtypes.pop()
        if self.dtype not in (torch.float32, torch.float64):
            raise InputError("dtype", self.dtype, "torch.float32 or torch.float64")
        self.device = torch.device(device)
        self.training = [layer.training for layer in module.modules()]
        self.module = copy.deepcopy(module).to(device=self.device, dtype=self.dtype)
        self.names = list(trainable)
        named = dict(self.module.named_parameters())
        self.parameters = [named[name] for name in self.names]
        self._shapes = [p.shape for p in self.parameters]
        self._sizes = [p.numel() for p in self.parameters]
        self.size = sum(self._sizes)
        self.buffers = Buffers(self.module)
        self.example: tuple[tuple[Any, ...], dict[str, Any]] | None = None
        self._flow: Flow | None = None

    def initial(self) -> Tensor:
        """Return x_1, the weights of the user's module."""
        return torch.cat([p.detach().reshape(-1) for p in self.parameters]).clone()

    def views(self, x: Tensor) -> dict[str, Tensor]:
        """Return the named parameters as views of x."""
        pieces = torch.split(x, self._sizes)
        return {
            name: piece.view(shape) for name, piece, shape in zip(self.names, pieces, self._shapes, strict=True)
        }

    def row_views(self, rows: Tensor) -> dict[str, Tensor]:
        """Return the named parameters of many models, each [m, ...], as views of their rows [m, d]."""
        pieces = torch.split(rows, self._sizes, dim=1)
        return {
            name: piece.view(len(rows), *shape)
            for name, piece, shape in zip(self.names, pieces, self._shapes, strict=True)
        }

    @property
    def layout(self) -> Layout:
        """The names, shapes and layers of the trainable parameters, in the order of the vector."""
        layers = dict(self.module.named_modules())
        owners = [layers[name.rpartition(".")[0]] for name in self.names]
        return Layout(
            tuple(
                Parameter(name, tuple(shape), type(layer).__name__, _groups(layer))
                for name, shape, layer in zip(self.names, self._shapes, owners, strict=True)
            ),
            frozen=tuple(name for name, _ in self.module.named_parameters() if name not in self.names),
            tied=self._tied,
            flow=self._follow,
        )

    @functools.cached_property
    def _tied(self) -> tuple[str, ...]:
        """The other names of parameters that several layers share."""
        first = {name for name, _ in self.module.named_parameters()}
        return tuple(n for n, _ in self.module.named_parameters(remove_duplicate=False) if n not in first)

    def _follow(self) -> Flow:
        """Return what the module computes from what. It is traced when it is first asked for."""
        if self._flow is None:
            self._flow = follow(self.module, self.example)
        return self._flow

    @property
    def has_dropout(self) -> bool:
        """Whether the module has a dropout layer, or recurrent layers with dropout between them."""
        return any(
            isinstance(layer, nn.modules.dropout._DropoutNd)
            or (isinstance(layer, nn.RNNBase) and layer.dropout > 0)
            for layer in self.module.modules()
        )

    def bind(self, x: Tensor) -> None:
        """Make the private module's parameters views of x, so that the module sees every change of x."""
        for parameter, view in zip(self.parameters, self.views(x).values(), strict=True):
            parameter.data = view

    def gradient(self, loss: Tensor) -> Tensor:
        """Return d loss / d x as one vector; the bound module must have computed the loss."""
        return torch.cat([piece.reshape(-1) for piece in self.gradient_pieces(loss)])

    def gradient_pieces(self, loss: Tensor) -> Sequence[Tensor]:
        """Return d loss / d x by parameter; the bound module must have computed the loss."""
        pieces: Sequence[Tensor] = torch.autograd.grad(
            loss, self.parameters, allow_unused=True, materialize_grads=True
        )
        return pieces

    def in_double(self) -> VectorModel:
        """Return the same model in float64, with a module of its own.

        Examples:
            >>> VectorModel(torch.nn.Linear(3, 2)).in_double().initial().dtype
            torch.float64
        """
        double = VectorModel(self.module, self.device, torch.float64)
        double.training = self.training
        double.buffers.adopt(self.buffers.names)
        return double

    def train(self) -> None:
        """Put the module into training mode; layers that the user left in eval() stay in it."""
        if (
            len(set(self.training)) == 1
        ):  # a whole module in eval(), as loaders return it, says nothing of its layers
            self.module.train()
            return
        for layer, training in zip(self.module.modules(), self.training, strict=True):
            layer.training = training

    def eval(self) -> None:
        """Put the module into evaluation mode."""
        self.module.eval()

    def export(self, x: Tensor, buffers: Tensor | None = None) -> nn.Module:
        """Return a new module with the weights x and these moving buffers; None for the buffers as given."""
        self.buffers.put(buffers)
        module = copy.deepcopy(self.module)
        named = dict(module.named_parameters())
        for name, view in self.views(x).items():
            named[name].data = view.detach().clone()
        for layer, training in zip(module.modules(), self.training, strict=True):
            layer.training = training
        return module


def _groups(layer: nn.Module) -> int:
    """Return the groups of a convolution or of a group normalization; 1 for other layers."""
    groups = layer.num_groups if isinstance(layer, nn.GroupNorm) else getattr(layer, "groups", 1)
    return groups if isinstance(groups, int) else 1
