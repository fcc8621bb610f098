"""The contract that every registered algorithm fulfils."""

import dataclasses

import numpy as np
import pytest
import torch

import fedagrac as fg
from constant_gradients import simulate as simulate_constant
from fedagrac.algorithms import REGISTRY, options_of
from fedagrac.core.cohort import Cohort, Population
from fedagrac.core.layout import Layout, Parameter
from fedagrac.core.local import Result
from quadratics import K, Trace, half_square, quadratics

ALL = sorted(REGISTRY)
STATEFUL = [n for n in ALL if fg.algorithm(n, lr=0.1).traits.rows]


def trajectory(algorithm, q=None, **options):
    trace = Trace()
    (q or quadratics()).simulate(algorithm, callbacks=[trace], **options)
    return np.array(trace.x)


def close(a, b, tolerance=1e-12):
    return np.linalg.norm(a - b) <= tolerance * np.linalg.norm(b)


@pytest.mark.parametrize("name", ALL)
def test_is_a_frozen_value(name):
    algorithm = fg.algorithm(name, lr=0.1)
    assert algorithm == fg.algorithm(name, lr=0.1)
    assert hash(algorithm) == hash(fg.algorithm(name, lr=0.1))
    assert algorithm != fg.algorithm(name, lr=0.2)
    assert algorithm.name == name
    with pytest.raises(dataclasses.FrozenInstanceError):
        algorithm.lr = 1.0


NEUTRAL = {
    "fedprox": {"mu": 0.0},
    "fedavgm": {"momentum": 0.0},
    "fedcm": {"alpha": 1.0},
    "fedacg": {"momentum": 0.0, "mu": 0.0},
    "mimelite": {"momentum": 0.0},
    "mime": {"momentum": 0.0},
    "fedsam": {"rho": 0.0},
    "fedlesam": {"rho": 0.0},
    "fedper": {"personal": ()},
    "diloco": {"server_lr": 1.0, "momentum": 0.0, "local": fg.SGD()},
}
"""Settings without the algorithm's own part."""

NEVER_PLAIN = ("fedagrac-first", "fedagrac-reverse", "feddyn", "fedadam", "fedyogi", "fedadagrad")
"""Algorithms that differ from gradient descent even with one client."""


@pytest.mark.parametrize("name", [n for n in ALL if n not in NEVER_PLAIN])
def test_one_client_alone_runs_plain_gradient_descent(name):
    """With M = 1 no client is fast and nu = nu_i, so K steps are gradient descent.

    This does not hold for first and reverse, which send the first gradient but subtract the mean.
    """
    q = quadratics(sizes=[30])
    k, eta = 7, 0.02
    options = NEUTRAL.get(name, {})
    lr = eta * k if name == "fedlin" else eta
    x = trajectory(fg.algorithm(name, lr=lr, **options), q, rounds=2, steps=fg.Constant(k))[-1]
    expected = q.start()
    for _ in range(2 * k):
        expected = expected - eta * q.gradient(0, expected)
    assert close(x, expected)


@pytest.mark.parametrize("name", ALL)
def test_identical_clients_stay_together(name):
    """Clients with the same data and the same K behave like one client."""
    single = quadratics(sizes=[20])
    q = type(single)(single.A * 4, single.b * 4)
    together = trajectory(fg.algorithm(name, lr=0.02), q, rounds=4, steps=fg.Constant(3))
    alone = trajectory(fg.algorithm(name, lr=0.02), single, rounds=4, steps=fg.Constant(3))
    assert close(together, alone)


@pytest.mark.parametrize("name", ALL)
def test_the_order_of_clients_is_irrelevant(name):
    q, order = quadratics(), [4, 0, 5, 2, 1, 3]
    straight = trajectory(fg.algorithm(name, lr=0.02))
    permuted = trajectory(
        fg.algorithm(name, lr=0.02),
        federation=q.federation(order=order),
        steps=fg.Explicit([[K[i] for i in order]]),
    )
    assert close(permuted, straight, 1e-11)


@pytest.mark.parametrize("name", ALL)
def test_moving_the_origin_moves_the_trajectory(name):
    """Nothing depends on the origin; control variates that start from weights would. So does weight decay."""
    q, options = quadratics(), {"local": fg.AdamW(weight_decay=0.0)} if name == "diloco" else {}
    shift = np.array([3.0, -2.0, 1.0, 5.0, -4.0])
    moved = type(q)(q.A, [b + A @ shift for A, b in zip(q.A, q.b, strict=True)])
    module = q.module()
    with torch.no_grad():
        module.weight += torch.from_numpy(shift)
    shifted = trajectory(fg.algorithm(name, lr=0.02, **options), moved, module=module)
    assert close(shifted - shift, trajectory(fg.algorithm(name, lr=0.02, **options)), 1e-10)


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("sampling", ["replacement", "cyclic"])
def test_the_same_seed_gives_the_same_bits_and_another_seed_others(name, sampling):
    # the module of the quadratics has one layer, which would be personal
    algorithm = fg.algorithm(name, lr=0.02, **({"personal": ()} if name == "fedper" else {}))

    def final(seed):
        q = quadratics()
        return fg.simulate(
            q.module(torch.float32), q.federation(), algorithm, rounds=3, steps=fg.Explicit([K]),
            batch_size=4, loss=half_square, sampling=sampling, seed=seed, device="cpu",
        ).vector  # fmt: skip

    assert torch.equal(final(1), final(1))
    assert not torch.equal(final(1), final(2))


@pytest.mark.parametrize("name", ALL)
def test_partial_participation_with_everyone_is_full_participation(name):
    whole = trajectory(fg.algorithm(name, lr=0.02))
    assert np.array_equal(trajectory(fg.algorithm(name, lr=0.02), participation=6), whole)
    assert np.array_equal(trajectory(fg.algorithm(name, lr=0.02), participation=1.0), whole)


@pytest.mark.parametrize("name", ALL)
def test_partial_participation_runs_and_stays_finite(name):
    x = trajectory(fg.algorithm(name, lr=0.01), participation=2, rounds=40)
    assert np.isfinite(x).all()


@pytest.mark.parametrize("name", ALL)
def test_the_module_given_is_not_changed(name):
    q = quadratics()
    module = q.module()
    before = module.weight.detach().clone()
    q.simulate(fg.algorithm(name, lr=0.02), module=module)
    assert torch.equal(module.weight, before)
    assert module.weight.grad is None


@pytest.mark.parametrize("name", ALL)
def test_the_global_random_state_is_not_touched(name):
    q = quadratics()
    module = q.module()
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    q.simulate(fg.algorithm(name, lr=0.02), rounds=1, module=module)
    assert torch.equal(torch.rand(3), expected)


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("lr", [0, -0.1, float("nan"), float("inf"), "0.1", True, None])
def test_a_bad_step_size_is_refused(name, lr):
    with pytest.raises(fg.InputError, match="lr"):
        fg.algorithm(name, lr=lr)


@pytest.mark.parametrize("name", ALL)
def test_float32_agrees_with_float64(name):
    q = quadratics()
    single = q.simulate(fg.algorithm(name, lr=0.02), module=q.module(torch.float32)).vector
    double = q.simulate(fg.algorithm(name, lr=0.02)).vector
    assert single.dtype == torch.float32
    assert close(single.double().numpy(), double.numpy(), 1e-5)


# reductions


@pytest.mark.parametrize("name", [n for n in ALL if n.startswith("fedagrac")])
def test_without_calibration_fedagrac_is_fedavg_exactly(name):
    assert np.array_equal(trajectory(fg.algorithm(name, lr=0.02, calibration=0.0)), trajectory(fg.FedAvg(lr=0.02)))


def test_without_a_proximal_term_fedprox_is_fedavg_exactly():
    assert np.array_equal(trajectory(fg.FedProx(lr=0.02, mu=0.0)), trajectory(fg.FedAvg(lr=0.02)))


def test_equal_steps_make_fednova_fedavg():
    steps = fg.Constant(9)
    assert close(trajectory(fg.FedNova(lr=0.02), steps=steps), trajectory(fg.FedAvg(lr=0.02), steps=steps))


@pytest.mark.parametrize("init", ["zeros", "full"])
@pytest.mark.parametrize("participation", [None, 2])
def test_fedagrac_average_with_full_calibration_is_scaffold(init, participation):
    average = fg.FedaGrac(lr=0.02, calibration=1.0, transmit="average", init=init)
    ours = trajectory(average, participation=participation, rounds=8)
    assert np.array_equal(ours, trajectory(fg.Scaffold(lr=0.02, init=init), participation=participation, rounds=8))


def test_equal_steps_make_hybrid_average_and_reverse_first():
    steps = fg.Constant(6)  # nobody is fast

    def of(transmit):
        return trajectory(fg.FedaGrac(lr=0.02, transmit=transmit), steps=steps)

    assert np.array_equal(of("hybrid"), of("average"))
    assert np.array_equal(of("reverse"), of("first"))


def test_a_schedule_that_never_changes_is_a_constant():
    scheduled = fg.FedaGrac(lr=0.02, calibration=fg.schedule.Piecewise({0: 0.4}))
    assert np.array_equal(trajectory(scheduled), trajectory(fg.FedaGrac(lr=0.02, calibration=0.4)))


def test_one_step_makes_both_options_of_scaffold_the_same():
    """With full batches and K = 1, the mean gradient of a round is the gradient at the server's model."""
    one, two = (trajectory(fg.Scaffold(lr=0.02, option=o), steps=fg.Constant(1)) for o in ("I", "II"))
    assert close(one, two)


def test_the_server_step_of_scaffold_scales_the_way_of_a_round():
    start = quadratics().start()
    whole, half = (trajectory(fg.Scaffold(lr=0.02, server_lr=s), rounds=1)[0] - start for s in (1.0, 0.5))
    assert close(half, whole / 2)


def test_option_one_costs_a_local_epoch_and_moves_two_vectors_each_way():
    cohort = Cohort(0, np.arange(2), np.array([3, 9]), [1, 1], np.ones(2) / 2, np.array([4, 7]), True, None)
    one, two = (fg.Scaffold(lr=0.1, option=option).cost(cohort) for option in ("I", "II"))
    assert one.extra_steps.tolist() == [4, 7]
    assert two.extra_steps.tolist() == [0, 0]
    for cost in (one, two):
        assert (cost.down.tolist(), cost.up.tolist()) == ([2, 2], [2, 2])


# state under partial participation


def test_absent_clients_keep_what_they_sent_last():
    """The cached orientation by hand: constant gradients, hybrid, one client per round, starting from zeros."""
    gradients = [np.array([1.0, 0.0]), np.array([0.0, 1.0]), np.array([2.0, 2.0])]
    seen, nu, cached = [], np.zeros(2), [np.zeros(2)] * 3

    class Follow(fg.Callback):
        def on_round(self, run, record):
            nonlocal nu
            (client,) = run.cohort.clients.tolist()
            seen.append(client)
            cached[client] = gradients[client]
            nu = sum(cached) / 3
            assert np.allclose(run.state["nu"], nu, rtol=1e-12)

    simulate_constant(
        fg.FedaGrac(lr=0.1, init="zeros"), gradients, K=[1, 2, 3], participation=1, rounds=12, callbacks=[Follow()]
    )
    assert set(seen) == {0, 1, 2}


def test_the_cohort_orientation_averages_this_round_only():
    gradients = [np.array([1.0, 0.0]), np.array([0.0, 1.0])]

    class Follow(fg.Callback):
        def on_round(self, run, record):
            (client,) = run.cohort.clients.tolist()
            assert np.allclose(run.state["nu"], gradients[client], rtol=1e-12)

    algorithm = fg.FedaGrac(lr=0.1, orientation="cohort")
    simulate_constant(algorithm, gradients, K=[1, 2], participation=1, rounds=6, callbacks=[Follow()])


def test_drawing_by_weight_counts_a_client_drawn_twice_twice():
    gradients = [np.array([1.0, 0.0]), np.array([0.0, 1.0])]
    participation = fg.Participation(5, by="weight")
    x = np.zeros(2)
    for t in range(4):
        clients, times = participation.draw(t, np.array([0.25, 0.75]), seed=0)
        assert times.sum() == 5
        x = x - sum(n / 5 * 0.1 * [2, 3][i] * gradients[i] for i, n in zip(clients, times, strict=True))
    result = simulate_constant(
        fg.FedAvg(lr=0.1), gradients, K=[2, 3], sizes=[1, 3], participation=participation, rounds=4
    )
    assert np.allclose(result.vector, x, rtol=1e-12)


@pytest.mark.parametrize("name", STATEFUL)
def test_only_clients_that_took_part_have_state(name):
    class Keep(fg.Callback):
        def on_end(self, run, result):
            self.unseen = len(run.table.unseen(np.arange(run.federation.num_clients)))

    keep = Keep()
    gradients = [np.array([float(i), 1.0]) for i in range(30)]
    algorithm = fg.algorithm(name, lr=0.1)
    simulate_constant(algorithm, gradients, K=[1] * 30, participation=3, rounds=2, callbacks=[keep])
    assert 24 <= keep.unseen <= 27


def test_options_are_those_of_the_dataclass():
    assert options_of("fedagrac") == {
        "calibration": 1.0,
        "transmit": "hybrid",
        "first_steps": "epoch",
        "local_reference": "mean",
        "init": "full",
        "orientation": "cached",
        "economical": True,
    }
    assert "transmit" not in options_of("fedagrac-avg")


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("fedavgg", {"lr": 0.1}, "did you mean 'fedavg'"),
        ("fedavg", {"lr": 0.1, "mu": 1}, "fedavg.mu"),
        ("fedavg", {}, "fedavg.lr"),
        ("fedprox", {"lr": 0.1, "mu": -1}, "mu = -1"),
        ("fedagrac", {"lr": 0.1, "calibration": -1}, "calibration"),
        ("fedagrac", {"lr": 0.1, "calibration": "increase"}, "calibration"),
        ("fedagrac", {"lr": 0.1, "transmit": "hybird"}, "did you mean 'hybrid'"),
        ("fedagrac", {"lr": 0.1, "first_steps": 0}, "first_steps"),
        ("fedagrac", {"lr": 0.1, "first_steps": "all"}, "first_steps"),
        ("fedagrac", {"lr": 0.1, "local_reference": "first"}, "local_reference"),
        ("fedagrac", {"lr": 0.1, "init": "weights"}, "init"),
        ("fedagrac", {"lr": 0.1, "orientation": "none"}, "orientation"),
        ("fedlin", {"lr": 0.1, "gradient": "some"}, "gradient"),
        ("scaffold", {"lr": 0.1, "init": "weights"}, "init"),
        ("scaffold", {"lr": 0.1, "option": 1}, "option"),
        ("scaffold", {"lr": 0.1, "server_lr": 0.0}, "server_lr"),
        ("scaffold", {"lr": 0.1, "option": "I", "economical": True}, 'economical.*option="II"'),
        ("diloco", {"lr": 0.1, "merge": "calibrate"}, "did you mean 'calibrated'"),
        ("diloco", {"lr": 0.1, "keep": "yes"}, "keep"),
        ("diloco", {"lr": 0.1, "server_lr": 0.0}, "server_lr"),
        ("diloco", {"lr": 0.1, "momentum": 1.0}, "momentum"),
        ("diloco", {"lr": 0.1, "calibration": -1.0}, "calibration"),
        ("diloco", {"lr": 0.1, "init": "weights"}, "init"),
    ],
)
def test_bad_settings_are_refused(name, options, message):
    with pytest.raises(fg.InputError, match=message):
        fg.algorithm(name, **options)


# what an algorithm declares about itself

FORMS = [
    *[fg.algorithm(name, lr=0.1) for name in ALL],
    fg.Scaffold(lr=0.1, init="full"),
    fg.Scaffold(lr=0.1, option="I"),
    fg.Scaffold(lr=0.1, option="I", init="full", server_lr=0.5),
    fg.FedaGrac(lr=0.1, init="zeros"),
    fg.FedaGrac(lr=0.1, first_steps=3),
    fg.FedaGrac(lr=0.1, first_steps="pass"),
    fg.FedaGrac(lr=0.1, transmit="average", first_steps=3),
    fg.FedLin(lr=0.1, gradient="first"),
    fg.DiLoCo(lr=0.1, merge="work", keep=False),
    fg.DiLoCo(lr=0.1, merge="calibrated"),
    fg.DiLoCo(lr=0.1, merge="calibrated", init="zeros", local=fg.SGD()),
]


class Tried:
    """The first round of an algorithm with three clients, and the gradients that it asked for."""

    def __init__(self, algorithm, steps=(2, 5, 12)):
        self.asked = []
        n = len(steps)
        weights, epochs = np.full(n, 1 / n), np.full(n, 4)
        x = torch.zeros(2, dtype=torch.float64)

        def service(x, clients, round, batch="full"):
            self.asked.append(batch)
            return torch.arange(1.0, 1 + 2 * len(clients), dtype=torch.float64).reshape(-1, 2)

        layout = Layout((Parameter("body.weight", (1, 1), "Linear"), Parameter("head.weight", (1, 1), "Linear")))
        self.state = algorithm.start(x, Population(weights, service, layout=layout))
        cohort = Cohort(0, np.arange(n), np.array(steps), [1] * n, weights, epochs, True, service, layout=layout)
        self.rows = algorithm.enter(self.state, cohort)
        self.asked_at_the_start, self.asked = self.asked, []
        self.plan = algorithm.plan(self.state, self.rows, cohort)
        if self.plan.gradient:  # sent with the models
            self.plan = dataclasses.replace(self.plan, at_start=torch.ones(n, 2, dtype=torch.float64))
        lr = torch.as_tensor(self.plan.lr * self.plan.steps)[:, None]
        correction = 0 if self.plan.correction is None else self.plan.correction
        gradient = torch.ones(n, 2, dtype=torch.float64)
        first = gradient if self.plan.first_steps.any() else None
        total = gradient * torch.tensor(steps)[:, None] if self.plan.accumulate else None
        models = x - lr * (gradient + correction)
        second = None if self.plan.second is None else models
        loss = torch.zeros(n, dtype=torch.float64)
        result = Result(models, loss, first, total, second=second, slots=self.plan.slots)
        self.after, self.rows_after = algorithm.aggregate(self.state, self.rows, cohort, self.plan, result)


@pytest.mark.parametrize("algorithm", FORMS, ids=str)
def test_what_is_kept_is_declared(algorithm):
    tried, traits = Tried(algorithm), algorithm.traits
    assert set(tried.state) == set(tried.after) == traits.state
    assert set(traits.vectors) & set(traits.sums) == set()
    assert "x" in traits.vectors
    assert set(tried.rows) == set(tried.rows_after) == set(traits.rows)


@pytest.mark.parametrize("algorithm", FORMS, ids=str)
def test_what_is_needed_at_the_start_and_exchanged_in_a_round_is_declared(algorithm):
    tried, traits = Tried(algorithm), algorithm.traits
    assert bool(tried.asked_at_the_start) == (traits.start == "gradients")
    assert 1 + len(tried.asked) == traits.exchanges


@pytest.mark.parametrize("algorithm", FORMS, ids=str)
def test_a_correction_comes_from_what_is_declared(algorithm):
    assert algorithm.traits.corrects or Tried(algorithm).plan.correction is None


def test_the_algorithms_without_memory_of_gradients_have_no_correction():
    for algorithm in (fg.FedAvg(lr=0.1), fg.FedProx(lr=0.1, mu=0.1), fg.FedNova(lr=0.1)):
        assert not algorithm.traits.corrects


@pytest.mark.parametrize("algorithm", FORMS, ids=str)
def test_whether_k_must_be_known_before_is_declared(algorithm):
    """The local rule consists of step sizes, corrections and proximal terms. Only K changes here."""
    plan, other = Tried(algorithm, (2, 5, 12)).plan, Tried(algorithm, (7, 3, 4)).plan
    same = np.array_equal(plan.lr, other.lr) and np.array_equal(plan.mu, other.mu)
    if plan.correction is not None:
        same = same and torch.equal(plan.correction, other.correction)
    assert algorithm.traits.needs_steps == (not same)


@pytest.mark.parametrize("algorithm", FORMS, ids=str)
def test_whether_the_step_size_is_that_of_a_step_or_of_a_round_is_declared(algorithm):
    """eta_i K_i, the way of a client with constant gradients, grows with K_i or is the same for all clients.

    An algorithm that mixes another direction into gradients has a smaller eta_i, by one factor for all clients.
    """
    plan = Tried(algorithm).plan
    reach = {"step": algorithm.lr * plan.steps, "round": np.full(3, algorithm.lr)}
    factors = plan.lr * plan.steps / reach[algorithm.traits.lr]
    mixed = {"fedcm": 0.1, "mime": 0.1, "mimelite": 0.1}
    assert np.allclose(factors, mixed.get(algorithm.name, 1.0), rtol=1e-14)


@pytest.mark.parametrize("algorithm", FORMS, ids=str)
def test_how_long_a_first_gradient_may_be_is_declared(algorithm):
    """Every client is fast once and slow once. An epoch has 4 steps, fewer than any K_i."""
    asked = np.maximum(*[Tried(algorithm, steps).plan.first_steps for steps in ((9, 9, 90), (90, 90, 9))])
    declared = {None: 0, "epoch": 4, "pass": 4}.get(algorithm.traits.first_steps, algorithm.traits.first_steps)
    assert asked.tolist() == [declared] * 3


def test_an_algorithm_that_does_not_keep_what_it_declares_is_named():
    class Forgetful(fg.FedAvg):
        @property
        def traits(self):
            return fg.Traits(sums=("nu",))

    with pytest.raises(fg.FedagracError, match=r"Forgetful\.start returned x, but its traits declare nu, x"):
        quadratics().simulate(Forgetful(lr=0.1))
