"""The module as a function of many lanes: the loss and the gradient of every row of a matrix of models."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import re
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn
from torch.func import functional_call, vmap

from fedagrac.core.optimizers import ascent_factors
from fedagrac.data.trees import map_leaves, num_samples
from fedagrac.engines.lanes.layers import RoutedLayers, convolutions_of
from fedagrac.engines.lanes.modes import CannotBatchError, as_if_compiled
from fedagrac.engines.lanes.points import per_lane
from fedagrac.engines.lanes.positions import ChangedCallsError, UsedPositions, used_positions
from fedagrac.engines.lanes.recurrent import weights_as_given
from fedagrac.engines.lanes.routes import choose_routes
from fedagrac.engines.precision import Precision, products
from fedagrac.engines.serial import seed_dropout, training

if TYPE_CHECKING:
    from torch import Tensor

    from fedagrac.engines.lanes.kernels.patches import Convolution
    from fedagrac.engines.lanes.points import Points
    from fedagrac.engines.workload import Workload

__all__ = ["LaneModel"]

COMPARED = 8
"""The samples of each of the two lanes whose gradients are compared with those of the module itself."""

ROUNDED = 0.05
"""The largest relative difference of float32 gradients that may come from rounding."""


_UNRULED = re.compile(r".*performance drop because we have not yet implemented the batching rule for (\S+)\.")
"""What torch says of an operation that it runs for one lane after another."""


class OtherGradientError(Exception):
    """Lanes have other gradients than the module itself. The message gives the reason in one line."""


class LaneModel:
    """Computes losses and gradients of many lanes, the module's forward vmapped over their models.

    Attributes:
        layers: how layers run for many lanes; None for torch's own vmap rules. On a GPU `route` sets them.
        fused: whether layers consist of operations that a compiler can fuse, for compiled steps.
        traced: whether the module is told that it is compiled; a module that looks at numbers may then not do so.
        slow: whether some operations run for one lane after another.
    """

    def __init__(self, workload: Workload, fused: bool) -> None:
        self.workload, self.fused, self.traced, self.slow = workload, fused, fused, False
        on_gpu = workload.model.device.type == "cuda"
        modules = workload.model.module.modules()
        self._recurrent = [layer for layer in modules if isinstance(layer, nn.RNNBase)]
        self.layers = None if on_gpu else RoutedLayers(side_by_side=True, fused=fused)
        self._losses = vmap(self._loss, randomness="different")

    def gradient(
        self,
        X: Tensor,
        samples: Tensor,
        shifts: Tensor | None,
        buffers: dict[str, Tensor] | None = None,
        generators: Sequence[torch.Generator] | None = None,
        points: Points | None = None,
        decayed: bool = True,
    ) -> tuple[Tensor, Tensor, dict[str, Tensor], Tensor | None]:
        """Return each lane's loss, [m], its gradient, [m, d], over its own batch, and its buffers afterwards.

        The fourth is as in `pieces`, [m, d].
        """
        blocks = list(self.workload.model.row_views(X).values())
        losses, pieces, buffers, Y = self.pieces(
            blocks, samples, shifts, buffers=buffers, generators=generators, points=points, decayed=decayed
        )
        rows = None
        if Y is not None:
            rows = X if Y is blocks else torch.cat([block.reshape(len(X), -1) for block in Y], 1)
        return losses, torch.cat([piece.reshape(len(X), -1) for piece in pieces], 1), buffers, rows

    def pieces(
        self,
        blocks: list[Tensor],
        samples: Tensor,
        shifts: Tensor | None,
        pool: tuple[Any, Any] | None = None,
        buffers: dict[str, Tensor] | None = None,
        generators: Sequence[torch.Generator] | None = None,
        points: Points | None = None,
        decayed: bool = True,
    ) -> tuple[Tensor, Sequence[Tensor], dict[str, Tensor], list[Tensor] | None]:
        """Return each lane's loss, [m], its gradient by parameter, each [m, ...], and its buffers afterwards.

        Buffers that are not given are those of the user's module. Gradients are taken at the models, or at points
        beside them; losses and buffers of an ascent or an anchor are those at the models. With `decayed`,
        gradients have their weight decay, and the fourth is None. Otherwise the fourth is what weight decay is a
        multiple of, parameter by parameter.
        """
        w = self.workload
        m, batch = samples.shape
        frames = None if shifts is None else shifts.reshape(-1, 3)
        inputs, targets = (
            map_leaves(lambda leaf: leaf.reshape(m, batch, *leaf.shape[1:]), tree)
            for tree in w.load(samples.reshape(-1), frames, pool, generators)
        )
        moving = self.given_buffers(m) if buffers is None else buffers

        Y: list[Tensor] = blocks
        if points is None or (points.anchor is None and points.ascent is None):
            beside, scale = (None, None) if points is None else (points.beside, points.scale)
            if beside is not None:
                Y = [X + p for X, p in zip(blocks, beside, strict=True)]
            losses, gradients, moved = self._pieces_at(Y, scale, moving, inputs, targets, decayed)
            return losses, gradients, moved, None if decayed else Y
        before = {name: values.clone() for name, values in moving.items()}  # a pass may change buffers in place
        # an ascent goes along the gradient of the whole objective, in any case
        with_decay = decayed or points.anchor is None
        losses, gradients, moved = self._pieces_at(blocks, None, moving, inputs, targets, with_decay)
        if points.anchor is not None:
            at_anchor = self._pieces_at(points.anchor, None, before, inputs, targets, decayed)[1]
            gradients = [g - a for g, a in zip(gradients, at_anchor, strict=True)]
            if not decayed:
                Y = [X - a for X, a in zip(blocks, points.anchor, strict=True)]
        else:
            assert points.ascent is not None
            squares = torch.stack([g.square().flatten(1).sum(1) for g in gradients]).sum(0)
            factors = ascent_factors(squares, points.ascent)
            Y = [X + per_lane(factors, g) * g for X, g in zip(blocks, gradients, strict=True)]
            gradients = self._pieces_at(Y, None, before, inputs, targets, decayed)[1]
        return losses, gradients, moved, None if decayed else Y

    def _pieces_at(
        self,
        models: list[Tensor],
        scale: list[Tensor] | None,
        buffers: dict[str, Tensor],
        inputs: Any,
        targets: Any,
        decayed: bool,
    ) -> tuple[Tensor, Sequence[Tensor], dict[str, Tensor]]:
        """Return losses, gradients and buffers at these models, whose networks are those of scale o models."""
        w = self.workload
        network = models if scale is None else [X * s for X, s in zip(models, scale, strict=True)]
        leaves = [block.detach().requires_grad_() for block in network]
        with torch.enable_grad(), self.layers or contextlib.nullcontext():
            losses, moved = self._forward(dict(zip(w.model.names, leaves, strict=True)), buffers, inputs, targets)
            # outside the vmap: the same numbers as vmap(grad), with less overhead
            gradients: Sequence[Tensor] = torch.autograd.grad(
                losses.sum(), leaves, allow_unused=True, materialize_grads=True
            )
        if scale is not None:
            gradients = [g * s for g, s in zip(gradients, scale, strict=True)]
        if w.weight_decay and decayed:
            gradients = [g.add(X, alpha=w.weight_decay) for g, X in zip(gradients, models, strict=True)]
        return losses.detach(), gradients, {name: values.detach() for name, values in moved.items()}

    def _forward(self, *arguments: Any) -> tuple[Tensor, dict[str, Tensor]]:
        """Return losses and buffers; if the module makes other calls than in its trial, all positions count."""
        try:
            losses, moved = self._losses(*arguments)
        except ChangedCallsError:
            assert self.layers is not None
            self.layers.positions = None
            losses, moved = self._losses(*arguments)
        return losses, moved

    def given_buffers(self, lanes: int) -> dict[str, Tensor]:
        """Return the moving buffers of the user's module for this many lanes, each [m, ...]."""
        model = self.workload.model
        if not model.buffers.names:
            return {}
        return model.buffers.rows(model.buffers.given(model.dtype).expand(lanes, -1))

    def _loss(
        self, parameters: dict[str, Tensor], buffers: dict[str, Tensor], inputs: Any, targets: Any
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Return one lane's loss as a function of its parameters, and its buffers afterwards."""
        args, options = self.workload.arguments(inputs)
        state = parameters | buffers  # where the module replaces a buffer, torch replaces it here, too
        module = self.workload.model.module
        with self._lane_by_lane(), contextlib.nullcontext() if self.layers is None else self.layers.forward_pass():
            output = self.workload.computed(lambda: functional_call(module, state, args, options))
        return self.workload.loss(output, targets), {name: state[name] for name in buffers}

    @contextlib.contextmanager
    def _lane_by_lane(self) -> Iterator[None]:
        """Run a forward pass in which the module looks at no numbers and no addresses, which lanes do not have."""
        with as_if_compiled() if self.traced else contextlib.nullcontext(), weights_as_given(self._recurrent):
            yield

    def route(self, lanes: int) -> None:
        """Choose, once and on a GPU only, the route of every convolution."""
        w = self.workload
        if self.layers is not None or w.model.device.type != "cuda":
            return
        batch = int(w.batch_sizes(np.arange(w.federation.num_clients)).max())
        samples = torch.zeros(batch, dtype=torch.int64, device=w.model.device)
        inputs, _ = w.load(samples, generators=w.generators([0], 0))
        convolutions = convolutions_of(lambda: w.call(inputs))
        routes = choose_routes(convolutions, lanes, w.model.device, w.product_dtype, fused=self.fused)
        self.use_routes(routes, batch)

    def use_routes(self, routes: dict[Convolution, str], batch: int) -> None:
        """Let convolutions take these routes. If two lanes then go wrong, warn and use torch's rules."""
        w = self.workload
        self.layers = RoutedLayers(routes, fused=self.fused)
        X = w.model.initial().repeat(2, 1)
        samples = torch.arange(2 * batch, device=w.model.device).reshape(2, batch) % num_samples(w.inputs)
        try:
            agrees = self._compared(X, samples)
            reason = "the gradient is another one than that of the module itself"
        except Exception as error:  # a layer may not take the layout of a route
            agrees, reason = False, _first_line(error)
        if not agrees:
            self.layers = RoutedLayers(fused=self.fused)
            warnings.warn(f"convolutions run as grouped ones: with faster routes {reason}", stacklevel=5)

    def uncompile(self) -> bool:
        """Replace layers for compiled steps by those for others; return whether they are the layers of a GPU."""
        self.fused = False
        layers = self.layers or RoutedLayers(side_by_side=self.workload.model.device.type != "cuda")
        self.layers = RoutedLayers(layers.routes, layers.side_by_side)
        self.layers.positions = layers.positions
        return not layers.side_by_side

    def check(self) -> bool:
        """Return whether two lanes can step together; if not, warn and name the layer that cannot be batched."""
        w = self.workload
        X = w.model.initial().repeat(2, 1)
        samples = torch.arange(2 * COMPARED, device=w.model.device).reshape(2, COMPARED) % num_samples(w.inputs)
        on_gpu = w.model.device.type == "cuda"
        if self.layers is not None:
            self.layers.times = float(w.batch_sizes(np.arange(w.federation.num_clients)).max()) / COMPARED
        # in bf16 casts are calls, too; and a forward pass that moved buffers could not be made again
        if self.layers is not None and w.precision != "bf16" and not w.model.buffers.names:
            self.layers.positions = self._positions(samples[0])
        ours = RoutedLayers() if on_gpu else self.layers
        failures: list[Exception] = []
        for layers, traced in itertools.product((ours, None), (self.fused, not self.fused)):
            self.layers, self.traced = layers, traced  # None: torch's vmap rules
            try:
                with _without_rules() as unruled:
                    self._compare(X, samples)
            except Exception as error:
                failures.append(error)
                if isinstance(error, CannotBatchError):
                    break
            else:
                if unruled:
                    self._say_slow(samples[0], unruled)
                if on_gpu or (self.layers is not None and not self.layers.used):
                    self.layers = None
                return True
        for failure in failures:
            if isinstance(failure, OtherGradientError):
                warnings.warn(f"clients run one after another: {failure}", stacklevel=4)
                return False
        self.traced = True  # the module comes further then
        layer, cause = self._failing_layer(samples[0])
        reason = _first_line(cause or failures[0])
        warnings.warn(f"lanes cannot batch {layer}, so clients run one after another: {reason}", stacklevel=4)
        return False

    def _compare(self, X: Tensor, samples: Tensor) -> None:
        """Let two equal models step together.

        Raises:
            OtherGradientError: their gradients are not those of the module itself.
        """
        agrees = self._compared(X, samples)
        if not agrees and self.layers is not None and self.layers.positions is not None:
            self.layers.positions = None  # the loss, or a hook, looks at more than the module's output
            agrees = self._compared(X, samples)
        if not agrees:
            raise OtherGradientError("a vmap rule of torch gives another gradient than the module itself")

    def _positions(self, samples: Tensor) -> UsedPositions | None:
        """Return the positions of sequences that the module uses; None if it uses all, or on any doubt.

        A module whose gradient is random cannot be compared with itself later, which is doubt enough.
        """
        w = self.workload
        x = w.model.initial()
        try:
            with training(w), self._lane_by_lane():
                inputs, _ = w.load(samples, generators=w.generators([0], 0))
                args, options = w.arguments(inputs)
                state = dict(w.model.views(x))
                positions = used_positions(lambda: functional_call(w.model.module, state, args, options))
            if positions is None or torch.equal(self._alone(x, samples, 0), self._alone(x, samples, 1)):
                return positions
            return None
        except Exception:
            return None  # the check that follows names the reason
        finally:
            w.model.buffers.put(None)

    def _compared(self, X: Tensor, samples: Tensor) -> bool:
        """Return whether two equal models step together and have the gradients of the module itself."""
        gradients = self._gradients_in("float32", X, samples)
        if self.workload.precision == "bf16":
            self._gradients_in("bf16", X, samples)  # not compared: rounding differs
        return self._agrees(X[0], samples, gradients) or self._agrees_in_double(samples, gradients)

    def _gradients_in(self, precision: Precision, X: Tensor, samples: Tensor) -> Tensor:
        """Return each lane's gradient, [m, d], with products of this precision."""
        w = self.workload
        self.workload = dataclasses.replace(w, precision=precision)
        try:
            with training(w), products(precision):
                return self.gradient(X, samples, None, generators=w.generators([0, 0], 0))[1]
        finally:
            self.workload = w

    def _agrees_in_double(self, samples: Tensor, gradients: Tensor) -> bool:
        """Return whether gradients of float32 that differ a little agree in float64.

        In a deep network rounding moves some ReLU to the other side of zero, and a gradient by a percent.
        """
        w = self.workload
        x = w.model.initial()
        if x.dtype == torch.float64 or not self._agrees(x, samples, gradients, ROUNDED):
            return False
        numbers = torch.arange(samples.numel(), device=samples.device).reshape(samples.shape)
        double = LaneModel(w.in_double(samples.reshape(-1)), fused=False)
        double.layers, double.traced = self.layers, self.traced
        X = double.workload.model.initial().repeat(2, 1)
        try:
            precise = double._gradients_in("float32", X, numbers)
            return double._agrees(X[0], numbers, precise)
        except Exception:  # a transform or a loss that takes float32 alone
            return False

    def _agrees(self, x: Tensor, samples: Tensor, gradients: Tensor, tolerance: float | None = None) -> bool:
        """Return whether the lanes' gradients are those of the module itself.

        A module whose gradient is random, because of dropout for example, is not compared.
        """
        model = self.workload.model
        tolerance = tolerance or torch.finfo(x.dtype).eps ** 0.5
        for lane, rows in enumerate(samples):
            alone, again = self._alone(x, rows, seed=0), self._alone(x, rows, seed=1)
            if not torch.equal(alone, again):
                return True
            floor = 1e-3 * alone.abs().max()
            for ours, theirs in zip(
                model.views(gradients[lane]).values(), model.views(alone).values(), strict=True
            ):
                if not bool((ours - theirs).abs().max() <= tolerance * (theirs.abs().max() + floor)):
                    return bool(torch.isnan(theirs).any())
        return True

    def _alone(self, x: Tensor, samples: Tensor, seed: int) -> Tensor:
        """Return the gradient at x over some samples, without vmap; the seed is that of dropout."""
        w = dataclasses.replace(self.workload, precision="float32")
        w.model.bind(x.clone())
        w.model.buffers.put(None)
        with training(w), torch.enable_grad(), products("float32"):
            seed_dropout(w, 0, seed)
            inputs, targets = w.load(samples, generators=w.generators([0], 0))
            gradient = w.model.gradient(w.loss(w.call(inputs), targets))
        return gradient.add(x, alpha=w.weight_decay)

    def _failing_layer(self, samples: Tensor) -> tuple[str, Exception | None]:
        """Return the innermost layer whose vmapped forward fails, or "the loss", and the error.

        Without an error it is "the backward pass".
        """
        entered: list[str] = []
        left: list[str] = []
        try:
            self._pass_layers(samples, entered.append, left.append)
        except Exception as error:
            unfinished = [title for title in entered if title not in left]
            return (unfinished[-1] if unfinished else "the loss"), error
        return "the backward pass", None

    def _say_slow(self, samples: Tensor, operations: set[str]) -> None:
        """Warn of layers in which lanes run one after another, because torch has no rule for an operation."""
        self.slow = True
        inside: list[str] = []
        slow: dict[str, None] = {}
        with _without_rules() as unruled:

            def attribute() -> None:
                if unruled and inside:
                    slow[inside[-1]] = None
                unruled.clear()

            def entered(title: str) -> None:
                attribute()
                inside.append(title)

            def left(title: str) -> None:
                attribute()
                inside.pop()

            with contextlib.suppress(Exception):
                self._pass_layers(samples, entered, left)
        names = " and ".join(slow) or "the loss or the backward pass"
        reason = f"torch has no rule for many lanes of {', '.join(sorted(operations))}"
        warnings.warn(f"clients run one after another in {names}, which is slower: {reason}", stacklevel=5)

    def quiet(self) -> contextlib.AbstractContextManager[object]:
        """Return a context without torch's warnings of operations that `check` has warned of."""
        return _without_rules() if self.slow else contextlib.nullcontext()

    def _pass_layers(self, samples: Tensor, entered: Callable[[str], Any], left: Callable[[str], Any]) -> None:
        """Run module and loss for two lanes; call both functions with the titles of layers, as passes go on."""
        w = self.workload
        hooks = []
        for name, layer in w.model.module.named_modules():
            title = f"{f'layer {name}' if name else 'the module'} ({type(layer).__name__})"
            hooks.append(layer.register_forward_pre_hook(lambda *_, title=title: entered(title)))
            hooks.append(layer.register_forward_hook(lambda *_, title=title: left(title)))
        two = [
            map_leaves(lambda leaf: torch.stack([leaf, leaf]), part)
            for part in w.load(samples, generators=w.generators([0], 0))
        ]
        try:
            with training(w), self.layers or RoutedLayers(side_by_side=w.model.device.type != "cuda"):
                self._losses(w.model.row_views(w.model.initial().repeat(2, 1)), self.given_buffers(2), *two)
        finally:
            for hook in hooks:
                hook.remove()


def _first_line(error: Exception) -> str:
    """Return the first line of what an error says, without torch's requests, or its name."""
    line = next(iter(str(error).strip().splitlines()), type(error).__name__)
    return re.sub(r"[.,] please .*", "", line, flags=re.IGNORECASE).removeprefix("vmap: ")


@contextlib.contextmanager
def _without_rules() -> Iterator[set[str]]:
    """Run a block without torch's warnings of operations that have no vmap rule; collect their names instead."""
    unruled: set[str] = set()
    with warnings.catch_warnings():
        show = warnings.showwarning

        def collect(message: Warning | str, *args: Any, **options: Any) -> None:
            operation = _UNRULED.search(str(message))
            if operation is None:
                show(message, *args, **options)
            else:
                unruled.add(operation[1])

        warnings.filterwarnings("always", message=_UNRULED.pattern)
        warnings.showwarning = collect
        yield unruled
