"""The local rule with all its parts: every engine gives the steps of torch.optim and of plain NumPy."""

import dataclasses

import numpy as np
import pytest
import torch

import fedagrac as fg
from fedagrac.core.local import Plan, Second
from fedagrac.engines import LanesEngine, SerialEngine
from fedagrac.models.vector import VectorModel
from fedagrac.rounds.setup import Setup

STEPS = np.array([3, 7, 5])
LR = 0.05
ENGINES = {
    "serial": SerialEngine,
    "lanes": LanesEngine,
    "fixed": lambda workload: LanesEngine(workload, fixed=True),
}
OPTIMIZERS = {
    "plain": (fg.SGD(), lambda p: torch.optim.SGD(p, lr=LR)),
    "momentum": (fg.SGD(momentum=0.9), lambda p: torch.optim.SGD(p, lr=LR, momentum=0.9)),
    "nesterov": (
        fg.SGD(momentum=0.8, nesterov=True),
        lambda p: torch.optim.SGD(p, lr=LR, momentum=0.8, nesterov=True),
    ),
    "adam": (fg.Adam(betas=(0.8, 0.95)), lambda p: torch.optim.Adam(p, lr=LR, betas=(0.8, 0.95))),
    "adamw": (fg.AdamW(weight_decay=0.3), lambda p: torch.optim.AdamW(p, lr=LR, weight_decay=0.3)),
}


def federation():
    """Return three clients with data of their own."""
    generator = torch.Generator().manual_seed(3)
    clients = [
        (torch.randn(9 + i, 4, generator=generator, dtype=torch.float64), torch.arange(9 + i) % 3)
        for i in range(3)
    ]
    return fg.Federation.from_arrays(clients, test=clients[0])


def module():
    """Return a network with a hidden layer."""
    torch.manual_seed(5)
    return torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.Tanh(), torch.nn.Linear(6, 3)).double()


def workload(weight_decay=0.0, batch_size=None, network=None):
    """Return the problem, by default with a hidden layer and full batches."""
    setup = Setup.of(rounds=1, batch_size=batch_size, weight_decay=weight_decay, steps=fg.Constant(1))
    return setup.workload(VectorModel(network or module()), federation())


def run(engine, plan, weight_decay=0.0):
    """Run a plan on an engine; return its result and the start."""
    problem = workload(weight_decay)
    x = problem.model.initial()
    return ENGINES[engine](problem).run(plan, x, np.arange(3), 0), x


def gradient_of(client, weight_decay=0.0):
    """Return the gradient of a client's full loss as a function of x, by autograd alone."""
    network, fed = module(), federation()
    inputs, targets = fed.inputs[fed.samples_of(client)], fed.targets[fed.samples_of(client)]

    def gradient(x):
        torch.nn.utils.vector_to_parameters(x, network.parameters())
        network.zero_grad()
        torch.nn.functional.cross_entropy(network(inputs), targets).backward()
        return torch.cat([p.grad.reshape(-1) for p in network.parameters()]) + weight_decay * x

    return gradient


def clipped(g, clip):
    """Return a gradient shortened to a norm, as torch.nn.utils.clip_grad_norm_ shortens it."""
    return g if clip is None else g * min(1.0, clip / (float(g.norm()) + 1e-6))


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize(("clip", "decay"), [(None, 0.0), (0.2, 0.0), (None, 0.3), (0.2, 0.3)])
def test_local_optimizers_step_as_torch_optim_does(engine, name, clip, decay):
    """Gradients are clipped before the optimizer adds weight decay, which AdamW has besides its own."""
    ours, theirs = OPTIMIZERS[name]
    plan = Plan.of(STEPS, LR, local=dataclasses.replace(ours, clip=clip))
    result, x = run(engine, plan, weight_decay=decay)
    for client, K in enumerate(STEPS):
        parameter = torch.nn.Parameter(x.clone())
        optimizer, gradient = theirs([parameter]), gradient_of(client)
        if name != "adamw":
            optimizer.param_groups[0]["weight_decay"] = decay
        for _ in range(K):
            parameter.grad = gradient(parameter.detach().clone())
            if clip is not None:
                torch.nn.utils.clip_grad_norm_([parameter], clip)
            if name == "adamw":
                parameter.grad += decay * parameter.detach()
            optimizer.step()
        torch.testing.assert_close(result.models[client], parameter.detach(), rtol=0, atol=1e-12)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("local", [fg.SGD(), fg.SGD(momentum=0.5, clip=0.3), fg.Adam()])
def test_every_part_of_the_rule_follows_the_equation(engine, local):
    """x <- x - eta m o U(h + c + mu (x - x~)) from s, with h = clip(m o g(x + p)) + m o decay (x + p).

    First gradients and sums are those of h.
    """
    d = len(torch.nn.utils.parameters_to_vector(module().parameters()))
    generator = torch.Generator().manual_seed(0)

    def rows():
        return 0.3 * torch.randn(3, d, generator=generator, dtype=torch.float64)

    mask = (torch.rand(3, d, generator=generator) < 0.7).double()
    plan = dataclasses.replace(
        Plan.of(STEPS, LR, correction=rows(), mu=0.4, first_steps=[2, 0, 5], mean=True, local=local),
        start=rows(), mask=mask, beside=rows(), scale=1 + rows(),
    )  # fmt: skip
    result, center = run(engine, plan, weight_decay=0.1)
    for i, K in enumerate(STEPS):
        gradient = gradient_of(i)
        x, slots = plan.start[i].clone(), [torch.zeros(d, dtype=torch.float64) for _ in range(local.slots)]
        total, first = torch.zeros_like(x), torch.zeros_like(x)
        for k in range(K):
            y = x + plan.beside[i]
            g = clipped(mask[i] * plan.scale[i] * gradient(plan.scale[i] * y), local.clip) + 0.1 * mask[i] * y
            total += g
            if k < plan.first_steps[i]:
                first += g / plan.first_steps[i]
            u = g + plan.correction[i] + 0.4 * (x - center)
            u = local.direction(u, x, slots, local.numbers(k))
            x = x - LR * mask[i] * u
        torch.testing.assert_close(result.models[i], x, rtol=0, atol=1e-12)
        torch.testing.assert_close(result.total[i], total, rtol=0, atol=1e-12)
        torch.testing.assert_close(result.first[i], first, rtol=0, atol=1e-12)
        assert bool((result.models[i][mask[i] == 0] == plan.start[i][mask[i] == 0]).all())


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("clip", [None, 0.2])
def test_an_ascent_takes_the_gradient_at_the_top_of_a_ball(engine, clip):
    rho = np.array([0.0, 0.1, 0.5])
    plan = dataclasses.replace(Plan.of(STEPS, LR, local=fg.SGD(clip=clip)), ascent=rho)
    result, start = run(engine, plan, weight_decay=0.2)
    for i, K in enumerate(STEPS):
        gradient, x = gradient_of(i), start.clone()
        for _ in range(K):
            g = gradient(x) + 0.2 * x
            y = x + rho[i] * g / g.norm()
            x = x - LR * (clipped(gradient(y), clip) + 0.2 * y)
        torch.testing.assert_close(result.models[i], x, rtol=0, atol=1e-12)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("clip", [None, 0.05])
def test_an_anchor_subtracts_the_gradient_at_the_servers_model(engine, clip):
    plan = dataclasses.replace(Plan.of(STEPS, LR, correction=None, local=fg.SGD(clip=clip)), anchored=True)
    rows = torch.randn(3, 51, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    result, center = run(engine, dataclasses.replace(plan, start=rows), weight_decay=0.2)
    for i, K in enumerate(STEPS):
        gradient, x = gradient_of(i), rows[i].clone()
        for _ in range(K):
            x = x - LR * (clipped(gradient(x) - gradient(center), clip) + 0.2 * (x - center))
        torch.testing.assert_close(result.models[i], x, rtol=0, atol=1e-12)


class SignSGD(fg.SGD):
    """A user's own optimizer, made from SGD."""

    def direction(self, G, X, slots, numbers):
        return super().direction(G, X, slots, numbers).sign()


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("local", [SignSGD(), SignSGD(momentum=0.5)])
def test_a_subclass_of_sgd_with_a_direction_of_its_own_is_obeyed(engine, local, monkeypatch):
    monkeypatch.setattr("fedagrac.engines.serial.SMALL", 1)  # so that plain steps would go parameter by parameter
    result, start = run(engine, Plan.of(STEPS, LR, mean=True, local=local))
    for i, K in enumerate(STEPS):
        gradient, x, b = gradient_of(i), start.clone(), 0.0
        total = torch.zeros_like(x)
        for _ in range(K):
            g = gradient(x)
            total += g
            b = local.momentum * b + g
            x = x - LR * b.sign()
        torch.testing.assert_close(result.models[i], x, rtol=0, atol=1e-12)
        torch.testing.assert_close(result.total[i], total, rtol=0, atol=1e-12)
    with pytest.raises(fg.InputError, match="not a sum of gradients"):
        fg.FedNova(lr=0.1, local=local)


def test_a_subclass_of_sgd_with_the_same_direction_stays_plain():
    class Named(fg.SGD):
        pass

    assert Named().plain
    assert not Named(clip=1.0).plain


@pytest.mark.parametrize("parts", ["points", "ascent", "anchored", "second"])
def test_compiled_steps_have_every_part_of_the_rule(parts, monkeypatch):
    """In as few compilations as the parts allow; the other engines' numbers are those of the equation."""
    monkeypatch.setattr("fedagrac.engines.lanes.fixed.COMPILED_WIDTHS", 1)
    monkeypatch.setattr("fedagrac.engines.lanes.fixed.UNROLL", (1,))
    torch.manual_seed(5)
    problem = workload(0.1, 4, torch.nn.Linear(4, 3).double())  # batches of 4: all clients are lanes of one wave
    x = problem.model.initial()
    generator = torch.Generator().manual_seed(0)
    rows = lambda: 0.3 * torch.randn(3, len(x), generator=generator, dtype=torch.float64)  # noqa: E731
    mask = (torch.rand(3, len(x), generator=generator) < 0.7).double()
    local = {
        "points": fg.SGD(momentum=0.8, nesterov=True, clip=0.3), "ascent": fg.Adam(clip=0.2),
        "anchored": fg.SGD(clip=0.2), "second": SignSGD(),
    }[parts]  # fmt: skip
    plan = Plan.of(STEPS, LR, correction=rows(), mu=0.4, first_steps=[2, 0, 5], mean=True, local=local)
    if parts == "points":
        plan = dataclasses.replace(plan, start=rows(), mask=mask, beside=rows(), scale=1 + rows())
    elif parts == "ascent":
        plan = dataclasses.replace(plan, mask=mask, ascent=np.array([0.0, 0.1, 0.5]))
    elif parts == "anchored":
        plan = dataclasses.replace(plan, start=rows(), anchored=True)
    else:
        plan = dataclasses.replace(plan, second=Second(rows(), plan.lr, plan.mu)).of_second()
    engine = LanesEngine(problem, compiled=True)
    ours, theirs = (one.run(plan, x, np.arange(3), 0) for one in (engine, SerialEngine(problem)))
    assert engine.compiled
    assert len(engine.prepared) == 1
    for name in ("models", "loss", "first", "total"):
        if getattr(theirs, name) is not None:
            torch.testing.assert_close(getattr(ours, name), getattr(theirs, name), rtol=0, atol=1e-11)


@pytest.mark.parametrize("engine", ENGINES)
def test_parts_that_do_nothing_change_no_bit(engine):
    d = len(torch.nn.utils.parameters_to_vector(module().parameters()))
    plan = Plan.of(STEPS, LR, correction=torch.ones(3, d, dtype=torch.float64), first_steps=2, mean=True)
    plain, x = run(engine, plan)
    ones = torch.ones(3, d, dtype=torch.float64)
    for change in (
        {"mask": ones}, {"start": x.expand(3, -1)}, {"beside": 0 * ones}, {"scale": ones},
        {"ascent": np.zeros(3)}, {"local": fg.SGD(clip=1e9)},
    ):  # fmt: skip
        changed, _ = run(engine, dataclasses.replace(plan, **change))
        # a last lane that runs alone is not vmapped, unless its gradient is taken at a point beside it
        apart = 1e-15 if engine == "lanes" and {*change} & {"beside", "scale", "ascent"} else 0.0
        torch.testing.assert_close(changed.models, plain.models, rtol=0, atol=apart)
        torch.testing.assert_close(changed.first, plain.first, rtol=0, atol=apart)


def test_the_mean_gradient_is_summed_wherever_it_cannot_be_reconstructed():
    plan = Plan.of(STEPS, 1.0, mean=True)
    assert not plan.accumulate
    ones = torch.ones(3, 2)
    for change in (
        {"local": fg.SGD(momentum=0.9)}, {"local": fg.SGD(clip=1.0)}, {"local": fg.Adam()}, {"mask": ones},
        {"start": ones}, {"mu": np.ones(3)},
    ):  # fmt: skip
        assert dataclasses.replace(plan, **change).accumulate, change
    for change in ({"beside": ones}, {"scale": ones}, {"ascent": np.ones(3)}):
        assert not dataclasses.replace(plan, **change).accumulate, change


def test_fednova_divides_by_the_sum_of_its_own_coefficients():
    """With gradients that are constant, x_i = x~ - eta |a_i|_1 g_i, so x = x~ - eta tau sum_i omega_i g_i."""
    for local, coefficients in (
        (fg.SGD(momentum=0.5), [[1.0], [1.0, 1.5], [1.0, 1.5, 1.75]]),
        (fg.SGD(momentum=0.5, nesterov=True), [[1.5], [1.5, 1.75], [1.5, 1.75, 1.875]]),
    ):
        work = np.array([sum(a) for a in coefficients])
        assert np.allclose(local.work(np.array([1, 2, 3])), work)
    with pytest.raises(fg.InputError, match="not a sum of gradients"):
        fg.FedNova(lr=0.1, local=fg.Adam())


def test_a_schedule_of_the_step_size_is_followed_round_by_round():
    fed, model = federation(), module()
    options = {"steps": fg.Explicit([[2, 5, 3]]), "batch_size": None}
    decay = fg.schedule.Exponential(0.2, 0.5)
    scheduled = fg.simulate(model, fed, fg.FedaGrac(lr=decay), rounds=2, **options)
    x = fg.simulate(model, fed, fg.FedaGrac(lr=0.2), rounds=1, **options)
    assert not torch.equal(
        scheduled.vector, fg.simulate(model, fed, fg.FedaGrac(lr=0.2), rounds=2, **options).vector
    )
    first = fg.simulate(model, fed, fg.FedaGrac(lr=decay), rounds=1, **options)
    assert torch.equal(first.vector, x.vector)


@pytest.mark.parametrize(
    "make",
    [
        lambda: fg.SGD(momentum=1.0),
        lambda: fg.SGD(nesterov=True),
        lambda: fg.SGD(clip=0.0),
        lambda: fg.Adam(betas=(0.9,)),
        lambda: fg.Adam(eps=0.0),
        lambda: fg.AdamW(weight_decay=-1.0),
        lambda: fg.FedAvg(lr=0.1, local="adam"),
        lambda: fg.FedAvg(lr=fg.schedule.Exponential(0.0, 0.9)),
        lambda: fg.FedAvg(lr=lambda done: -1.0),
    ],
)
def test_wrong_settings_are_refused(make):
    with pytest.raises(fg.InputError):
        make()


def test_an_algorithm_that_ignores_its_schedule_is_told_so():
    class Plain(fg.FedAvg):
        def plan(self, state, rows, cohort):
            return Plan.of(cohort.steps, self.lr)

    algorithm = Plain(lr=fg.schedule.Exponential(0.1, 0.9))
    with pytest.raises(fg.InputError, match=r"Plan\.of lr = .*self\.lr_in\(cohort\)"):
        fg.simulate(module(), federation(), algorithm, rounds=1, steps=fg.Constant(1), batch_size=None)
