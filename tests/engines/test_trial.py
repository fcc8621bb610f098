"""The trial step: what does not fit together is refused by name before any work, and nothing else is."""

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

import fedagrac as fg
from fedagrac.engines import SerialEngine
from fedagrac.errors import InputError

ENGINES = {"serial": {"engine": "serial"}, "lanes": {"engine": "lanes", "compile": False}}
RNG = np.random.default_rng(0)
SIZES = (9, 12)


class Untouched(SerialEngine):
    """An engine that fails the test if it is asked to work."""

    def run(self, *_):
        raise AssertionError("a round was begun")

    gradients = run


def federation(inputs, targets, sizes=SIZES):
    return fg.Federation.from_arrays([(inputs(n), targets(n)) for n in sizes])


def run(net, fed, loss=None, engine="serial", **options):
    options = {"rounds": 2, "batch_size": 4, "device": "cpu", **ENGINES[engine], **options}
    return fg.simulate(net.double(), fed, fg.FedAvg(lr=0.1), loss=loss, steps=fg.Linear(2, 2), **options)


def numbers(*shape):
    return lambda n: RNG.normal(size=(n, *shape))


def integers(high, *shape, dtype=np.int64):
    return lambda n: RNG.integers(0, high, (n, *shape)).astype(dtype)


# what modules receive


class Seeing(nn.Module):
    """Keeps the types of what its forward pass received last."""

    seen: object = None

    def see(self, *leaves):
        type(self).seen = [leaf.dtype for leaf in leaves]


class Table(Seeing):
    """Looks rows up without nn.Embedding."""

    def __init__(self, how):
        super().__init__()
        torch.manual_seed(0)
        self.how, self.table = how, nn.Parameter(torch.randn(6, 3))

    def forward(self, ids):
        self.see(ids)
        rows = (
            functional.one_hot(ids, 6).to(self.table.dtype) @ self.table
            if self.how == "one_hot"
            else self.table[ids]
        )
        return rows.mean(1)


class Embedded(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding.from_pretrained(Table("table").table.detach(), freeze=False)

    def forward(self, ids):
        return self.table(ids).mean(1)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("how", ["one_hot", "table"])
def test_integers_stay_integers_for_a_module_that_indexes_with_them(how, engine):
    fed = federation(integers(6, 4), integers(3))
    result = run(Table(how), fed, engine=engine)
    assert Table.seen == [torch.int64]
    torch.testing.assert_close(result.vector, run(Embedded(), fed, engine=engine).vector, atol=1e-12, rtol=0)


@pytest.mark.parametrize("dtype", [np.int64, np.int32, np.uint8, bool])
def test_integers_become_floats_for_a_module_that_multiplies_them(dtype):
    counts = integers(2, 5, dtype=dtype)
    data = [(counts(n), RNG.integers(0, 3, n)) for n in SIZES]

    def net():
        torch.manual_seed(0)
        return nn.Linear(5, 3)

    given = run(net(), fg.Federation.from_arrays(data, test=data[0]))
    as_floats = [(X.astype(float), y) for X, y in data]
    expected = run(net(), fg.Federation.from_arrays(as_floats, test=as_floats[0]))
    assert torch.equal(given.vector, expected.vector)
    assert given.history.column("test_loss") == expected.history.column("test_loss")


class PictureAndWords(Seeing):
    def __init__(self):
        super().__init__()
        self.picture, self.table = nn.Linear(8, 3), nn.Parameter(torch.randn(6, 3))

    def forward(self, picture, ids):
        self.see(picture, ids)
        return self.picture(picture.flatten(1)) + self.table[ids].mean(1)


@pytest.mark.parametrize("engine", ENGINES)
def test_only_what_must_be_floats_becomes_floats(engine):
    def both(n):
        return RNG.integers(0, 256, (n, 2, 2, 2)).astype(np.uint8), RNG.integers(0, 6, (n, 4))

    assert run(PictureAndWords(), federation(both, integers(3)), engine=engine).status == "finished"
    assert PictureAndWords.seen == [torch.float64, torch.int64]


class Whole(Seeing):
    """Takes a tuple or a dict as one argument."""

    def __init__(self, keys):
        super().__init__()
        self.keys, self.out = keys, nn.Linear(4, 3)

    def forward(self, batch):
        self.see(*(batch[key] for key in self.keys))
        return self.out(torch.cat([batch[key] for key in self.keys], 1))


class Named(nn.Module):
    def __init__(self):
        super().__init__()
        self.out = nn.Linear(4, 3)

    def forward(self, right, left, scale=1.0):
        return self.out(torch.cat([left, scale * right], 1))


class Plain(nn.Linear):
    def __init__(self):
        super().__init__(4, 3)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("form", ["whole tuple", "whole dict", "keywords", "positions"])
def test_trees_of_inputs_reach_the_module_as_its_forward_takes_them(form, engine):
    """All four compute what a linear layer does with both parts side by side."""
    parts = [(RNG.normal(size=(n, 1)), RNG.normal(size=(n, 3)), RNG.integers(0, 3, n)) for n in SIZES]
    make = {
        "whole tuple": (lambda: Whole((0, 1)), lambda a, b: (a, b)),
        "whole dict": (lambda: Whole(("a", "b")), lambda a, b: {"b": b, "a": a}),
        "keywords": (Named, lambda a, b: {"left": a, "right": b}),
        "positions": (Named, lambda a, b: (b, a)),
    }
    module, tree = make[form]
    torch.manual_seed(0)
    fed = fg.Federation.from_arrays([(tree(a, b), y) for a, b, y in parts])
    result = run(module(), fed, engine=engine)
    torch.manual_seed(0)
    joined = fg.Federation.from_arrays([(np.concatenate([a, b], 1), y) for a, b, y in parts])
    torch.testing.assert_close(result.vector, run(Plain(), joined, engine=engine).vector, atol=1e-12, rtol=0)


# what is refused


class Failing(nn.Linear):
    def __init__(self, when=lambda self: True):
        super().__init__(5, 3)
        self.when = when

    def forward(self, x):
        if self.when(self):
            raise KeyError("no such thing")
        return super().forward(x)


CLASSES = federation(numbers(5), integers(3))


@pytest.mark.parametrize(
    ("net", "message"),
    [
        (nn.Linear(4, 3), r"model = 'Linear': expected a module .*inputs of shape \(7, 5\) torch\.float64"),
        (Failing(), r"model = 'Failing': .*it said: 'no such thing'"),
        (Failing(lambda net: not net.training), r"model = 'Failing': .*it said: 'no such thing'"),
        (Named(), r"model = 'Named': .*missing 1 required positional argument: 'left'"),
        (nn.Linear(5, 2), r"targets = 'labels from 0 to 2': expected labels from 0 to 1, the model's 2 outputs"),
        (nn.Sequential(nn.Linear(5, 1), nn.Flatten(0)), r"model output = \(7,\): expected one column per class"),
    ],
    ids=["shape", "error", "error in eval", "arguments", "labels", "columns"],
)  # fmt: skip
def test_modules_that_fail_are_refused_by_name(net, message):
    with pytest.raises(InputError, match=message):
        fg.simulate(net.double(), CLASSES, fg.FedAvg(lr=0.1), 1, engine=Untouched, device="cpu")


def test_both_attempts_of_integers_are_reported():
    with pytest.raises(
        InputError, match=r"\(7, 5\) torch\.int64; it said: .*; with floating-point inputs: .*mat1"
    ):
        run(nn.Linear(4, 3), federation(integers(9, 5), integers(3)))


def failing_loss(output, target):
    raise ValueError("not today")


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        (failing_loss, r"loss = 'failing_loss': expected a function of \(output \(7, 3\) .*it said: not today"),
        (lambda o, t: functional.cross_entropy(o, t, reduction="none"), r"loss = \(7,\): expected a scalar"),
        (lambda o, t: functional.cross_entropy(o, t).reshape(1), r"loss = \(1,\): expected a scalar"),
        (lambda o, t: functional.cross_entropy(o, t).item(), "loss = 'float': expected a scalar"),
        (lambda o, t: (o.argmax(1) != t).double().mean(), "loss = .*a loss that depends on the module's"),
        (lambda o, t: functional.cross_entropy(o.detach(), t), "loss = .*a loss that depends on the module's"),
        (nn.NLLLoss(reduction="none"), r"loss = \(7,\): expected a scalar"),
    ],
    ids=["error", "vector", "one number", "a float", "accuracy", "detached", "module"],
)  # fmt: skip
def test_losses_that_cannot_train_are_refused_by_name(loss, message):
    with pytest.raises(InputError, match=message):
        fg.simulate(
            nn.Linear(5, 3).double(), CLASSES, fg.FedAvg(lr=0.1), 1, loss=loss, engine=Untouched, device="cpu"
        )


# broadcasting


def column(outputs, zero=False):
    net = nn.Linear(5, outputs)
    if zero:
        nn.init.zeros_(net.weight)
        nn.init.zeros_(net.bias)
    return net


def squared(output, target):
    return ((output - target) ** 2).mean()


BROADCASTING = [
    functional.mse_loss, functional.l1_loss, functional.smooth_l1_loss, functional.huber_loss, nn.MSELoss(),
    squared, functional.poisson_nll_loss, lambda o, t: (o - t).abs().mean(),
    lambda o, t: 3 * squared(o, t) + o.abs().mean(),
    lambda o, t: torch.log(torch.cosh(o - t)).mean(),
]  # fmt: skip


@pytest.mark.parametrize("zero", [False, True], ids=["drawn", "zero"])
@pytest.mark.parametrize("targets", [numbers(), integers(3), np.ones], ids=["floats", "integers", "equal"])
@pytest.mark.parametrize("loss", BROADCASTING)
def test_a_column_against_a_row_is_refused(loss, targets, zero):
    with pytest.raises(
        InputError, match=r"loss = '.* of output \(7, 1\) .* and target \(7,\) .*every output with every"
    ):
        run(column(1, zero), federation(numbers(5), targets), loss)


@pytest.mark.parametrize("loss", BROADCASTING)
def test_a_row_against_a_column_is_refused(loss):
    net = nn.Sequential(column(1), nn.Flatten(0))
    with pytest.raises(InputError, match=r"loss = '.* of output \(7,\) .* and target \(7, 1\)"):
        run(net, federation(numbers(5), numbers(1)), loss)


def test_a_middle_dimension_is_refused_too():
    net = nn.Sequential(column(6), nn.Unflatten(1, (1, 6)))
    with pytest.raises(InputError, match=r"of output \(7, 1, 6\) .* and target \(7, 6\)"):
        run(net, federation(numbers(5), numbers(6)), squared)


def test_fewer_dimensions_than_the_number_of_outputs_are_refused():
    """Seven samples are tried, so that three outputs do not pass for three samples."""
    with pytest.raises(InputError, match=r"loss = 'squared': expected a function of \(output \(7, 3\)"):
        run(column(3), federation(numbers(5), numbers()), squared)
    with pytest.raises(InputError, match=r"and target \(7, 1\)"):
        run(column(3), federation(numbers(5), numbers(1)), functional.mse_loss)


ones = lambda n: np.zeros(n, np.int64)  # noqa: E731
SOUND = {
    "column against column": (1, functional.mse_loss, numbers(1)),
    "own, column against column": (1, squared, numbers(1)),
    "rows of three": (3, squared, numbers(3)),
    "huber": (3, functional.huber_loss, numbers(3)),
    "l1": (3, nn.L1Loss(), numbers(3)),
    "squeezed output": (1, lambda o, t: functional.mse_loss(o.squeeze(1), t), numbers()),
    "squeezed everywhere": (1, lambda o, t: squared(o.squeeze(), t.squeeze()), numbers()),
    "first column": (1, lambda o, t: squared(o[:, 0], t), numbers()),
    "flattened": (1, lambda o, t: squared(o.flatten(), t.flatten()), numbers(1, 1)),
    "unsqueezed targets": (1, lambda o, t: functional.mse_loss(o, t.unsqueeze(1)), numbers()),
    "targets as a column": (1, lambda o, t: squared(o, t[:, None]), integers(4)),
    "viewed targets": (1, lambda o, t: functional.binary_cross_entropy_with_logits(o, t.view(-1, 1)), numbers()),
    "means alone": (1, lambda o, t: (o.mean() - t.mean()) ** 2, numbers()),
    "targets not used": (1, lambda o, t: (o**2).mean(), numbers()),
    "binary": (1, nn.BCEWithLogitsLoss(), lambda n: RNG.integers(0, 2, (n, 1)).astype(float)),
    "several binary": (4, nn.BCEWithLogitsLoss(), lambda n: RNG.integers(0, 2, (n, 4)).astype(float)),
    "classes": (3, None, integers(3)),
    "classes, module": (3, nn.CrossEntropyLoss(label_smoothing=0.1), integers(3)),
    "one class": (1, None, ones),
    "one class, module": (1, nn.CrossEntropyLoss(), ones),
    "probabilities": (3, None, lambda n: RNG.dirichlet([1, 1, 1], n)),
    "probabilities, module": (3, nn.CrossEntropyLoss(), lambda n: RNG.dirichlet([1, 1, 1], n)),
    "one margin": (1, lambda o, t: functional.softplus(-o[:, 0] * (2 * t - 1)).mean(), integers(2)),
    "several margins": (3, nn.MultiMarginLoss(), integers(3)),
    "likelihood": (3, lambda o, t: functional.nll_loss(functional.log_softmax(o, 1), t), integers(3)),
    "pairs of outputs": (2, lambda o, t: functional.gaussian_nll_loss(o[:, 0], t, o[:, 1].exp()), numbers()),
}


@pytest.mark.filterwarnings(
    "ignore:lanes cannot batch the loss", "ignore:clients run one after another in the loss"
)
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("kind", SOUND)
def test_sound_losses_are_accepted_and_mean_what_they_say(kind, engine):
    """One full step of one client is one step of ordinary SGD."""
    outputs, loss, targets = SOUND[kind]
    torch.manual_seed(0)
    net = column(outputs).double()
    X, y = numbers(5)(9), targets(9)
    fed = fg.Federation.from_arrays([(X, y)])
    options = {"batch_size": None, "device": "cpu", **ENGINES[engine]}
    result = fg.simulate(net, fed, fg.FedAvg(lr=0.1), 1, steps=fg.Constant(1), loss=loss, **options)
    (loss or functional.cross_entropy)(net(torch.from_numpy(X)), torch.from_numpy(y)).backward()
    expected = torch.cat([(p - 0.1 * p.grad).detach().flatten() for p in net.parameters()])
    torch.testing.assert_close(result.vector, expected, atol=1e-12, rtol=0)


def test_classes_of_sequences_are_accepted():
    net = nn.Sequential(nn.Linear(5, 12), nn.Unflatten(1, (3, 4)))
    assert run(net, federation(numbers(5), integers(3, 4))).status == "finished"


def test_warnings_of_the_loss_reach_the_user():
    def warns(output, target):
        import warnings

        warnings.warn("mind the gap", UserWarning, stacklevel=1)
        return functional.cross_entropy(output, target)

    with pytest.warns(UserWarning, match="mind the gap"):
        run(nn.Linear(5, 3), CLASSES, warns)


def test_the_trial_leaves_the_callers_random_numbers_alone():
    net = nn.Sequential(nn.Linear(5, 8), nn.Dropout(0.5), nn.Linear(8, 3))
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    run(net, CLASSES)
    assert torch.equal(torch.rand(3), expected)


def test_the_short_batch_at_the_end_of_a_pass_is_tried_before_any_work():
    """9 samples in batches of 4 leave one, of which BatchNorm has no variance."""
    net = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    fed = federation(numbers(3), integers(2))
    with pytest.raises(InputError, match=r"inputs of shape \(1, 3\).*more than 1 value per channel"):
        fg.simulate(
            net.double(), fed, fg.FedAvg(lr=0.1), 1, steps=3, batch_size=4, sampling="cyclic", engine=Untouched
        )
    run(net, fed, sampling="shuffle")  # drops the short batch


def test_the_operations_of_a_step_are_counted_for_recurrent_and_tied_layers_too():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.cells = nn.GRU(3, 5, batch_first=True)
            self.a, self.b = nn.Linear(5, 5, bias=False), nn.Linear(5, 5, bias=False)
            self.b.weight = self.a.weight

        def forward(self, x):
            return self.b(self.a(self.cells(x.reshape(len(x), 7, 3))[0][:, -1]))

    seen = []

    class Count(fg.Callback):
        def on_start(self, run):
            seen.append(run.fleet.workload.step_flops())

    run(Tied(), federation(numbers(21), integers(5)), callbacks=[Count()])
    inputs, states, linear = 2 * 4 * 7 * 3 * 15, 2 * 4 * 7 * 5 * 15, 2 * 4 * 5 * 5
    # forward, weights and states; inputs need no gradient, nor does the first state
    assert seen == [2 * inputs + 3 * states - 2 * 4 * 5 * 15 + 2 * 3 * linear]
