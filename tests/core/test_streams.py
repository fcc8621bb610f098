"""Random streams: Philox with a key and a counter, whatever way they are made."""

import copy

import numpy as np
import pytest

from fedagrac.core.streams import Purpose, stream


@pytest.mark.parametrize(
    ("seed", "round", "client", "number"), [(0, 0, 0, 0), (3, 7, 11, 2), (2**63, 2**40, 99, 1)]
)
def test_a_stream_is_philox_with_the_seed_as_key_and_the_client_and_round_as_counter(seed, round, client, number):
    key = np.array([seed, Purpose.STEPS + 256 * number], np.uint64)
    counter = np.array([0, 0, client, round], np.uint64)
    expected = np.random.Generator(np.random.Philox(key=key, counter=counter))
    ours = stream(seed, Purpose.STEPS, round, client, number)
    for draw in (lambda g: g.integers(0, 1000, 9), lambda g: g.permutation(20), lambda g: g.normal(size=5)):
        np.testing.assert_array_equal(draw(ours), draw(expected))


def test_a_stream_can_be_copied_in_the_middle():
    generator = stream(1, Purpose.BATCHES, 2, 3)
    generator.integers(0, 10, 3)
    again = copy.deepcopy(generator)
    np.testing.assert_array_equal(again.normal(size=4), generator.normal(size=4))
