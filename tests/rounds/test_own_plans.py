"""Plans, server rules and step schedules of the user's own: wrong shapes and counts are refused by name."""

from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from torch import nn

import fedagrac as fg
from fedagrac.algorithms.base import Traits
from fedagrac.core.local import Plan
from fedagrac.errors import FedagracError, InputError

FED = fg.Federation.from_arrays(
    [(torch.eye(3)[:2], [0, 1]), (torch.eye(3), [0, 1, 1]), (torch.ones(4, 3), [1, 1, 1, 1])]
)
D = 8  # Linear(3, 2)
FOUR = fg.Constant(4)


@dataclass(frozen=True)
class Mine(fg.FedAvg):
    """FedAvg whose plan or server rule is changed by the functions given, from the second round on."""

    change: object = None
    spoil: object = None

    def plan(self, state, rows, cohort):
        plan = super().plan(state, rows, cohort)
        return self.change(plan) if self.change and cohort.round else plan

    def aggregate(self, state, rows, cohort, plan, result):
        state, rows = super().aggregate(state, rows, cohort, plan, result)
        return self.spoil(state, rows) if self.spoil and cohort.round else (state, rows)


class Watch(fg.Callback):
    """Keeps the server and its model after each round."""

    def on_start(self, run):
        self.server, self.models = run.server, []

    def on_round(self, run, record):
        self.models.append(run.server.x.clone())


def run(algorithm, steps=FOUR, **options):
    torch.manual_seed(0)
    options = {"rounds": 3, "engine": "serial", "device": "cpu", **options}
    return fg.simulate(nn.Linear(3, 2), FED, algorithm, steps=steps, **options)


def refused(algorithm, message, **options):
    """Check that the second round is refused by name and changes nothing."""
    watch = Watch()
    with pytest.raises(InputError, match=message):
        run(algorithm, callbacks=[watch], **options)
    assert len(watch.models) == watch.server.rounds_done == 1
    assert torch.equal(watch.server.x, watch.models[0])


PLANS = {
    "a correction for all": (
        lambda p: replace(p, correction=torch.ones(D)),
        r"Mine\.plan correction = 'shape \[8\] of torch\.float32': expected a tensor \[3, 8\]: one row for each",
    ),
    "too few corrections": (
        lambda p: replace(p, correction=torch.ones(2, D)),
        r"Mine\.plan correction = 'shape \[2, 8\] .*\[3, 8\]",
    ),
    "corrections of another model": (
        lambda p: replace(p, correction=torch.ones(3, D + 1)),
        r"Mine\.plan correction = 'shape \[3, 9\] .*\[3, 8\]",
    ),
    "corrections from NumPy": (
        lambda p: replace(p, correction=np.ones((3, D))),
        r"Mine\.plan correction = .*expected a tensor",
    ),
    "integer corrections": (
        lambda p: replace(p, correction=torch.ones(3, D, dtype=torch.int64)),
        r"Mine\.plan correction = .*torch\.int64",
    ),
    "a wrong length": (
        lambda p: replace(p, lr=np.full(2, 0.1)),
        r"Mine\.plan lr = 'shape \(2,\)': expected one value for each of 3 clients",
    ),
    "a number": (lambda p: replace(p, mu=0.5), r"Mine\.plan mu = 'shape \(\)': expected one value for each"),
    "a list": (lambda p: replace(p, lr=[0.1] * 3), r"Mine\.plan lr = 'list': expected a NumPy array of numbers"),
    "no number": (lambda p: replace(p, lr=np.array([0.1, np.nan, 0.1])), r"Mine\.plan lr = \[0\.1, nan, 0\.1\]"),
    "an infinite one": (lambda p: replace(p, lr=np.array([0.1, np.inf, 0.1])), r"Mine\.plan lr = .*finite"),
    "a negative one": (lambda p: replace(p, mu=np.array([0.1, -1, 0])), r"Mine\.plan mu = .*at least 0"),
    "more first steps than steps": (
        lambda p: replace(p, first_steps=np.array([1, 5, 0])),
        r"Mine\.plan first_steps = \[1, 5, 0\]: expected at most the steps of each client",
    ),
    "negative first steps": (lambda p: replace(p, first_steps=np.array([1, -1, 0])), r"Mine\.plan first_steps = "),
    "other steps": (
        lambda p: replace(p, steps=np.array([4, 3, 4])),
        r"Mine\.plan steps = 3: expected cohort\.steps, 4 for client 1: the step schedule decides K",
    ),
    "steps that are no integers": (
        lambda p: replace(p, steps=p.steps.astype(float)),
        r"Mine\.plan steps = 'float64': expected a NumPy array of integers",
    ),
    "steps of too many": (lambda p: replace(p, steps=np.full(4, 4)), r"Mine\.plan steps = 'shape \(4,\)'"),
    "no plan": (
        lambda p: None,
        r"Mine\.plan = None: expected a Plan, such as Plan\.of\(cohort\.steps",
    ),
    "rates of a wrong length": (
        lambda p: Plan.of(p.steps, [0.1, 0.2]),
        r"Plan\.of lr = 'shape \(2,\)': expected one value, or one for each of 3 clients",
    ),
    "first steps of a wrong length": (
        lambda p: Plan.of(p.steps, 0.1, first_steps=[1, 1]),
        r"Plan\.of first_steps = 'shape \(2,\)'",
    ),
}


@pytest.mark.parametrize("fault", PLANS)
def test_a_plan_that_does_not_fit_is_refused_by_class_and_field(fault):
    change, message = PLANS[fault]
    refused(Mine(lr=0.1, change=change), message)


RULES = {
    "a matrix": (lambda s, r: ({"x": s["x"][None]}, r), r"Mine\.aggregate x = 'shape \[1, 8\] of torch\.float32'"),
    "a longer vector": (
        lambda s, r: ({"x": torch.cat([s["x"], s["x"]])}, r),
        r"Mine\.aggregate x = 'shape \[16\] .*: expected a vector of 8 numbers of torch\.float32",
    ),
    "another precision": (lambda s, r: ({"x": s["x"].double()}, r), r"Mine\.aggregate x = .*torch\.float64"),
}


@pytest.mark.parametrize("fault", RULES)
def test_a_next_model_that_does_not_fit_is_refused_by_class_and_field(fault):
    spoil, message = RULES[fault]
    refused(Mine(lr=0.1, spoil=spoil), message)


@dataclass(frozen=True)
class Keeping(Mine):
    """Keeps a row for every client."""

    @property
    def traits(self):
        return Traits(rows=("own",))

    def enter(self, state, cohort):
        return {"own": torch.zeros(len(cohort), D)}

    def aggregate(self, state, rows, cohort, plan, result):
        return super().aggregate(state, {**rows, "own": result.models}, cohort, plan, result)[0], (
            self.spoil(state, rows)[1] if self.spoil and cohort.round else {"own": result.models}
        )


def test_rows_that_do_not_fit_are_refused_by_class_and_name():
    assert run(Keeping(lr=0.1)).status == "finished"
    one_vector = Keeping(lr=0.1, spoil=lambda s, r: (s, {"own": torch.ones(D)}))
    refused(one_vector, r"Keeping\.aggregate rows own = 'shape \[8\]': expected one row for each of 3 clients")
    with pytest.raises(FedagracError, match=r"Keeping\.aggregate returned mine, but its traits declare own"):
        run(Keeping(lr=0.1, spoil=lambda s, r: (s, {"mine": torch.ones(3, D)})))


def test_a_name_that_the_buffers_use_is_refused():
    class Taken(Mine):
        @property
        def traits(self):
            return Traits(rows=("buffers",))

    with pytest.raises(InputError, match=r"Taken\.traits = 'buffers': expected other names than 'buffers'"):
        run(Taken(lr=0.1))


@dataclass(frozen=True)
class Schedule(fg.StepSchedule):
    """Four steps for everyone in the first round, then what the function makes of it."""

    change: object
    first: int = 1

    def counts(self, round, clients, seed):
        K = np.full(clients, 4)
        return self.change(K) if round >= self.first else K


COUNTS = {
    "no steps": (
        lambda K: K * [1, 0, 1],
        r"Schedule\.counts of round 2 = '0 steps for client 1': expected",
    ),
    "negative steps": (lambda K: -K, r"Schedule\.counts of round 2 = '-4 steps for client 0'"),
    "far too many": (lambda K: K * 10**8, r"Schedule\.counts of round 2 = '400000000 steps for client 0'"),
    "too few counts": (
        lambda K: K[:2],
        r"Schedule\.counts of round 2 = 'shape \(2,\)': expected one",
    ),
    "a table": (lambda K: K[None], r"Schedule\.counts of round 2 = 'shape \(1, 3\)'"),
    "one number": (lambda K: 4, r"Schedule\.counts of round 2 = 'shape \(\)'"),
    "floats": (lambda K: K / 1, r"Schedule\.counts of round 2 = 'numbers of type float64': expected integers"),
    "truth values": (lambda K: K > 3, r"Schedule\.counts of round 2 = 'numbers of type bool': expected integers"),
    "words": (lambda K: ["4"] * 3, r"Schedule\.counts of round 2 = 'numbers of type <U1': expected integers"),
    "nothing": (lambda K: None, r"Schedule\.counts of round 2 = 'shape \(\)'"),
}


@pytest.mark.parametrize("participation", [None, 2])
@pytest.mark.parametrize("fault", COUNTS)
def test_step_counts_that_cannot_be_used_are_refused_by_class_and_round(fault, participation):
    change, message = COUNTS[fault]
    refused(fg.FedAvg(lr=0.1), message, steps=Schedule(change), participation=participation)


@pytest.mark.parametrize("fault", COUNTS)
def test_the_first_round_is_refused_before_any_work(fault):
    change, message = COUNTS[fault]
    watch = Watch()
    with pytest.raises(InputError, match=message.replace("round 2", "round 1")):
        run(fg.FedAvg(lr=0.1), steps=Schedule(change, first=0), callbacks=[watch])
    assert not hasattr(watch, "server")


def test_what_fits_is_accepted():
    """Step counts may be a list. A plan with parts that change nothing gives the numbers of FedAvg."""

    class Full(Mine):
        def plan(self, state, rows, cohort):
            return Plan.of(
                cohort.steps, np.float32(0.1), correction=torch.zeros(len(cohort), D), mu=[0.0] * len(cohort),
                first_steps=2, mean=True,
            )  # fmt: skip

    listed = run(Full(lr=0.1), steps=Schedule(lambda K: [3, 5, 4], first=0))
    expected = run(fg.FedAvg(lr=float(np.float32(0.1))), steps=fg.Explicit([[3, 5, 4]]))
    torch.testing.assert_close(listed.vector, expected.vector)
