"""DiLoCo agrees with the paper's equations in NumPy under unequal steps, and reduces to other algorithms."""

import numpy as np
import pytest
import torch

import fedagrac as fg
import numpy_rivals as reference
from quadratics import SIZES, K, Trace, cohorts, quadratics

ETA = 0.02
ROUNDS = 6
SETTINGS = {"server_lr": 0.6, "momentum": 0.8}


def path_of(algorithm, **options):
    trace = Trace()
    quadratics().simulate(algorithm, callbacks=[trace], **{"rounds": ROUNDS, **options})
    return np.array(trace.x)


def apart(a, b):
    return np.abs(a - b).max() / np.abs(b).max()


@pytest.mark.parametrize(("participation", "factor"), [(None, 1.0), (3, 0.6)])
@pytest.mark.parametrize("keep", [True, False])
@pytest.mark.parametrize("merge", ["weight", "work", "calibrated"])
def test_every_round_is_that_of_the_papers_equations(merge, keep, participation, factor):
    options = {**SETTINGS, "merge": merge, "keep": keep, "calibration": 0.7}
    lr = ETA if factor == 1 else fg.schedule.Exponential(ETA, factor)
    ours = path_of(fg.DiLoCo(lr=lr, local=fg.AdamW(weight_decay=0.1), **options), participation=participation)
    q, etas = quadratics(), [ETA * factor**t for t in range(ROUNDS)]
    present = cohorts(participation, ROUNDS)
    theirs = reference.diloco(q, SIZES, K, q.start(), etas, present, decay=0.1, **options)
    assert apart(ours, np.array(theirs)) <= 1e-10


def test_the_defaults_are_the_papers():
    q = quadratics()
    theirs = reference.diloco(
        q, SIZES, K, q.start(), ETA, cohorts(None, ROUNDS), server_lr=0.7, momentum=0.9, merge="weight", keep=True,
        decay=0.1, calibration=0.0,
    )  # fmt: skip
    assert apart(path_of(fg.algorithm("diloco", lr=ETA)), np.array(theirs)) <= 1e-10


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_the_outer_step_is_that_of_torchs_sgd(momentum):
    """The outer gradient of each round follows from a run whose server makes that round as FedAvg would."""
    model = torch.nn.Parameter(torch.from_numpy(quadratics().start()))
    outer = torch.optim.SGD([model], lr=0.7, momentum=momentum, nesterov=momentum > 0)
    path = path_of(fg.DiLoCo(lr=ETA, keep=False, momentum=momentum))
    for x in path:
        q = quadratics()
        module = q.module()
        with torch.no_grad():
            module.weight.copy_(model[None])
        local = fg.AdamW(weight_decay=0.1)
        model.grad = model.detach() - q.simulate(fg.FedAvg(lr=ETA, local=local), rounds=1, module=module).vector
        outer.step()
        assert apart(x, model.detach().numpy()) <= 1e-10


def test_plain_steps_without_momentum_are_exactly_those_of_fedavg_and_fednova():
    plain = {"local": fg.SGD(), "keep": False, "server_lr": 1.0, "momentum": 0.0}
    for merge, other in (("weight", fg.FedAvg(lr=ETA)), ("work", fg.FedNova(lr=ETA))):
        assert np.array_equal(path_of(fg.DiLoCo(lr=ETA, merge=merge, **plain)), path_of(other))
    calibrated = fg.FedaGrac(lr=ETA, calibration=0.5, transmit="average")
    ours = fg.DiLoCo(lr=ETA, merge="calibrated", calibration=0.5, **plain)
    assert np.array_equal(path_of(ours), path_of(calibrated))


def test_plain_steps_have_nothing_to_keep():
    kept, anew = (path_of(fg.DiLoCo(lr=ETA, local=fg.SGD(), keep=keep)) for keep in (True, False))
    assert np.array_equal(kept, anew)


def test_with_equal_steps_merging_by_work_is_merging_by_weight():
    work, weight = (path_of(fg.DiLoCo(lr=ETA, merge=m), steps=fg.Constant(7)) for m in ("work", "weight"))
    assert apart(work, weight) <= 1e-13
    work, weight = (path_of(fg.DiLoCo(lr=ETA, merge=m)) for m in ("work", "weight"))
    assert apart(work, weight) > 1e-2


def test_a_calibration_of_zero_changes_no_bit():
    calibrated = path_of(fg.DiLoCo(lr=ETA, merge="calibrated", calibration=0.0))
    assert np.array_equal(calibrated, path_of(fg.DiLoCo(lr=ETA)))


def test_without_keeping_it_is_fedavgm_with_adamw():
    ours = path_of(fg.DiLoCo(lr=ETA, keep=False))
    local = fg.AdamW(weight_decay=0.1)
    assert np.array_equal(ours, path_of(fg.FedAvgM(lr=ETA, server_lr=0.7, nesterov=True, local=local)))


def test_the_server_counts_the_steps_of_the_rounds_in_which_a_client_took_part():
    class Made(fg.Callback):
        def __init__(self):
            self.expected = np.zeros(len(K))

        def on_round(self, run, record):
            self.expected[run.cohort.clients] += run.cohort.steps
            self.made = run.table.rows(run.cohort.clients)["made"][:, 0].tolist()
            assert self.made == self.expected[run.cohort.clients].tolist()

    watch = Made()
    quadratics().simulate(fg.DiLoCo(lr=ETA), participation=2, rounds=8, callbacks=[watch])
    assert sum(watch.expected > 0) > 2


@pytest.mark.parametrize(
    ("merge", "least", "most"), [("weight", 0.95, 1), ("work", 0, 0.45), ("calibrated", 0.499, 0.501)]
)
def test_only_calibrated_unequal_steps_end_at_the_minimiser(merge, least, most):
    """Clients with minima at 0 and 1 make 2 and 38 steps, as in the docs."""
    clients = [(np.ones((1, 1)), np.zeros(1)), (np.ones((1, 1)), np.ones(1))]
    module = torch.nn.Linear(1, 1, bias=False, dtype=torch.float64)
    with torch.no_grad():
        module.weight.zero_()
    algorithm = fg.DiLoCo(lr=0.005, local=fg.AdamW(weight_decay=0.0), merge=merge)
    x = fg.simulate(
        module, fg.Federation.from_arrays(clients), algorithm, rounds=60, steps=fg.Explicit([[2, 38]]),
        batch_size=None, loss=lambda output, target: 0.5 * ((output.squeeze(-1) - target) ** 2).mean(),
    ).vector.item()  # fmt: skip
    assert least < x < most
