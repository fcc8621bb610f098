"""Robust rules in place of sums over clients: their definition in NumPy, their laws, and their place in a run."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

import fedagrac as fg
from constant_gradients import simulate as simulate_constant
from fedagrac.core import robust
from fedagrac.core.cohort import Population, weighted_sum
from fedagrac.core.robust import robust_sum
from fedagrac.engines import SerialEngine
from fedagrac.errors import InputError
from fedagrac.experiments.run import prepare, run_experiment
from fedagrac.experiments.schema import Experiment
from fedagrac.storage.checkpoints import CheckpointError, read_checkpoint
from quadratics import Quadratics, quadratics

RULES = [fg.Median(), fg.TrimmedMean(share=0.3), fg.NormBounded(factor=1.0)]
MASSES = st.integers(1, 9)
NUMBERS = st.floats(-100, 100, allow_nan=False).map(lambda v: round(v, 3))


def median_of(masses, values):
    """Return the midpoint of all values with half of the mass on each side, in exact integers."""
    half = [
        v for v in values
        if 2 * sum(masses[values <= v]) >= sum(masses) and 2 * sum(masses[values >= v]) >= sum(masses)
    ]  # fmt: skip
    return (min(half) + max(half)) / 2


def medians_of(masses, rows):
    return np.array([median_of(masses, column) for column in rows.T])


def trimmed_of(masses, rows, cut):
    """Return the mean of each column without `cut` values at both ends, each value as often as its mass."""
    repeated = np.sort(np.repeat(rows, masses, axis=0), axis=0)
    return repeated[cut : len(repeated) - cut].mean(axis=0)


def bounded_of(masses, rows, factor):
    centre = medians_of(masses, rows)
    distances = np.linalg.norm(rows - centre, axis=1)
    bound = factor * median_of(masses, distances)
    shrunk = [
        centre + (row - centre) * min(1.0, bound / distance if distance else 1.0)
        for row, distance in zip(rows, distances, strict=True)
    ]
    return np.average(shrunk, axis=0, weights=masses)


@st.composite
def cohorts(draw, fewest=1, masses=MASSES):
    """Return masses [m] and rows [m, d]."""
    m, d = draw(st.integers(fewest, 8)), draw(st.integers(1, 5))
    given_masses = draw(arrays(np.int64, m, elements=masses))
    return given_masses, draw(arrays(np.float64, (m, d), elements=NUMBERS))


def aggregated(rule, masses, rows, dtype=torch.float64):
    return robust_sum(rule, masses / masses.sum(), torch.tensor(rows, dtype=dtype)).numpy()


@given(cohorts(masses=st.just(1)))
def test_with_equal_weights_the_median_is_the_usual_one(cohort):
    masses, rows = cohort
    np.testing.assert_allclose(aggregated(fg.Median(), masses, rows), np.median(rows, axis=0), atol=1e-12)


@given(cohorts())
def test_the_median_has_half_of_the_weight_on_each_side(cohort):
    masses, rows = cohort
    np.testing.assert_allclose(aggregated(fg.Median(), masses, rows), medians_of(masses, rows), atol=1e-12)


@given(cohorts(), st.integers(0, 20))
def test_the_trimmed_mean_leaves_out_a_share_of_the_weight_at_both_ends(cohort, cut):
    masses, rows = cohort
    masses = 8 * masses  # whole numbers are cut off, and the client at the border counts partly
    cut = min(cut, int(0.49 * masses.sum()))
    rule = fg.TrimmedMean(share=cut / masses.sum())
    np.testing.assert_allclose(aggregated(rule, masses, rows), trimmed_of(masses, rows, cut), atol=1e-7)


@given(cohorts(), st.sampled_from([0.5, 1.0, 3.0]))
def test_the_norm_bounded_mean_moves_far_vectors_towards_the_median(cohort, factor):
    masses, rows = cohort
    ours = aggregated(fg.NormBounded(factor), masses, rows)
    np.testing.assert_allclose(ours, bounded_of(masses, rows, factor), atol=1e-9)


@given(cohorts())
def test_nothing_trimmed_and_a_wide_bound_give_the_mean(cohort):
    masses, rows = cohort
    mean = np.average(rows, axis=0, weights=masses)
    np.testing.assert_allclose(aggregated(fg.TrimmedMean(share=0), masses, rows), mean, atol=1e-10)
    distances = np.linalg.norm(rows - medians_of(masses, rows), axis=1)
    if median_of(masses, distances) > 0:
        np.testing.assert_allclose(aggregated(fg.NormBounded(1e9), masses, rows), mean, atol=1e-10)


@given(
    cohorts(), st.sampled_from(RULES), st.randoms(use_true_random=False), arrays(np.float64, 5, elements=NUMBERS)
)
def test_the_order_of_clients_is_irrelevant_and_a_shift_of_all_shifts_the_result(cohort, rule, random, shift):
    masses, rows = cohort
    ours, order = aggregated(rule, masses, rows), list(range(len(masses)))
    random.shuffle(order)
    np.testing.assert_allclose(aggregated(rule, masses[order], rows[order]), ours, atol=1e-9)
    shift = shift[: rows.shape[1]]
    np.testing.assert_allclose(aggregated(rule, masses, rows + shift), ours + shift, atol=1e-7)


@given(
    cohorts(fewest=3, masses=st.just(1)),
    st.sampled_from([1e30, -1e30]),
    st.sampled_from([torch.float32, torch.float64]),
)
def test_one_client_cannot_move_the_result_out_of_the_range_of_the_others(cohort, far, dtype):
    """Each coordinate stays between those of the others; a bounded mean is no further off than their spread."""
    masses, rows = cohort
    others = rows[1:]
    lowest, highest = others.min(axis=0), others.max(axis=0)
    rows = np.concatenate([np.full((1, rows.shape[1]), far), others])
    slack = 1e-4
    for rule in (fg.Median(), fg.TrimmedMean(share=0.34)):
        ours = aggregated(rule, masses, rows, dtype)
        assert (ours >= lowest - slack).all()
        assert (ours <= highest + slack).all()
    spread = np.linalg.norm(highest - lowest)
    ours = aggregated(fg.NormBounded(1.0), masses, rows, dtype)
    assert np.linalg.norm(ours - np.clip(ours, lowest, highest)) <= spread + slack


def test_rounding_leaves_no_trace_of_a_trimmed_client():
    """1 - 0.2 is not 0.2 + 0.2 + 0.2 + 0.2 in floating point; a weight of 1e-16 times 1e30 would be 1e14."""
    for m in range(3, 60):
        rows = torch.zeros((m, 1), dtype=torch.float64)
        rows[m // 2] = 1e30
        assert float(robust_sum(fg.TrimmedMean(share=min(0.49, 1 / m)), np.full(m, 1 / m), rows)) == 0.0


@pytest.mark.parametrize("rule", RULES, ids=str)
def test_equal_rows_give_the_plain_sum_whatever_the_coefficients(rule):
    """Also if coefficients are not the weights of the cohort, do not sum to 1 or are all negative."""
    rows = torch.tensor([[1.5, -2.0]]).repeat(4, 1)
    for c in ([0.25] * 4, [0.1, 0.2, 0.3, 0.4], [0.01, 0.0, 0.2, 0.1], [-0.5, -0.1, -0.1, -0.2], [0.0] * 4):
        coefficients = np.array(c)
        torch.testing.assert_close(robust_sum(rule, coefficients, rows), weighted_sum(coefficients, rows))


@pytest.mark.parametrize("rule", RULES, ids=str)
def test_rows_of_unequal_length_are_compared_after_division_by_their_scale(rule):
    """Three clients went 2 in each of K steps; the sum of K-normalised updates is 2, however unequal K is."""
    K = np.array([1, 5, 300])
    rows = torch.tensor(2.0 * K[:, None])
    assert float(robust_sum(rule, np.full(3, 1 / 3) / K, rows, K)) == pytest.approx(2.0)


@pytest.mark.parametrize("rule", RULES, ids=str)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_rows_that_are_not_finite_are_left_out(rule, bad):
    rows = np.random.default_rng(0).normal(size=(6, 3))
    spoilt = rows.copy()
    spoilt[2, 1] = bad
    rest = [0, 1, 3, 4, 5]
    masses = np.array([1, 2, 3, 1, 2, 1])
    np.testing.assert_allclose(aggregated(rule, masses, spoilt), aggregated(rule, masses[rest], rows[rest]))
    assert np.isnan(aggregated(rule, masses, np.full((6, 3), bad))).all()


@pytest.mark.parametrize("rule", RULES, ids=str)
def test_coordinates_may_be_taken_in_blocks_and_rows_come_from_several_processes(rule, monkeypatch):
    """Two processes hold three and four of seven rows. Their totals are those of a process with all rows."""
    rng = np.random.default_rng(1)
    rows, weights = torch.tensor(rng.normal(size=(7, 11))), rng.dirichlet(np.ones(7))
    ours = robust_sum(rule, weights, rows)
    monkeypatch.setattr(robust, "BLOCK", 21)  # three coordinates of seven rows
    assert torch.allclose(robust_sum(rule, weights, rows), ours, atol=1e-13)
    shares = [np.array([5, 0, 2]), np.array([1, 3, 4, 6])]
    totals = record_totals(rule, weights, rows)
    for share in shares:
        left = iter(totals)
        part = robust_sum(rule, weights[share], rows[share], None, share, 7, lambda own, left=left: next(left))
        assert torch.allclose(part, ours, atol=1e-13)


def record_totals(rule, weights, rows):
    """Return every total that processes form, from a run that holds all rows."""
    totals = []

    def keep(tensor):
        totals.append(tensor.clone())
        return tensor

    robust_sum(rule, weights, rows, None, np.arange(7), 7, keep)
    return totals


G = np.array([[1.0, -4.0], [2.0, 0.0], [9.0, 1.0]])
K = np.array([1, 3, 8])


@pytest.mark.parametrize(
    ("algorithm", "expected"),
    [
        (fg.FedAvg(lr=0.5), -0.5 * np.median(K[:, None] * G, axis=0)),
        (fg.FedNova(lr=0.5), -0.5 * 4 * np.median(G, axis=0)),
        (fg.FedLin(lr=0.5), -0.5 * np.median(G, axis=0)),
        (fg.FedaGrac(lr=0.5), -0.5 * 3 * np.median(G, axis=0)),
        (fg.Scaffold(lr=0.5, init="full"), -0.5 * 3 * np.median(G, axis=0)),
    ],
    ids=["fedavg", "fednova", "fedlin", "fedagrac", "scaffold"],
)
def test_every_sum_over_clients_is_the_median(algorithm, expected):
    """Gradients are constant. The median replaces the models, K-normalised updates, gbar, and nu at the start.

    With correction every client takes K_i steps along the median gradient, and the median K is 3.
    """
    result = simulate_constant(algorithm, G, K, aggregate=fg.Median(), engine="serial")
    np.testing.assert_allclose(result.vector.numpy(), expected, atol=1e-12)


def test_nu_is_the_median_of_what_clients_transmit():
    """Round 1 of SCAFFOLD from zeros is FedAvg's; then all clients step along nu, the median of g_i."""
    middle = np.median(G, axis=0)
    result = simulate_constant(fg.Scaffold(lr=0.5), G, K, rounds=2, aggregate=fg.Median(), engine="serial")
    np.testing.assert_allclose(result.vector.numpy(), -0.5 * np.median(K[:, None] * G, axis=0) - 1.5 * middle)


def test_moving_buffers_are_aggregated_by_the_rule():
    """A BatchNorm of momentum 1 ends with the mean of its client's inputs: 1, 2 and 1000; their median is 2."""
    net = torch.nn.Sequential(torch.nn.BatchNorm1d(1, momentum=1.0), torch.nn.Linear(1, 2))
    data = [(np.array([[m - 1.0], [m + 1.0]]), np.array([0, 1])) for m in (1.0, 2.0, 1000.0)]
    fed = fg.Federation.from_arrays(data)
    result = fg.simulate(
        net, fed, fg.FedAvg(lr=0.01), 1, steps=fg.Constant(1), batch_size=None, aggregate=fg.Median(), device="cpu"
    )
    assert float(result.buffers["0.running_mean"]) == pytest.approx(2.0)


@pytest.mark.parametrize("rule", RULES, ids=str)
@pytest.mark.parametrize(
    "name", ["fedavg", "fednova", "fedagrac", "scaffold", "fedcm", "fedexp", "fedvarp", "diloco"]
)
def test_identical_clients_have_the_numbers_of_the_plain_sum(name, rule):
    single = quadratics(sizes=[20])
    q = Quadratics(single.A * 5, single.b * 5)
    options = {"rounds": 3, "steps": fg.Constant(3), "engine": "serial"}
    plain, ours = (
        q.simulate(
            fg.algorithm(name, lr=0.02),
            aggregate=a,
            federation=q.federation([0.1, 0.3, 0.2, 0.25, 0.15]),
            **options,
        )
        for a in (None, rule)
    )
    np.testing.assert_allclose(ours.vector, plain.vector, rtol=1e-10)


@pytest.mark.parametrize("rule", RULES, ids=str)
@pytest.mark.parametrize("name", ["scaffold", "fedagrac"])
def test_with_cohorts_the_reference_orientation_does_not_drift(name, rule):
    """Identical clients reach their minimiser. If locations before and after were subtracted, they would not."""
    single = one_problem(clients=1)
    q = Quadratics(single.A * 5, single.b * 5)
    for participation in (3, fg.Participation(4, by="weight")):
        options = {"rounds": 100, "steps": fg.Constant(3), "engine": "serial", "participation": participation}
        x = q.simulate(fg.algorithm(name, lr=0.1), aggregate=rule, **options).vector.numpy()
        assert np.linalg.norm(x - q.minimiser()) < 1e-6


def test_a_cohort_moves_its_part_of_a_running_sum():
    """Two of four clients have 0.2 + 0.5 of the weight; the median of their rows, 2 and 9, is 9."""
    cohort = fg.Cohort(
        1, np.arange(2), np.ones(2, int), [2, 5], np.array([0.2, 0.5]), np.ones(2, int), False, None,
        aggregate=fg.Median(),
    )  # fmt: skip
    running, before = torch.tensor([10.0]), torch.zeros(2, 1)
    after = torch.tensor([[2.0], [9.0]])
    assert cohort.update(running, cohort.population_weights, before, after).tolist() == pytest.approx([9.3])
    plain = replace(cohort, aggregate=None)
    assert plain.update(running, cohort.population_weights, before, after).tolist() == pytest.approx([14.9])


def one_problem(clients):
    """Return clients with samples of one well-conditioned problem."""
    rng, x = np.random.default_rng(3), np.linspace(1, 2, 5)
    A = [rng.normal(size=(60, 5)) for _ in range(clients)]
    return Quadratics(A, [a @ x + 0.1 * rng.normal(size=60) for a in A])


class Flipped(SerialEngine):
    """Client 0 goes ten times as far in the opposite direction, and reports a gradient to match."""

    def run(self, plan, x, clients, round):
        result = super().run(plan, x, clients, round)
        for row in np.flatnonzero(clients == 0):
            result.models[row] = x - 10 * (result.models[row] - x)
            if result.first is not None:
                result.first[row] *= -10
        return result


@pytest.mark.parametrize("rule", [fg.Median(), fg.TrimmedMean(0.2), fg.NormBounded()], ids=str)
@pytest.mark.parametrize("algorithm", [fg.FedAvg(lr=0.05), fg.FedaGrac(lr=0.05)], ids=["fedavg", "fedagrac"])
def test_a_client_that_flips_its_sign_does_not_stop_the_others(algorithm, rule):
    """Clients have samples of one problem, so their minimisers are near one another."""
    q = one_problem(clients=5)
    options = {"rounds": 30, "steps": fg.Explicit([[4, 3, 4, 5, 4]]), "engine": Flipped}
    ours = q.simulate(algorithm, aggregate=rule, **options).vector.numpy()
    start, best = q.start(), q.minimiser()
    assert np.linalg.norm(ours - best) < 0.1 * np.linalg.norm(start - best)
    plain = q.simulate(algorithm, **options).vector.numpy()
    assert not np.linalg.norm(plain - best) < np.linalg.norm(start - best)


def test_the_gradient_at_the_start_is_gathered_in_chunks():
    rows = torch.tensor([[1.0], [2.0], [6.0], [7.0], [1e9]], dtype=torch.float64)
    population = Population(
        np.full(5, 0.2), lambda x, clients, round: rows[clients], chunk=2, aggregate=fg.Median()
    )
    assert population.gradient(torch.zeros(1, dtype=torch.float64)).tolist() == [6.0]


@pytest.mark.parametrize("rule", RULES, ids=str)
def test_a_resumed_run_equals_an_uninterrupted_run(rule, tmp_path):
    q, options = quadratics(), {"rounds": 4, "aggregate": rule, "participation": 4}
    whole = q.simulate(fg.FedaGrac(lr=0.02), callbacks=[fg.Checkpoints(tmp_path, every=2)], **options)
    checkpoint = replace(read_checkpoint(tmp_path), history=whole.history[:2])
    assert checkpoint.round == 2
    assert torch.equal(q.simulate(fg.FedaGrac(lr=0.02), resume=checkpoint, **options).vector, whole.vector)
    assert not torch.equal(q.simulate(fg.FedaGrac(lr=0.02), rounds=4, participation=4).vector, whole.vector)


def test_runs_side_by_side_have_the_numbers_of_runs_alone():
    fed = fg.Federation.load("digits", clients=5, partition=fg.Dirichlet(0.5), seed=0)
    model = fg.models.build("logistic", features=64, classes=10).double()
    algorithms = [fg.FedNova(lr=0.1), fg.FedaGrac(lr=0.1)]
    options = {"rounds": 2, "steps": fg.Linear(2, 2), "aggregate": fg.TrimmedMean(0.2), "device": "cpu"}
    for algorithm, together in zip(algorithms, fg.simulate_many(model, fed, algorithms, **options), strict=True):
        alone = fg.simulate(model, fed, algorithm, **options)
        assert float((together.vector - alone.vector).abs().max()) < 1e-10


def table(**changes):
    algorithm = [{"name": "fedavg", "lr": 0.1}]
    return {"name": "one", "steps": {"kind": "constant", "steps": 2}, "algorithm": algorithm, **changes}


def test_an_experiment_file_names_the_rule_and_a_resumed_run_has_the_same(tmp_path):
    assert "aggregate" not in Experiment.of(table()).resolved()
    trimmed = table(aggregate={"kind": "trimmed-mean"}, rounds=2, data={"clients": 5})
    experiment = Experiment.of(trimmed)
    assert experiment.resolved()["aggregate"] == {"kind": "trimmed-mean", "share": 0.1}
    prepared = prepare(experiment)
    assert prepared.fleet.setup.aggregate == fg.TrimmedMean(share=0.1)
    run_experiment(prepared, tmp_path)
    other = Experiment.of({**trimmed, "aggregate": {"kind": "median"}, "rounds": 3})
    with pytest.raises((InputError, CheckpointError), match="aggregate"):
        run_experiment(prepare(other), tmp_path, resume=True)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"kind": "mean"}, r"aggregate\.kind = 'mean': expected one of median, trimmed-mean, norm-bounded"),
        ({}, r"aggregate\.kind = None"),
        ({"kind": "trimmed-mean", "share": 0.5}, r"aggregate\.share = 0\.5: expected a number from 0 to 0\.49"),
        ({"kind": "trimmed-mean", "share": -0.1}, r"aggregate\.share = -0\.1: expected a number of at least 0"),
        ({"kind": "norm-bounded", "factor": 0}, r"aggregate\.factor = 0: expected a number above 0"),
        ({"kind": "median", "share": 0.1}, r"aggregate\.share = 0\.1: expected no setting"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_wrong_settings_are_named(settings, message):
    with pytest.raises(InputError, match=message):
        Experiment.of(table(aggregate=settings))


def test_a_rule_needs_a_cohort_in_which_one_client_can_be_outvoted():
    q = quadratics()
    with pytest.raises(
        InputError, match=r"aggregate = Median\(\): expected a cohort of at least 3 clients: among 2"
    ):
        q.simulate(fg.FedAvg(lr=0.1), participation=2, aggregate=fg.Median())
    with pytest.raises(InputError, match="aggregate = 'median': expected a fedagrac Aggregation such as Median"):
        q.simulate(fg.FedAvg(lr=0.1), aggregate="median")
