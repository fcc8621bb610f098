"""Cyclic sampling: a fixed order, walked pass after pass."""

from itertools import chain

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedagrac.data.batches import batch_lengths, batch_positions, pass_steps


def walk(n, steps, batch, seed=0, client=0, before=0, round=0):
    """Return the batches as lists, without the positions that do not count."""
    rows = batch_positions(n, steps, batch, "cyclic", seed, round, client, before)
    lengths = batch_lengths(n, steps, batch, "cyclic", before)
    return [row[: None if lengths is None else lengths[k]].tolist() for k, row in enumerate(rows)]


def loader(n, steps, batch, order):
    """A plain loader: batches in order, a short one at the end of a pass, then from the beginning."""
    passes = [order[start : start + batch] for start in range(0, n, batch)]
    return [passes[k % len(passes)] for k in range(steps)]


sizes = st.integers(1, 40)


@given(sizes, st.integers(0, 60), st.integers(1, 12), st.integers(0, 3), st.integers(0, 3))
def test_batches_are_those_of_a_loader_that_keeps_the_short_one(n, steps, batch, seed, client):
    order = list(chain(*walk(n, -(-n // batch), batch, seed, client)))
    assert sorted(order) == list(range(n))  # a pass uses every sample once
    assert walk(n, steps, batch, seed, client) == loader(n, steps, batch, order)


@given(sizes, st.lists(st.integers(1, 9), min_size=1, max_size=6), st.integers(1, 12))
def test_rounds_continue_where_the_last_one_ended(n, counts, batch):
    parts, before = [], 0
    for t, k in enumerate(counts):
        parts += walk(n, k, batch, round=t, before=before)
        before += k
    assert parts == walk(n, sum(counts), batch)


def test_the_order_is_drawn_once_for_each_seed_and_client():
    first = walk(30, 3, 10)
    assert walk(30, 3, 10, round=7) == first
    assert walk(30, 3, 10, seed=1) != first
    assert walk(30, 3, 10, client=1) != first
    assert list(chain(*first)) != list(range(30))


def test_a_client_with_fewer_samples_than_a_batch_uses_all_of_them():
    assert [sorted(batch) for batch in walk(3, 2, 10)] == [[0, 1, 2]] * 2
    assert batch_lengths(3, 2, 10, "cyclic") is None


@pytest.mark.parametrize("sampling", ["replacement", "shuffle"])
def test_other_samplings_have_batches_of_one_length(sampling):
    assert batch_lengths(21, 9, 10, sampling) is None


@given(sizes, st.integers(0, 60), st.integers(1, 12))
def test_the_steps_that_end_a_pass_are_those_before_a_loader_is_exhausted(n, before, batch):
    """By hand: a loader is drawn `before` times and made anew if it is empty, then drawn until it is empty."""
    steps = -(-n // batch)
    left = steps
    for _ in range(before):
        left = (left or steps) - 1
    assert pass_steps(np.array([n]), batch, np.array([before])).tolist() == [left]
