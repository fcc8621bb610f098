"""Recurrent cells over time, for many lanes at once: forward, and a backward pass written out.

Autograd would keep every intermediate result of every time step, and would add up the gradient of the recurrent
weights step by step, reading and writing it each time. Here the time loop of the backward pass has one matrix
product and a few operations per step: everything that does not depend on later steps is computed for all steps at
once, and so is the gradient of the weights. Nothing depends on numbers, so a CUDA graph can record it. To a
compiler each pass is one operation, because unrolled loops would take minutes to compile.

Tensors have the shapes

    gates [lanes, T, n, gates * H]   the inputs' part of the gates, biases included
    w     [lanes, gates * H, R]      the recurrent weights
    h0    [lanes, n, R]              the first state; all states are [lanes, T + 1, n, R]

where R = H, except in an LSTM with projections. In bf16 the weights alone are rounded before; then states and
gates are rounded where they are multiplied, and everything else is float32.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.library import custom_op

__all__ = ["gru_backward_op", "gru_op", "lstm_backward_op", "lstm_op", "rnn_backward_op", "rnn_op"]


def _product(left: Tensor, weights: Tensor) -> Tensor:
    """Return a batched product whose left side is rounded to the type of the weights."""
    return torch.bmm(left.to(weights.dtype), weights)


def _add_product(into: Tensor, left: Tensor, weights: Tensor) -> Tensor:
    """Add a batched product to a tensor, in one operation if all have one type; return the tensor."""
    if into.dtype == weights.dtype:
        return into.baddbmm_(left, weights)
    return into.add_(_product(left, weights))


def _of_weights(gradient: Tensor, inputs: Tensor, weights: Tensor) -> Tensor:
    """Return the gradient of weights that multiply inputs at all times, from that of the products."""
    dtype = weights.dtype
    return gradient.flatten(1, 2).mT.to(dtype) @ inputs.flatten(1, 2).to(dtype)


def lstm(
    gates: Tensor, w: Tensor, h0: Tensor, c0: Tensor, projection: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return an LSTM's states h and c at all times, its gates after their activations, and o tanh(c).

    Without a projection the last one is h itself and is returned empty.

    Examples:
        >>> zeros = torch.zeros(1, 1, 1)
        >>> h, c, *_ = lstm(torch.zeros(1, 2, 1, 4), torch.zeros(1, 4, 1), zeros, zeros + 1, None)
        >>> c.flatten().tolist()  # all gates are 1/2, the candidate is 0
        [1.0, 0.5, 0.25]
    """
    lanes, T, n, H = *gates.shape[:3], c0.shape[-1]
    a = gates.clone(memory_format=torch.contiguous_format)
    h, c = gates.new_empty((lanes, T + 1, n, h0.shape[-1])), gates.new_empty((lanes, T + 1, n, H))
    y = h[:, 1:] if projection is None else gates.new_empty((lanes, T, n, H))
    h[:, 0], c[:, 0] = h0, c0
    i, f, g, o = torch.split(a, H, -1)
    for t in range(T):
        _add_product(a[:, t], h[:, t], w.mT)
        a[:, t, :, : 2 * H].sigmoid_()
        g[:, t].tanh_()
        o[:, t].sigmoid_()
        torch.mul(f[:, t], c[:, t], out=c[:, t + 1]).addcmul_(i[:, t], g[:, t])
        torch.mul(o[:, t], c[:, t + 1].tanh(), out=y[:, t])
        if projection is not None:
            h[:, t + 1] = _product(y[:, t], projection.mT)
    return h, c, a, gates.new_empty(0) if projection is None else y


lstm_op = custom_op("fedagrac::lstm", lstm, mutates_args=())


@lstm_op.register_fake
def _(gates: Tensor, w: Tensor, h0: Tensor, c0: Tensor, projection: Tensor | None) -> tuple[Tensor, ...]:
    lanes, T, n, H = *gates.shape[:3], c0.shape[-1]
    h, c = (gates.new_empty((lanes, T + 1, n, size)) for size in (h0.shape[-1], H))
    return h, c, gates.new_empty(gates.shape), gates.new_empty(0 if projection is None else (lanes, T, n, H))


def lstm_backward(
    to_h: Tensor, to_c: Tensor, w: Tensor, projection: Tensor | None, h: Tensor, c: Tensor, a: Tensor, y: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of gates, w, h0, c0 and the projection, from those of all h and of the last c.

    Examples:
        >>> one = torch.ones(1, 1, 1)
        >>> states, weights = torch.zeros(1, 2, 1, 1), torch.zeros(1, 4, 1)
        >>> gates, *_ = lstm_backward(one[None], 0 * one, weights, None, states, states,
        ...     torch.tensor([[[[0.5, 0.5, 0.0, 0.5]]]]), torch.zeros(0))
        >>> gates.flatten().tolist()  # h = o tanh(c), c = i g: to g it is o i = 1/4
        [0.0, 0.0, 0.25, 0.0]
    """
    T, H = a.shape[1], c.shape[-1]
    i, f, g, o = torch.split(a, H, -1)
    tanh = c[:, 1:].tanh()
    into_c = o * (1 - tanh * tanh)
    # how each gate, before its activation, changes c (the first three) or o tanh(c)
    z = torch.cat([g * i * (1 - i), c[:, :-1] * f * (1 - f), i * (1 - g * g), tanh * o * (1 - o)], -1)
    by_gate = torch.unflatten(z, -1, (4, H))
    dh, dc = to_h.clone(memory_format=torch.contiguous_format), to_c.clone()
    dy = dh[:, -1]
    for t in reversed(range(T)):
        if projection is not None:
            dy = _product(dh[:, t], projection)
        dc.addcmul_(dy, into_c[:, t])
        by_gate[:, t, :, :3].mul_(dc.unsqueeze(-2))
        by_gate[:, t, :, 3].mul_(dy)
        dc.mul_(f[:, t])
        dy = _product(z[:, t], w) if t == 0 else _add_product(dh[:, t - 1], z[:, t], w)
    d_projection = w.new_empty(0) if projection is None else _of_weights(dh, y, projection)
    return z, _of_weights(z, h[:, :-1], w), dy.to(h.dtype), dc, d_projection


lstm_backward_op = custom_op("fedagrac::lstm_backward", lstm_backward, mutates_args=())


@lstm_backward_op.register_fake
def _(
    to_h: Tensor, to_c: Tensor, w: Tensor, projection: Tensor | None, h: Tensor, c: Tensor, a: Tensor, y: Tensor
) -> tuple[Tensor, ...]:
    d_projection = w.new_empty(0 if projection is None else projection.shape)
    return (a.new_empty(a.shape), w.new_empty(w.shape), h.new_empty(h[:, 0].shape), c.new_empty(to_c.shape),
            d_projection)  # fmt: skip


def gru(gates: Tensor, w: Tensor, bias: Tensor | None, h0: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return a GRU's states, its gates after their activations, and the states' part of the candidate.

    Args:
        gates: the inputs' part of the gates, with the biases of the inputs.
        w: the recurrent weights.
        bias: the biases beside them, [lanes, 3 H], or None.
        h0: the first state.

    Examples:
        >>> h, *_ = gru(torch.zeros(1, 2, 1, 3), torch.zeros(1, 3, 1), None, torch.ones(1, 1, 1))
        >>> h.flatten().tolist()  # the update gate is 1/2, the candidate is 0
        [1.0, 0.5, 0.25]
    """
    lanes, T, n, H = *gates.shape[:3], h0.shape[-1]
    a = gates.clone(memory_format=torch.contiguous_format)
    h, candidate = gates.new_empty((lanes, T + 1, n, H)), gates.new_empty((lanes, T, n, H))
    h[:, 0] = h0
    candidate.zero_()
    if bias is not None:
        a[..., : 2 * H] += bias[:, None, None, : 2 * H]
        candidate += bias[:, None, None, 2 * H :]
    r, z, new = torch.split(a, H, -1)
    for t in range(T):
        _add_product(a[:, t, :, : 2 * H], h[:, t], w[:, : 2 * H].mT)
        _add_product(candidate[:, t], h[:, t], w[:, 2 * H :].mT)
        a[:, t, :, : 2 * H].sigmoid_()
        new[:, t].addcmul_(r[:, t], candidate[:, t]).tanh_()
        torch.lerp(new[:, t], h[:, t], z[:, t], out=h[:, t + 1])
    return h, a, candidate


gru_op = custom_op("fedagrac::gru", gru, mutates_args=())


@gru_op.register_fake
def _(gates: Tensor, w: Tensor, bias: Tensor | None, h0: Tensor) -> tuple[Tensor, ...]:
    lanes, T, n, H = *gates.shape[:3], h0.shape[-1]
    states = gates.new_empty((lanes, T + 1, n, H))
    return states, gates.new_empty(gates.shape), gates.new_empty((lanes, T, n, H))


def gru_backward(
    to_h: Tensor, w: Tensor, h: Tensor, a: Tensor, candidate: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of gates, w, bias and h0 from those of all states.

    Examples:
        >>> gates, *_ = gru_backward(torch.ones(1, 1, 1, 1), torch.zeros(1, 3, 1), torch.zeros(1, 2, 1, 1),
        ...     torch.tensor([[[[0.5, 0.5, 0.0]]]]), torch.zeros(1, 1, 1, 1))
        >>> gates.flatten().tolist()  # h = (1 - z) new: to new it is 1/2
        [0.0, 0.0, 0.5]
    """
    T, H = a.shape[1], h.shape[-1]
    r, z, new = torch.split(a, H, -1)
    by_new = (1 - z) * (1 - new * new)
    # how r, z, the states' part of the candidate, and the inputs' part change the next state
    d = torch.cat(
        [by_new * candidate * r * (1 - r), (h[:, :-1] - new) * z * (1 - z), by_new * r, by_new], -1
    )  # fmt: skip
    by_gate, recurrent = torch.unflatten(d, -1, (4, H)), d[..., : 3 * H]
    dh = to_h.clone(memory_format=torch.contiguous_format)
    first = torch.zeros_like(dh[:, 0])
    for t in reversed(range(T)):
        by_gate[:, t].mul_(dh[:, t].unsqueeze(-2))
        earlier = dh[:, t - 1] if t else first
        _add_product(earlier.addcmul_(dh[:, t], z[:, t]), recurrent[:, t], w)
    dgates = torch.cat([d[..., : 2 * H], d[..., 3 * H :]], -1)
    return dgates, _of_weights(recurrent, h[:, :-1], w), recurrent.flatten(1, 2).sum(1), first


gru_backward_op = custom_op("fedagrac::gru_backward", gru_backward, mutates_args=())


@gru_backward_op.register_fake
def _(to_h: Tensor, w: Tensor, h: Tensor, a: Tensor, candidate: Tensor) -> tuple[Tensor, ...]:
    return a.new_empty(a.shape), w.new_empty(w.shape), a.new_empty(w.shape[:2]), h.new_empty(h[:, 0].shape)


def rnn(gates: Tensor, w: Tensor, h0: Tensor, relu: bool) -> Tensor:
    """Return the states of a plain recurrent network with tanh or ReLU.

    Examples:
        >>> rnn(torch.ones(1, 3, 1, 1), torch.ones(1, 1, 1), torch.zeros(1, 1, 1), True).flatten().tolist()
        [0.0, 1.0, 2.0, 3.0]
    """
    h = torch.cat([h0.unsqueeze(1), gates], 1)
    for t in range(gates.shape[1]):
        after = _add_product(h[:, t + 1], h[:, t], w.mT)
        after.relu_() if relu else after.tanh_()
    return h


rnn_op = custom_op("fedagrac::rnn", rnn, mutates_args=())


@rnn_op.register_fake
def _(gates: Tensor, w: Tensor, h0: Tensor, relu: bool) -> Tensor:
    return gates.new_empty((len(gates), gates.shape[1] + 1, *gates.shape[2:]))


def rnn_backward(to_h: Tensor, w: Tensor, h: Tensor, relu: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of gates, w and h0 from those of all states.

    Examples:
        >>> h = torch.tensor([0.0, 1.0, 2.0, 3.0]).reshape(1, 4, 1, 1)
        >>> gates, w, h0 = rnn_backward(torch.ones(1, 3, 1, 1), torch.ones(1, 1, 1), h, True)
        >>> gates.flatten().tolist(), w.item(), h0.item()
        ([3.0, 2.0, 1.0], 4.0, 3.0)
    """
    T = to_h.shape[1]
    d = (h[:, 1:] > 0).to(h.dtype) if relu else 1 - h[:, 1:] * h[:, 1:]
    dh = to_h[:, -1]
    for t in reversed(range(T)):
        d[:, t].mul_(dh)
        dh = _product(d[:, t], w).to(h.dtype) if t == 0 else _add_product(to_h[:, t - 1].clone(), d[:, t], w)
    return d, _of_weights(d, h[:, :-1], w), dh


rnn_backward_op = custom_op("fedagrac::rnn_backward", rnn_backward, mutates_args=())


@rnn_backward_op.register_fake
def _(to_h: Tensor, w: Tensor, h: Tensor, relu: bool) -> tuple[Tensor, ...]:
    return to_h.new_empty(to_h.shape), w.new_empty(w.shape), h.new_empty(h[:, 0].shape)
