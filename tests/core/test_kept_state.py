"""The state of the local optimizer goes on from round to round: engines step as torch.optim without a break."""

import dataclasses

import numpy as np
import pytest
import torch

import fedagrac as fg
from fedagrac.core.cohort import Cohort
from fedagrac.core.local import Plan, Result, check_plan
from fedagrac.engines import LanesEngine, SerialEngine
from fedagrac.models.vector import VectorModel
from fedagrac.rounds.setup import Setup

STEPS = [np.array([3, 7, 5]), np.array([6, 1, 2]), np.array([1, 4, 9])]
"""K_i of three rounds: the order of the clients' counts changes."""

LR = 0.05
ENGINES = {
    "serial": SerialEngine,
    "lanes": LanesEngine,
    "two lanes": lambda workload: LanesEngine(workload, width=2),
    "fixed": lambda workload: LanesEngine(workload, fixed=True),
    "compiled": lambda workload: LanesEngine(workload, compiled=True),
}
OPTIMIZERS = {
    "momentum": (fg.SGD(momentum=0.9), lambda p: torch.optim.SGD(p, lr=LR, momentum=0.9)),
    "nesterov": (
        fg.SGD(momentum=0.8, nesterov=True),
        lambda p: torch.optim.SGD(p, lr=LR, momentum=0.8, nesterov=True),
    ),
    "adam": (fg.Adam(betas=(0.8, 0.95)), lambda p: torch.optim.Adam(p, lr=LR, betas=(0.8, 0.95))),
    "adamw": (fg.AdamW(weight_decay=0.3), lambda p: torch.optim.AdamW(p, lr=LR, weight_decay=0.3)),
}


def federation():
    """Return three clients of one size, which run as one batch of lanes."""
    generator = torch.Generator().manual_seed(3)
    clients = [
        (torch.randn(9, 4, generator=generator, dtype=torch.float64), (torch.arange(9) + i) % 3) for i in range(3)
    ]
    return fg.Federation.from_arrays(clients, test=clients[0])


def module():
    """Return a network with a hidden layer."""
    torch.manual_seed(5)
    return torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.Tanh(), torch.nn.Linear(6, 3)).double()


def workload(batch_size=None):
    setup = Setup.of(rounds=1, batch_size=batch_size, steps=fg.Constant(1))
    return setup.workload(VectorModel(module()), federation())


def gradient_of(client):
    """Return the gradient of a client's full loss as a function of x, by autograd alone."""
    network, fed = module(), federation()
    inputs, targets = fed.inputs[fed.samples_of(client)], fed.targets[fed.samples_of(client)]

    def gradient(x):
        torch.nn.utils.vector_to_parameters(x, network.parameters())
        network.zero_grad()
        torch.nn.functional.cross_entropy(network(inputs), targets).backward()
        return torch.cat([p.grad.reshape(-1) for p in network.parameters()])

    return gradient


def rounds_of(engine, local):
    """Run three rounds, each from where the last one ended; return the clients' models and states after each."""
    problem = workload()
    engine, m = ENGINES[engine](problem), len(STEPS[0])
    x = problem.model.initial().expand(m, -1)
    slots, before = tuple(torch.zeros_like(x) for _ in range(local.slots)), np.zeros(m, np.int64)
    for t, K in enumerate(STEPS):
        plan = dataclasses.replace(Plan.of(K, LR, local=local), slots=slots, before=before)
        given = [slot.clone() for slot in slots]
        result = engine.run(plan, x, np.arange(m), t)
        assert all(torch.equal(slot, copy) for slot, copy in zip(slots, given, strict=True))  # not changed
        x, slots, before = result.models, result.slots, before + K
        yield x, slots


# compiling takes seconds, so one optimizer stands for all
CASES = [(engine, name) for engine in ENGINES for name in OPTIMIZERS if engine != "compiled" or name == "adamw"]


@pytest.mark.parametrize(("engine", "name"), CASES)
def test_three_rounds_of_unequal_steps_are_one_run_of_torch_optim(engine, name, monkeypatch):
    for widths in ("WIDTHS", "COMPILED_WIDTHS"):  # one width: finished lanes stay in the block of the others
        monkeypatch.setattr(f"fedagrac.engines.lanes.fixed.{widths}", 1)
    monkeypatch.setattr("fedagrac.engines.lanes.fixed.UNROLL", (2, 1))  # K = 7 and 9 end within a call
    ours, theirs = OPTIMIZERS[name]
    x = workload().model.initial()
    parameters = [torch.nn.Parameter(x.clone()) for _ in range(3)]
    optimizers = [theirs([p]) for p in parameters]
    for K, (models, slots) in zip(STEPS, rounds_of(engine, ours), strict=True):
        for client, (parameter, optimizer) in enumerate(zip(parameters, optimizers, strict=True)):
            gradient = gradient_of(client)
            for _ in range(K[client]):
                parameter.grad = gradient(parameter.detach().clone())
                optimizer.step()
            torch.testing.assert_close(models[client], parameter.detach(), rtol=0, atol=1e-12)
            state = optimizer.state[parameter]
            wanted = [state[key] for key in ("momentum_buffer", "exp_avg", "exp_avg_sq") if key in state]
            for slot, value in zip(slots, wanted, strict=True):
                torch.testing.assert_close(slot[client], value, rtol=0, atol=1e-12)


@pytest.mark.parametrize("engine", ["serial", "lanes", "fixed"])
@pytest.mark.parametrize("local", [fg.SGD(), fg.SGD(momentum=0.9), fg.AdamW()])
def test_a_state_of_zeros_after_no_step_changes_no_bit(engine, local):
    problem, K = workload(), STEPS[0]
    x, engine = problem.model.initial(), ENGINES[engine](problem)
    plan = Plan.of(K, LR, mean=True, local=local)
    zeros = tuple(torch.zeros(3, len(x), dtype=x.dtype) for _ in range(local.slots))
    kept = dataclasses.replace(plan, slots=zeros, before=np.zeros(3, np.int64))
    forgotten, reported = (engine.run(one, x, np.arange(3), 0) for one in (plan, kept))
    assert torch.equal(reported.models, forgotten.models)
    assert forgotten.slots is None
    assert len(reported.slots) == local.slots


def test_a_lane_that_has_finished_keeps_the_state_with_which_it_ended(monkeypatch):
    """A lane of 1 step is in one block with lanes of 300 and 260, whose steps need two tables."""
    monkeypatch.setattr("fedagrac.engines.lanes.fixed.WIDTHS", 1)
    problem = workload(batch_size=4)
    x = problem.model.initial()
    zeros = tuple(torch.zeros(3, len(x), dtype=x.dtype) for _ in range(2))
    plan = dataclasses.replace(
        Plan.of([1, 300, 260], LR, local=fg.AdamW()), slots=zeros, before=np.array([0, 10, 5])
    )
    serial, fixed = (ENGINES[name](problem).run(plan, x, np.arange(3), 0) for name in ("serial", "fixed"))
    for ours, theirs in zip((fixed.models, *fixed.slots), (serial.models, *serial.slots), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-11)


def test_plans_and_replies_carry_the_state_through_parts_and_joins():
    slots = torch.arange(6.0).reshape(3, 2), 10 + torch.arange(6.0).reshape(3, 2)
    plan = dataclasses.replace(Plan.of([1, 2, 3], LR, local=fg.Adam()), slots=slots, before=np.array([4, 5, 6]))
    part = plan.part(np.array([2, 0]))
    assert (part.before.tolist(), part.slots[1].tolist()) == ([6, 4], [[14.0, 15.0], [10.0, 11.0]])
    joined = Plan.join([plan, part])
    assert joined.before.tolist() == [4, 5, 6, 6, 4]
    assert torch.equal(joined.slots[0], torch.cat([slots[0], part.slots[0]]))
    result = Result(torch.zeros(5, 2), torch.zeros(5), slots=joined.slots)
    first, second = result.split([plan, part])
    assert torch.equal(first.slots[1], slots[1])
    assert torch.equal(second.slots[1], part.slots[1])
    assert result.part(np.array([3])).slots[0].tolist() == [[4.0, 5.0]]


def test_a_reply_whose_state_is_not_finite_is_not_finite():
    slots = torch.tensor([[1.0], [2.0]]), torch.tensor([[1.0], [torch.nan]])
    assert Result(torch.zeros(2, 1), torch.zeros(2), slots=slots).finite().tolist() == [True, False]


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"before": np.zeros(2, np.int64)}, "slots"),
        ({"slots": (torch.zeros(2, 4),) * 2}, "before"),
        ({"slots": (torch.zeros(2, 4),), "before": np.zeros(2, np.int64)}, "slots"),
        ({"slots": (torch.zeros(2, 3),) * 2, "before": np.zeros(2, np.int64)}, "slots"),
        ({"slots": (torch.zeros(2, 4),) * 2, "before": np.array([1, -1])}, "before"),
        ({"slots": (torch.zeros(2, 4),) * 2, "before": np.zeros(2)}, "before"),
    ],
)
def test_a_state_that_does_not_fit_the_optimizer_is_refused(change, field):
    cohort = Cohort(0, np.arange(2), np.array([1, 2]), [1, 1], np.ones(2) / 2, np.ones(2, np.int64), True, None)
    plan = dataclasses.replace(Plan.of([1, 2], LR, local=fg.Adam()), **change)
    with pytest.raises(fg.InputError, match=rf"Mine\.plan {field} = "):
        check_plan("Mine.plan", plan, cohort, 4)
