"""A federated problem as mathematics: F_i, their gradients and Hessians, as functions of one vector.

All values are float64 and cover all data of a client, without augmentation and without dropout.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn
from torch.func import functional_call, grad, vmap

from fedagrac.data.trees import map_leaves, num_samples
from fedagrac.engines import Loss, Workload
from fedagrac.errors import InputError
from fedagrac.models.vector import VectorModel
from fedagrac.theory.exact import softmax_hessian

if TYPE_CHECKING:
    import numpy.typing as npt
    from torch import Tensor

    from fedagrac.data.federation import Federation

__all__ = ["Apply", "Problem", "as_array"]

Apply = Callable[["Tensor"], "Tensor"]
"""A symmetric matrix as a function that multiplies a vector by it."""

CHUNK = 4096
"""The number of samples that are differentiated at a time."""

NUMBERS = 2**25
"""The largest number of values in the gradients of single samples held at a time."""

LARGEST_HESSIAN = 4000
"""The largest number of parameters for which a full Hessian is computed."""

SMALL_HESSIAN = 200
"""The largest number of parameters for which a Hessian without a closed form is computed, not just applied."""


class Problem:
    """F_i(x) = mean loss of client i's samples + weight_decay / 2 |x|^2, and F = sum_i omega_i F_i.

    Attributes:
        federation: the clients and their data.
        weights: omega_i, [M].
        weight_decay: the factor of the l2 term.
        batch_size: the number of samples of a stochastic gradient; None for a client's full data.
        x1: the weights of the given module, at which a run would start.

    Examples:
        >>> import fedagrac as fg
        >>> fed = fg.Federation.from_arrays([([[1.0], [3.0]], [0, 1]), ([[2.0]], [1])])
        >>> problem = Problem(fg.models.build("logistic", features=1, classes=2), fed, weight_decay=0.1)
        >>> [round(float(value), 6) for value in problem.values(problem.x1)]  # log 2, since all weights are zero
        [0.693147, 0.693147]
    """

    def __init__(
        self,
        model: nn.Module,
        federation: Federation,
        loss: Loss | None = None,
        weight_decay: float = 0.0,
        batch_size: int | None = 20,
    ) -> None:
        vector = VectorModel(model, dtype=torch.float64)
        self.workload = Workload.of(vector, federation, loss, batch_size, "replacement", weight_decay, 0)
        if vector.buffers.names or federation.transform is not None:
            what = "a transform" if federation.transform is not None else f"the buffer {vector.buffers.names[0]}"
            accepted = "no buffer that a forward pass changes and no transform: F must be a function of x alone"
            raise InputError("model", what, accepted)
        vector.eval()
        self.default_loss = loss is None
        self.federation = federation
        self.weights = torch.as_tensor(federation.weights, dtype=torch.float64)
        self.weight_decay = weight_decay
        self.batch_size = batch_size
        self.x1 = vector.initial()

    @property
    def size(self) -> int:
        """The number of parameters."""
        return self.workload.model.size

    def _loss(self, x: Tensor, inputs: Any, targets: Any) -> Tensor:
        w = self.workload
        return w.loss(functional_call(w.model.module, w.model.views(x), *w.arguments(inputs)), targets)

    def _pieces(self, client: int) -> Iterator[tuple[float, Tensor, Tensor]]:
        """Yield a client's samples in pieces, each after its share of the samples."""
        samples = torch.from_numpy(self.federation.samples_of(client))
        for piece in torch.split(samples, CHUNK):
            yield len(piece) / len(samples), *self.workload.load(piece)

    def value(self, client: int, x: Tensor) -> Tensor:
        """Return F_i(x)."""
        with torch.no_grad():
            mean = sum(share * self._loss(x, X, y) for share, X, y in self._pieces(client))
        return mean + self.weight_decay / 2 * x @ x

    def values(self, x: Tensor) -> Tensor:
        """Return every F_i(x), [M]."""
        return torch.stack([self.value(i, x) for i in range(self.federation.num_clients)])

    def total(self, x: Tensor) -> float:
        """Return F(x)."""
        return float(self.weights @ self.values(x))

    def gradient(self, client: int, x: Tensor) -> Tensor:
        """Return the gradient of F_i at x."""
        each = (share * grad(self._loss)(x, X, y) for share, X, y in self._pieces(client))
        return sum(each, start=self.weight_decay * x)

    def gradients(self, x: Tensor) -> Tensor:
        """Return the gradient of every F_i at x, [M, d]."""
        return torch.stack([self.gradient(i, x) for i in range(self.federation.num_clients)])

    def total_gradient(self, x: Tensor) -> Tensor:
        """Return the gradient of F at x."""
        return self.weights @ self.gradients(x)

    def curvature(self, client: int, x: Tensor, v: Tensor) -> Tensor:
        """Return the product of the Hessian of F_i at x and v, without computing the Hessian."""
        product = self.weight_decay * v
        x = x.detach().requires_grad_()
        for share, X, y in self._pieces(client):
            with torch.enable_grad():
                (g,) = torch.autograd.grad(self._loss(x, X, y), x, create_graph=True)
                along = g @ v
            if along.requires_grad:  # otherwise the loss is linear in x here
                product = product + share * torch.autograd.grad(along, x)[0]
        return product

    def hessian(self, client: int, x: Tensor) -> Tensor:
        """Return the Hessian of F_i at x, [d, d]: in closed form for softmax regression, or column by column."""
        if self.size > LARGEST_HESSIAN:
            raise InputError("model", f"{self.size} parameters", f"at most {LARGEST_HESSIAN} for a full Hessian")
        layer = self._softmax_layer()
        if layer is None:
            return torch.stack([self.curvature(client, x, e) for e in torch.eye(self.size, dtype=x.dtype)], 1)
        hessian = self.weight_decay * torch.eye(self.size, dtype=x.dtype)
        for share, X, _ in self._pieces(client):
            hessian += share * softmax_hessian(X.flatten(1), x, bias=layer.bias is not None)
        return hessian

    def hessian_at(self, x: Tensor, client: int | None = None) -> Apply:
        """Return a function that multiplies the Hessian of F_i at x, or of F without a client, by a vector."""
        clients = range(self.federation.num_clients) if client is None else [client]
        weights = self.weights if client is None else torch.ones(client + 1, dtype=x.dtype)
        if self.size <= (SMALL_HESSIAN if self._softmax_layer() is None else LARGEST_HESSIAN):
            matrix = sum((weights[i] * self.hessian(i, x) for i in clients), start=torch.zeros(()))
            return lambda v: matrix @ v
        return lambda v: sum((weights[i] * self.curvature(i, x, v) for i in clients), start=torch.zeros_like(v))

    def _softmax_layer(self) -> nn.Linear | None:
        """Return the only layer of softmax regression, or None for any other problem."""
        layers = [layer for layer in self.workload.model.module.modules() if not list(layer.children())]
        linear = [layer for layer in layers if isinstance(layer, nn.Linear)]
        plain = self.default_loss and all(isinstance(layer, nn.Linear | nn.Flatten) for layer in layers)
        return linear[0] if plain and len(linear) == 1 and self.workload.targets.ndim == 1 else None

    def noise(self, client: int, x: Tensor) -> float:
        """Return E |g - gradient of F_i|^2 at x, where g is the gradient of a batch drawn with replacement."""
        if self.batch_size is None:
            return 0.0
        single = vmap(
            grad(lambda x, X, y: self._loss(x, *map_leaves(_alone, (X, y)))), (None, 0, 0), randomness="different"
        )
        squares, mean = 0.0, torch.zeros_like(x)
        rows = max(1, NUMBERS // self.size)
        samples = torch.from_numpy(self.federation.samples_of(client))
        for piece in torch.split(samples, rows):
            gradients = single(x, *self.workload.load(piece))
            squares += float((gradients**2).sum()) / len(samples)
            mean += gradients.sum(0) / len(samples)
        return max(0.0, squares - float(mean @ mean)) / self.batch_size

    def is_quadratic(self) -> bool:
        """Test whether F_1 has the same curvature along a random direction at two random points."""
        rng = np.random.default_rng(0)
        a, b, v = (torch.from_numpy(rng.normal(size=self.size)) for _ in range(3))
        at_a, at_b = self.curvature(0, a, v), self.curvature(0, b, v)
        return bool((at_a - at_b).norm() <= 1e-9 * at_a.norm())

    def is_convex(self) -> bool | None:
        """Return True if the output is linear in x and the loss is cross-entropy; None if convexity is unknown.

        Linearity is tested on random weights.
        """
        if not self.default_loss:
            return None
        rng = np.random.default_rng(0)
        a, b = (torch.from_numpy(rng.normal(size=self.size)) for _ in range(2))
        inputs, _ = self.workload.load(torch.arange(min(8, num_samples(self.workload.inputs))))
        model, arguments = self.workload.model, self.workload.arguments(inputs)

        def output(x: Tensor) -> Tensor:
            outputs: Tensor = functional_call(model.module, model.views(x), *arguments)
            return outputs

        with torch.no_grad():
            middle, mean = output((a + b) / 2), (output(a) + output(b)) / 2
        return True if torch.allclose(middle, mean, rtol=1e-9, atol=1e-9) else None


def _alone(sample: Tensor) -> Tensor:
    """Return one sample as a batch."""
    return sample[None]


def as_array(x: Tensor) -> npt.NDArray[np.float64]:
    """Return a tensor as a NumPy array."""
    array: npt.NDArray[np.float64] = x.detach().numpy()
    return array
