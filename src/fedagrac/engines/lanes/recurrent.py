"""LSTM, GRU and plain recurrent layers as functions of many lanes.

Torch has no vmap rule for them. One matrix product projects the inputs of all time steps; then a cell runs over
time for all lanes at once (`kernels/recurrence.py`). The routes take the arguments of the torch functions that the
modules call.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn import functional

from fedagrac.engines.lanes.kernels import recurrence
from fedagrac.engines.lanes.modes import CannotBatchError
from fedagrac.engines.precision import in_bf16

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["recurrent_routes", "weights_as_given"]

CACHE = 2**20
"""Bytes of recurrent weights that a time loop keeps in the cache of a CPU; lanes beyond wait for the next loop."""


@contextlib.contextmanager
def weights_as_given(layers: Sequence[nn.RNNBase]) -> Iterator[None]:
    """Keep recurrent layers from joining their weights in memory, in a block: those of many lanes have no address.

    On a GPU a layer whose weights have been replaced joins them for cuDNN.
    """
    for layer in layers:
        layer.__dict__["flatten_parameters"] = lambda: None
    try:
        yield
    finally:
        for layer in layers:
            del layer.__dict__["flatten_parameters"]


def _recurrent(function: Callable[..., Any], fused: bool, *args: Any, **options: Any) -> tuple[Tensor, ...]:
    """Return the outputs and last states of all layers, like torch's function of the same arguments.

    Args:
        function: torch's function.
        fused: whether steps are compiled.
        args: its arguments.
        options: none; the modules pass all arguments by position.
    """
    if options or len(args) != 9 or isinstance(args[3], list | tuple):
        _refuse_packed()
    inputs, states, weights, biases, layers, p, training, both_ways, batch_first = args
    states = tuple(states) if function is torch.lstm else (states,)
    if function is torch.lstm and _separately(inputs, states):
        if fused:
            _refuse_to_compile()
        return tuple(_Separate.apply(args[3:], inputs, *states, *weights))  # type: ignore[no-untyped-call]
    x = inputs.transpose(0, 1) if batch_first else inputs
    per_direction = len(weights) // (layers * (2 if both_ways else 1))
    ends: list[tuple[Tensor, ...]] = []
    for layer in range(layers):
        outputs = []
        for backwards in (False, True) if both_ways else (False,):
            starts = tuple(state[len(ends)] for state in states)
            own = weights[len(ends) * per_direction :][:per_direction]
            y, *last = _direction(function, x.flip(0) if backwards else x, starts, own, biases)
            ends.append((y[-1], *last))
            outputs.append(y.flip(0) if backwards else y)
        x = torch.cat(outputs, -1) if both_ways else outputs[0]
        if p and training and layer + 1 < layers:
            x = functional.dropout(x, p)
    output = x.transpose(0, 1) if batch_first else x
    return output, *(torch.stack(last) for last in zip(*ends, strict=True))


def _direction(
    function: Callable[..., Any], x: Tensor, starts: tuple[Tensor, ...], weights: Sequence[Tensor], biases: bool
) -> tuple[Tensor, ...]:
    """Return a layer's outputs in one direction, [T, n, R], and an LSTM's last c."""
    w_input, w, *rest = weights
    gates = x.flatten(0, 1) @ w_input.T  # all times in one product
    recurrent_bias = None
    if biases and function is torch.gru:
        gates, recurrent_bias = gates + rest[0], rest[1]
    elif biases:
        gates = gates + (rest[0] + rest[1])
    gates = torch.unflatten(gates, 0, x.shape[:2])
    projection = rest[-1] if len(rest) % 2 else None
    if in_bf16(x):  # as in torch's cells: products of rounded numbers, states and gates in float32
        gates, starts = gates.float(), tuple(start.float() for start in starts)
        w, projection = w.bfloat16(), None if projection is None else projection.bfloat16()
    return tuple(_Scan.apply(function, gates, w, recurrent_bias, projection, *starts))  # type: ignore[no-untyped-call]


def _separately(inputs: Tensor, states: tuple[Tensor, ...]) -> bool:
    """Return whether oneDNN, the fastest LSTM on a CPU, can run every lane by itself."""
    if inputs.is_cuda or inputs.dtype != torch.float32 or in_bf16(inputs):
        return False
    return torch.backends.mkldnn.is_available() and states[0].shape == states[1].shape  # type: ignore[no-untyped-call]


def _refuse_packed(*args: Any, **options: Any) -> None:
    """Raise an error: even if two lanes happen to agree, a later batch may have other lengths."""
    raise CannotBatchError("packed sequences have another shape in every lane")


def _refuse_to_compile() -> None:
    """Raise an error while a step is traced to be compiled."""
    from torch.fx.experimental.proxy_tensor import get_proxy_mode

    if get_proxy_mode() is not None:
        raise NotImplementedError("the LSTM of oneDNN, which is faster than a compiled one, cannot be compiled")


class _Separate(torch.autograd.Function):
    """An LSTM of torch for one lane after another, within a step that has all other layers of all lanes."""

    @staticmethod
    def forward(options: tuple[Any, ...], x: Tensor, h: Tensor, c: Tensor, *weights: Tensor) -> Any:
        return torch.lstm(x, (h, c), weights, *options)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        """Keep nothing: torch differentiates what the vmap rule calls."""

    @staticmethod
    def vmap(info: Any, in_dims: Any, options: tuple[Any, ...], *tensors: Tensor) -> tuple[Any, Any]:
        """Run the lanes and stack what they return."""
        lanes = info.batch_size
        each = [
            (t,) * lanes if at is None else t.unbind(at)  # the gradient of select would fill all lanes with zeros
            for t, at in zip(tensors, in_dims[1:], strict=True)
        ]
        results = [torch.lstm(x, (h, c), weights, *options) for x, h, c, *weights in zip(*each, strict=True)]
        return tuple(torch.stack(values) for values in zip(*results, strict=True)), (0, 0, 0)


class _Scan(torch.autograd.Function):
    """A cell over time. Torch differentiates what its vmap rule calls."""

    @staticmethod
    def forward(function: Callable[..., Any], *tensors: Tensor | None) -> tuple[Tensor, ...]:
        lanes = (None if t is None else t.unsqueeze(0) for t in tensors)
        return tuple(value[0] for value in _SCANS[function].apply(function, *lanes))

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        """Keep nothing: torch differentiates what the vmap rule calls."""

    @staticmethod
    def vmap(info: Any, in_dims: Any, function: Callable[..., Any], *tensors: Tensor | None) -> tuple[Any, Any]:
        """Run all lanes together; on a CPU as many as have their weights in the cache."""
        lanes = info.batch_size
        first = [
            None if t is None else t.expand(lanes, *t.shape) if at is None else t.movedim(at, 0)
            for t, at in zip(tensors, in_dims[1:], strict=True)
        ]
        w, width = first[1], lanes
        if w is not None and not w.is_cuda:
            width = min(lanes, max(1, CACHE // (w[0].numel() * w.element_size())))
        parts = [
            _SCANS[function].apply(function, *(None if t is None else t[start : start + width] for t in first))
            for start in range(0, lanes, width)
        ]
        whole = tuple(torch.cat(values) if len(parts) > 1 else values[0] for values in zip(*parts, strict=True))
        return whole, (0,) * len(whole)


class _LSTM(torch.autograd.Function):
    """An LSTM's outputs and its last c."""

    @staticmethod
    def forward(
        ctx: Any, _: Any, gates: Tensor, w: Tensor, bias: None, projection: Tensor | None, h0: Tensor, c0: Tensor
    ) -> tuple[Tensor, Tensor]:
        h, c, activated, y = recurrence.lstm_op(gates, w, h0, c0, projection)
        ctx.save_for_backward(w, projection, h, c, activated, y)
        return h[:, 1:], c[:, -1]

    @staticmethod
    def backward(ctx: Any, to_h: Tensor, to_c: Tensor) -> tuple[Tensor | None, ...]:
        dgates, dw, dh, dc, d_projection = recurrence.lstm_backward_op(to_h, to_c, *ctx.saved_tensors)
        return None, dgates, dw, None, d_projection if ctx.needs_input_grad[4] else None, dh, dc


class _GRU(torch.autograd.Function):
    """A GRU's outputs."""

    @staticmethod
    def forward(
        ctx: Any, _: Any, gates: Tensor, w: Tensor, bias: Tensor | None, projection: None, h0: Tensor
    ) -> tuple[Tensor]:
        h, activated, candidate = recurrence.gru_op(gates, w, bias, h0)
        ctx.save_for_backward(w, h, activated, candidate)
        return (h[:, 1:],)

    @staticmethod
    def backward(ctx: Any, to_h: Tensor) -> tuple[Tensor | None, ...]:
        dgates, dw, d_bias, dh = recurrence.gru_backward_op(to_h, *ctx.saved_tensors)
        return None, dgates, dw, d_bias if ctx.needs_input_grad[3] else None, None, dh


class _RNN(torch.autograd.Function):
    """The outputs of a plain recurrent layer with tanh or ReLU."""

    @staticmethod
    def forward(
        ctx: Any, function: Any, gates: Tensor, w: Tensor, bias: None, projection: None, h0: Tensor
    ) -> tuple[Tensor]:
        ctx.relu = function is torch.rnn_relu
        h = recurrence.rnn_op(gates, w, h0, ctx.relu)
        ctx.save_for_backward(w, h)
        return (h[:, 1:],)

    @staticmethod
    def backward(ctx: Any, to_h: Tensor) -> tuple[Tensor | None, ...]:
        dgates, dw, dh = recurrence.rnn_backward_op(to_h, *ctx.saved_tensors, ctx.relu)
        return None, dgates, dw, None, None, dh


def _lstm_cell(x: Tensor, states: tuple[Tensor, Tensor], *weights: Any) -> tuple[Tensor, Tensor]:
    """Return the next h and c of an LSTM."""
    from_x, from_h = _gates(x, states[0], *weights)
    i, f, g, o = (from_x + from_h).chunk(4, -1)
    c = f.sigmoid() * states[1] + i.sigmoid() * g.tanh()
    return o.sigmoid() * c.tanh(), c


def _gru_cell(x: Tensor, h: Tensor, *weights: Any) -> Tensor:
    """Return the next state of a GRU."""
    (r, z, new), (r_h, z_h, new_h) = (gates.chunk(3, -1) for gates in _gates(x, h, *weights))
    candidate = (new + (r + r_h).sigmoid() * new_h).tanh()
    return candidate + (z + z_h).sigmoid() * (h - candidate)


def _rnn_cell(activation: Callable[[Tensor], Tensor], x: Tensor, h: Tensor, *weights: Any) -> Tensor:
    """Return the next state of a plain recurrent network."""
    from_x, from_h = _gates(x, h, *weights)
    return activation(from_x + from_h)


def _gates(
    x: Tensor, h: Tensor, w_input: Tensor, w: Tensor, bias: Tensor | None = None, own_bias: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return the inputs' and the state's part of a cell's gates."""
    return functional.linear(x, w_input, bias), functional.linear(h, w, own_bias)


_SCANS: dict[Callable[..., Any], Any] = {
    torch.lstm: _LSTM, torch.gru: _GRU, torch.rnn_tanh: _RNN, torch.rnn_relu: _RNN,
}  # fmt: skip
"""The cells over time, by torch's functions."""


def recurrent_routes(fused: bool) -> dict[Callable[..., Any], Callable[..., Any]]:
    """Return the routes of torch's recurrent functions; `fused` says whether steps are compiled.

    Examples:
        >>> torch.gru in recurrent_routes(fused=False)
        True
    """
    others: dict[Callable[..., Any], Callable[..., Any]] = {
        torch.lstm_cell: _lstm_cell,
        torch.gru_cell: _gru_cell,
        torch.rnn_tanh_cell: functools.partial(_rnn_cell, torch.tanh),
        torch.rnn_relu_cell: functools.partial(_rnn_cell, torch.relu),
        torch._pack_padded_sequence: _refuse_packed,
    }
    return others | {function: functools.partial(_recurrent, function, fused) for function in _SCANS}
