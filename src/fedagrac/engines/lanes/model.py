"""The module as a function of many lanes: the loss and the gradient of every row of a matrix of models."""

from __future__ import annotations

import contextlib
import warnings
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch.func import functional_call, vmap

from fedagrac.engines.lanes.layers import RoutedLayers, convolutions_of, faster_as_products
from fedagrac.engines.serial import training

if TYPE_CHECKING:
    from torch import Tensor

    from fedagrac.engines.workload import Workload

__all__ = ["LaneModel"]


class LaneModel:
    """Computes losses and gradients of many lanes, the module's forward vmapped over their models.

    Attributes:
        layers: how layers run for many lanes; None for torch's own vmap rules. On a GPU `route` sets them.
    """

    def __init__(self, workload: Workload, fused: bool) -> None:
        self.workload = workload
        on_gpu = workload.model.device.type == "cuda"
        self.layers = None if on_gpu else RoutedLayers(side_by_side=True, fused=fused)
        self._losses = vmap(self._loss, in_dims=(0, 0, 0), randomness="different")

    def gradient(self, X: Tensor, samples: Tensor, shifts: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return each lane's loss, [m], and gradient, [m, d], at its own model over its own batch."""
        losses, pieces = self.pieces(list(self.workload.model.row_views(X).values()), samples, shifts)
        G = torch.cat([piece.reshape(len(X), -1) for piece in pieces], 1)
        if self.workload.weight_decay:
            G.add_(X, alpha=self.workload.weight_decay)
        return losses, G

    def pieces(
        self,
        blocks: list[Tensor],
        samples: Tensor,
        shifts: Tensor | None,
        pool: tuple[Tensor, Tensor] | None = None,
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Return each lane's loss, [m], and its gradient by parameter, each [m, ...], without weight decay."""
        w = self.workload
        m, batch = samples.shape
        inputs, targets = w.load(samples.reshape(-1), None if shifts is None else shifts.reshape(-1, 3), pool)
        leaves = [block.detach().requires_grad_() for block in blocks]
        with torch.enable_grad(), self.layers or contextlib.nullcontext():
            losses = self._losses(
                dict(zip(w.model.names, leaves, strict=True)),
                inputs.reshape(m, batch, *inputs.shape[1:]),
                targets.reshape(m, batch, *targets.shape[1:]),
            )
            # outside the vmap: the same numbers as vmap(grad), with less overhead
            gradients = torch.autograd.grad(losses.sum(), leaves, allow_unused=True, materialize_grads=True)
        return losses.detach(), gradients

    def _loss(self, parameters: dict[str, Tensor], inputs: Tensor, targets: Tensor) -> Tensor:
        """Return one lane's loss as a function of its parameters."""
        output = functional_call(self.workload.model.module, parameters, (inputs,))
        return self.workload.loss(output, targets)

    def route(self, lanes: int) -> None:
        """Choose, once and on a GPU only, which convolutions run as products of patches."""
        w = self.workload
        if self.layers is not None or w.model.device.type != "cuda":
            return
        batch = int(w.batch_sizes(np.arange(w.federation.num_clients)).max())
        inputs, _ = w.load(torch.zeros(batch, dtype=torch.int64, device=w.model.device))
        convolutions = convolutions_of(w.model.module, inputs)
        self.layers = RoutedLayers(faster_as_products(convolutions, lanes, w.model.device, w.model.dtype))

    def check(self) -> bool:
        """Return whether two lanes can step together; if not, warn and name the layer that cannot be batched."""
        w = self.workload
        X = w.model.initial().repeat(2, 1)
        samples = torch.zeros((2, 2), dtype=torch.int64, device=w.model.device)
        for layers in dict.fromkeys([self.layers, None]):  # with our own layers, then with torch's vmap rules
            self.layers = layers
            try:
                with training(w):
                    self.gradient(X, samples, None)
            except Exception as error:
                failure = error
            else:
                if self.layers is not None and not self.layers.used:
                    self.layers = None
                return True
        reason = str(failure).strip().splitlines()[0] if str(failure).strip() else type(failure).__name__
        layer = self._failing_layer(samples[0])
        warnings.warn(f"lanes cannot batch {layer}, so clients run one after another: {reason}", stacklevel=4)
        return False

    def _failing_layer(self, samples: Tensor) -> str:
        """Return the innermost layer whose vmapped forward fails, or "the loss"."""
        w = self.workload
        entered: list[str] = []
        left: list[str] = []
        hooks = []
        for name, layer in w.model.module.named_modules():
            title = f"{name or 'the module'} ({type(layer).__name__})"
            hooks.append(layer.register_forward_pre_hook(lambda *_, title=title: entered.append(title)))
            hooks.append(layer.register_forward_hook(lambda *_, title=title: left.append(title)))
        inputs, _ = w.load(samples)
        with contextlib.suppress(Exception), training(w):
            rows = w.model.row_views(w.model.initial().repeat(2, 1))
            vmap(lambda p, X: functional_call(w.model.module, p, (X,)), randomness="different")(
                rows, torch.stack([inputs, inputs])
            )
        for hook in hooks:
            hook.remove()
        unfinished = [title for title in entered if title not in left]
        return f"layer {unfinished[-1]}" if unfinished else "the loss"
