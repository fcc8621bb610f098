"""What a round costs: whole vectors, bytes of compressed ones, and the work of a step."""

import numpy as np
import pytest

import fedagrac as fg
from keyed_noise import Noisy
from quadratics import D, K, quadratics

VECTOR = 8 * D  # bytes in float64
CLOCK = fg.Clock(fg.DeviceProfile("phone", step_time=0.5, bandwidth_up=2.0, bandwidth_down=10.0, latency=0.25))


def test_declared_bytes_and_work_are_those_of_the_records_and_the_clock():
    """7 + i bytes up and a quarter of the work of a step, whole vectors down."""
    result = quadratics().simulate(Noisy(lr=0.02), rounds=3, clock=CLOCK)
    assert result.history.column("bytes_up") == [sum(7 + i for i in range(6))] * 3
    assert result.history.column("bytes_down") == [6 * VECTOR] * 3
    seconds = max(0.5 + VECTOR / 10 + (7 + i) / 2 + K[i] * 0.25 * 0.5 for i in range(6))
    assert result.history.column("sim_time") == pytest.approx([seconds, 2 * seconds, 3 * seconds])


def test_bytes_add_to_whole_vectors_and_work_to_other_gradients():
    class Mixed(Noisy):
        def cost(self, cohort):
            halves = np.where(cohort.steps > 4, 0.5, 1.0)
            return fg.Cost.of(
                cohort, down=1, up=2, extra_steps=cohort.steps, down_bytes=3, up_bytes=1, step_work=halves
            )

    record = quadratics().simulate(Mixed(lr=0.02), rounds=1, clock=CLOCK).history[0]
    assert (record["bytes_down"], record["bytes_up"]) == (6 * (VECTOR + 3), 6 * (2 * VECTOR + 1))
    computed = [2 * k * (0.5 if k > 4 else 1.0) for k in K]
    wire = 0.5 + (VECTOR + 3) / 10 + (2 * VECTOR + 1) / 2
    assert record["sim_time"] == pytest.approx(wire + 0.5 * max(computed))


def test_bytes_are_exact_integers():
    """Numbers beyond 2**53 have no exact float."""

    class Huge(Noisy):
        def cost(self, cohort):
            return fg.Cost.of(cohort, up_bytes=2**55 + 1)

    assert quadratics().simulate(Huge(lr=0.02), rounds=1).history[0]["bytes_up"] == 6 * (2**55 + 1)


def test_an_algorithm_knows_the_size_of_numbers_and_vectors():
    seen = {}

    class Looks(Noisy):
        def cost(self, cohort):
            seen[cohort.number_bytes] = cohort.layout.size
            return fg.Cost.of(cohort)

    q = quadratics()
    for module in (q.module(), q.module().float()):
        q.simulate(Looks(lr=0.02), rounds=1, module=module)
    assert seen == {8: D, 4: D}


@pytest.mark.parametrize(
    ("declared", "message"),
    [
        ({"up_bytes": 1.5}, r"Cost.up_bytes = 1.5: expected integers of at least 0"),
        ({"up_bytes": -1}, r"Cost.up_bytes = -1"),
        ({"down_bytes": [1, 2]}, r"Cost.down_bytes = 'shape \(2,\)': expected .* each of 6 members"),
        ({"down": True}, r"Cost.down = True"),
        ({"step_work": float("nan")}, r"Cost.step_work = nan: expected finite numbers"),
        ({"step_work": -0.5}, r"Cost.step_work = -0.5"),
        ({"step_work": "half"}, r"Cost.step_work = 'half'"),
    ],
)
def test_costs_that_cannot_be_are_refused_by_name(declared, message):
    class Wrong(Noisy):
        def cost(self, cohort):
            return fg.Cost.of(cohort, **declared)

    with pytest.raises(fg.InputError, match=message):
        quadratics().simulate(Wrong(lr=0.02), rounds=1)
