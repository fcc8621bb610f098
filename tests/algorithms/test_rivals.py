"""The algorithms beside the paper's agree with NumPy, round by round, and reduce to one another."""

import re

import numpy as np
import pytest
import torch

import fedagrac as fg
import numpy_rivals as reference
from fedagrac.core.cohort import Cohort
from fedagrac.core.local import Plan, Result
from quadratics import SIZES, K, Trace, cohorts, quadratics

ETA = 0.02
ROUNDS = 6
LR = fg.schedule.Exponential(0.1, 0.9)
SETTINGS = {
    "all clients": (None, ETA, ETA),
    "a cohort, and lr falls": (3, fg.schedule.Exponential(0.03, 0.6), [0.03 * 0.6**t for t in range(ROUNDS)]),
}
"""The cohort's size, lr, and the step size of every round."""

CASES = {
    "fedavgm": (reference.fedavgm, {"momentum": 0.7, "server_lr": 0.8}),
    "fedadam": (reference.fedopt, {"server_lr": 0.1, "beta1": 0.8, "beta2": 0.9, "tau": 0.01}),
    "fedyogi": (reference.fedopt, {"server_lr": 0.1, "beta1": 0.8, "beta2": 0.9, "tau": 0.01}),
    "fedadagrad": (reference.fedopt, {"server_lr": 0.1, "beta1": 0.3, "beta2": 0.9, "tau": 0.01}),
    "feddyn": (reference.feddyn, {"alpha": 0.3}),
    "fedcm": (reference.fedcm, {"alpha": 0.4, "server_lr": 0.9}),
    "fedacg": (reference.fedacg, {"momentum": 0.6, "mu": 0.2}),
    "mimelite": (reference.mime, {"momentum": 0.6}),
    "mime": (reference.mime, {"momentum": 0.6}),
    "fedvarp": (reference.fedvarp, {"server_lr": 0.9}),
    "mifa": (reference.fedvarp, {"server_lr": 0.9}),
    "fedexp": (reference.fedexp, {"eps": 1e-3}),
    "scaffnew": (reference.scaffnew, {"p": 0.2}),
    "fedsam": (reference.fedsam, {"rho": 0.3}),
    "fedlesam": (reference.fedlesam, {"rho": 0.3}),
}
SAYS = {
    "fedadam": {"kind": "fedadam"}, "fedyogi": {"kind": "fedyogi"}, "fedadagrad": {"kind": "fedadagrad"},
    "mimelite": {"lite": True}, "mime": {"lite": False}, "fedvarp": {"mifa": False}, "mifa": {"mifa": True},
}  # fmt: skip


def path_of(algorithm, participation=None, **options):
    trace = Trace()
    quadratics().simulate(algorithm, callbacks=[trace], participation=participation, rounds=ROUNDS, **options)
    return np.array(trace.x)


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("name", CASES)
def test_every_round_is_that_of_the_papers_equations(name, setting):
    rule, options = CASES[name]
    participation, lr, etas = SETTINGS[setting]
    ours = path_of(fg.algorithm(name, lr=lr, **options), participation)
    q = quadratics()
    present = cohorts(participation, ROUNDS)
    theirs = rule(q, SIZES, K, q.start(), etas, present, **options, **SAYS.get(name, {}))
    assert np.abs(ours - np.array(theirs)).max() <= 1e-10 * np.abs(theirs).max()


NEUTRAL = {
    "fedacg": {"momentum": 0.0, "mu": 0.0},
    "mimelite": {"momentum": 0.0},
    "fedvarp": {},
    "mifa": {},
    "fedsam": {"rho": 0.0},
    "fedlesam": {"rho": 0.0},
}


@pytest.mark.parametrize("name", NEUTRAL)
def test_without_its_own_part_each_is_fedavg_exactly(name):
    assert np.array_equal(path_of(fg.algorithm(name, lr=ETA, **NEUTRAL[name])), path_of(fg.FedAvg(lr=ETA)))


def test_without_momentum_fedavgm_is_the_algorithm_inside_exactly():
    for inner in (None, fg.FedaGrac(lr=ETA), fg.Scaffold(lr=ETA), fg.FedNova(lr=ETA)):
        wrapped = fg.FedAvgM(lr=ETA, momentum=0.0, inner=inner)
        alone = fg.FedAvg(lr=ETA) if inner is None else type(inner)(lr=ETA)
        assert np.array_equal(path_of(wrapped), path_of(alone))


@pytest.mark.parametrize("local", [fg.SGD(), fg.SGD(momentum=0.9), fg.SGD(momentum=0.5, nesterov=True, clip=3.0)])
def test_fedcm_with_gradients_alone_is_fednova_exactly(local):
    cm, nova = fg.FedCM(lr=ETA / 2, alpha=1.0, local=local), fg.FedNova(lr=ETA / 2, local=local)
    assert np.array_equal(path_of(cm), path_of(nova))


def test_fedcm_with_local_momentum_divides_by_the_norm_of_its_coefficients():
    settings, q = {"alpha": 0.3, "server_lr": 0.9}, quadratics()
    ours = path_of(fg.FedCM(lr=0.002, local=fg.SGD(momentum=0.9), **settings), participation=3)
    theirs = reference.fedcm(q, SIZES, K, q.start(), 0.002, cohorts(3, ROUNDS), momentum=0.9, **settings)
    assert np.abs(ours - np.array(theirs)).max() <= 1e-10 * np.abs(theirs).max()


def test_fedcm_refuses_an_optimizer_without_coefficients():
    with pytest.raises(fg.InputError, match=r"local = Adam\(\): expected SGD"):
        fg.FedCM(lr=0.1, local=fg.Adam())


def test_under_a_robust_rule_fedcm_compares_directions_as_fednova_does():
    """D_i grow with K_i, so their median would be that of a fast client, and not of a direction."""
    both = (fg.FedCM(lr=ETA, alpha=1.0), fg.FedNova(lr=ETA))
    cm, nova = (path_of(algorithm, aggregate=fg.Median()) for algorithm in both)
    assert np.array_equal(cm, nova)
    assert np.abs(cm - path_of(fg.FedCM(lr=ETA, alpha=1.0))).max() > 1e-3


def test_under_a_robust_rule_one_long_update_does_not_set_the_server_step_of_fedexp():
    """Three clients send D_i = 1 and one sends 1e6: the median of |D_i|^2 is 1, so eta_g = 1 and x moves by 1."""
    ones = np.ones(4, np.int64)
    cohort = Cohort(0, np.arange(4), ones, [1] * 4, ones / 4, ones, True, None, aggregate=fg.Median())
    models = -torch.tensor([[1.0], [1.0], [1.0], [1e6]], dtype=torch.float64)
    state, result = {"x": torch.zeros(1, dtype=torch.float64)}, Result(models, torch.zeros(4))
    after, _ = fg.FedExP(lr=0.1).aggregate(state, {}, cohort, Plan.of(ones, 0.1), result)
    assert float(after["x"]) == -1.0


def test_a_server_optimizer_goes_around_fedagrac_and_keeps_its_orientation():
    q, trace = quadratics(), Trace()
    q.simulate(fg.FedAvgM(lr=ETA, momentum=0.3, inner=fg.FedaGrac(lr=ETA)), callbacks=[trace], rounds=200)
    assert np.abs(trace.x[-1] - q.minimiser()).max() < 1e-6


def test_a_server_optimizer_asks_the_algorithm_inside_in_every_hook():
    """What a server optimizer does not pass on would be the default of the base class, silently."""
    hooks = {name for name, value in vars(fg.Algorithm).items() if callable(value) or isinstance(value, property)}
    own = {"__post_init__", "papers", "lr_in", "name"}  # one lr and one local optimizer hold for the whole
    passed_on = {name for name in hooks if name in vars(fg.ServerOptimizer)}
    assert {name for name in hooks - passed_on if not name.startswith("__") or name in own} == own


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: fg.FedAdam(lr=0.1, inner=fg.Scaffold(lr=0.01)),
            r"inner.lr = 0.01: expected the lr of the whole, 0.1",
        ),
        (
            lambda: fg.FedAvgM(lr=LR, inner=fg.FedAvg(lr=fg.schedule.Exponential(0.1, 0.8))),
            r"inner.lr = Exponential\(first=0.1, factor=0.8\)",
        ),
        (
            lambda: fg.FedAdam(lr=0.1, inner=fg.FedAvg(lr=0.1, local=fg.SGD(momentum=0.9))),
            r"inner.local = SGD\(momentum=0.9\): expected the local optimizer of the whole, SGD\(\)",
        ),
        (lambda: fg.FedAvgM(lr=0.1, inner=fg.DiLoCo(lr=0.1)), r"inner.local = AdamW\(weight_decay=0.1\)"),
    ],
)
def test_a_setting_inside_that_the_whole_does_not_have_is_refused(make, message):
    with pytest.raises(fg.InputError, match=message):
        make()


def test_the_lr_and_the_local_optimizer_of_the_whole_hold_inside():
    local = fg.SGD(momentum=0.9)
    for inner in (fg.FedNova(lr=LR), fg.FedNova(lr=fg.schedule.Exponential(0.1, 0.9), local=local)):
        whole = fg.FedAvgM(lr=LR, local=local, inner=inner)
        assert whole.inside == fg.FedNova(lr=LR, local=local)
    assert whole.with_lr(0.3).inside == fg.FedNova(lr=0.3, local=local)


def test_one_server_optimizer_inside_another_is_refused():
    with pytest.raises(fg.InputError, match="inner"):
        fg.FedAdam(lr=0.1, inner=fg.FedAvgM(lr=0.1))


@pytest.mark.parametrize("participation", [None, 3])
def test_the_control_variates_of_scaffnew_sum_to_zero(participation):
    q = quadratics()

    class Sum(fg.Callback):
        def on_round(self, run, record):
            seen = np.setdiff1d(np.arange(len(K)), run.table.unseen(np.arange(len(K))))
            h = run.table.rows(seen)["h"]
            self.sum = (torch.as_tensor(q.omega[seen]) @ h).abs().max()

    watch = Sum()
    scaffnew = fg.Scaffnew(lr=ETA, p=0.1)
    q.simulate(scaffnew, callbacks=[watch], rounds=8, participation=participation)  # the steps are unequal
    assert float(watch.sum) < 1e-12


@pytest.mark.parametrize("local", [fg.SGD(momentum=0.5), fg.Adam(), fg.AdamW()], ids=str)
def test_scaffnew_refuses_optimizers_whose_steps_are_not_of_one_gradient(local):
    with pytest.raises(fg.InputError, match=r"local = .*: expected SGD without momentum"):
        fg.Scaffnew(lr=ETA, local=local)


@pytest.mark.parametrize(
    ("p", "steps", "warned"),
    [
        (0.1, fg.Constant(100), "for 10 steps a round, but the schedule has 100 .* p = 0.01, .*diverge"),
        (0.1, fg.Constant(2), "has 2 on average.* p = 0.5, .*slowly"),
        (0.1, fg.Geometric(0.1), None),
        (0.06, None, None),
    ],
)  # fmt: skip
def test_scaffnew_warns_of_a_p_that_does_not_fit_the_steps(p, steps, warned, caplog):
    quadratics().simulate(fg.Scaffnew(lr=0.001, p=p), rounds=20, steps=steps)
    assert not caplog.text if warned is None else re.search(warned, caplog.text)


@pytest.mark.parametrize("name", ["feddyn", "scaffnew"])
def test_with_unequal_steps_the_minimum_stays_where_it_is(name):
    """The control variates become the clients' gradients at the minimum, whatever their K_i."""
    q = quadratics()
    trace = Trace()
    options = {"alpha": 2.0} if name == "feddyn" else {"p": 0.06}
    q.simulate(fg.algorithm(name, lr=0.02, **options), callbacks=[trace], rounds=200)
    assert np.abs(trace.x[-1] - q.minimiser()).max() < 1e-5
