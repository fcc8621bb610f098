"""Samples on disk and transforms of the user's own: the same numbers in every engine."""

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

import fedagrac as fg
from fedagrac.errors import InputError

ENGINES = {"serial": {"engine": "serial"}, "lanes": {"engine": "lanes", "compile": False}}
SIZES, FEATURES, CLASSES, LR = (9, 14, 6, 14), 6, 3, 0.1
RNG = np.random.default_rng(0)
PAIRS = [(RNG.normal(size=(n, FEATURES)), RNG.integers(0, CLASSES, n)) for n in SIZES]


def linear(features=FEATURES):
    torch.manual_seed(0)
    return nn.Linear(features, CLASSES, dtype=torch.float64)


def run(net, fed, algorithm=None, engine="serial", **options):
    options = {"rounds": 3, "batch_size": 4, "device": "cpu", **ENGINES[engine], **options}
    return fg.simulate(net, fed, algorithm or fg.FedAvg(lr=LR), steps=fg.Linear(2, 2), **options)


def same(one, other):
    """Return whether two runs are bit-identical except for their wall times."""
    records = [
        [{key: value for key, value in record.items() if key != "wall_time"} for record in result.history]
        for result in (one, other)
    ]
    return torch.equal(one.vector, other.vector) and records[0] == records[1]


# transforms


def noisy(inputs, generator):
    return inputs + torch.randn(inputs.shape, generator=generator, dtype=inputs.dtype)


@pytest.mark.parametrize("algorithm", [fg.FedAvg(lr=LR), fg.FedaGrac(lr=LR), fg.FedLin(lr=LR)])
@pytest.mark.parametrize("sampling", ["replacement", "shuffle"])
def test_every_engine_gives_a_client_the_same_noise(sampling, algorithm):
    fed = fg.Federation.from_arrays(PAIRS, test=PAIRS[0], transform=noisy)
    serial, lanes = (run(linear(), fed, algorithm, engine, sampling=sampling) for engine in ENGINES)
    torch.testing.assert_close(lanes.vector, serial.vector, atol=1e-12, rtol=0)
    plain = run(linear(), fg.Federation.from_arrays(PAIRS, test=PAIRS[0]), algorithm, sampling=sampling)
    assert (plain.vector - serial.vector).abs().max() > 1e-3
    narrow = fg.simulate(
        linear(), fed, algorithm, 3, steps=fg.Linear(2, 2), batch_size=4, sampling=sampling, device="cpu",
        engine=lambda workload: fg.engines.LanesEngine(workload, width=2),
    )  # fmt: skip
    torch.testing.assert_close(narrow.vector, serial.vector, atol=1e-12, rtol=0)


class Noise(fg.Callback):
    """Adds noise, and keeps the seed and the noise of every batch of a client whose inputs are its number."""

    def __init__(self):
        self.batches = {}

    def on_start(self, run):
        self.batches.clear()  # those of trials

    def __call__(self, inputs, generator):
        noise = torch.rand(inputs.shape, generator=generator, dtype=inputs.dtype)
        self.batches.setdefault((int(inputs[0, 0]), generator.initial_seed()), []).append(noise)
        return inputs + noise


def numbered(transform):
    pairs = [(np.full((8, FEATURES), float(i)), RNG.integers(0, CLASSES, 8)) for i in range(4)]
    return fg.Federation.from_arrays(pairs, transform=transform)


@pytest.mark.parametrize("engine", ENGINES)
def test_noise_is_keyed_by_seed_round_and_client(engine):
    """Two of four clients a round get the batches that they get among all four."""
    noises = {}
    for name, options in {"all": {}, "two": {"participation": 2}, "other": {"seed": 1}}.items():
        noise = Noise()
        run(linear(), numbered(noise), engine=engine, callbacks=[noise], **options)
        # lanes may measure the memory of a step on a batch of client 0
        noises[name] = {key: batches for key, batches in noise.batches.items() if len(batches) > 1}
    everyone, two, other = noises.values()
    assert len({seed for _, seed in everyone}) == len(everyone) == 3 * 4  # rounds and clients
    assert len(two) == 3 * 2
    for (client, seed), batches in two.items():
        K = 2 + 2 * client
        assert all(map(torch.equal, batches[-K:], everyone[client, seed][-K:]))
        assert len({float(batch.sum()) for batch in batches[-K:]}) == K
    assert not {seed for _, seed in everyone} & {seed for _, seed in other}


def test_one_client_by_hand():
    """The steps of a round draw from one generator, one after another."""
    noise = Noise()
    X, y = torch.zeros(5, FEATURES, dtype=torch.float64), torch.arange(5) % CLASSES
    fed = fg.Federation.from_arrays([(X, y)], transform=noise)
    result = fg.simulate(
        linear(), fed, fg.FedAvg(lr=LR), 2, steps=fg.Constant(3), batch_size=None, engine="serial", device="cpu",
        callbacks=[noise],
    )  # fmt: skip
    seeds = [seed for _, seed in noise.batches]
    plain = linear()
    assert len(seeds) == 2
    for seed in seeds:
        generator = torch.Generator().manual_seed(seed)
        for _ in range(3):
            inputs = X + torch.rand(X.shape, generator=generator, dtype=X.dtype)
            loss = functional.cross_entropy(plain(inputs), y)
            gradients = torch.autograd.grad(loss, list(plain.parameters()))
            with torch.no_grad():
                for parameter, gradient in zip(plain.parameters(), gradients, strict=True):
                    parameter.sub_(LR * gradient)
    expected = torch.cat([p.detach().flatten() for p in plain.parameters()])
    torch.testing.assert_close(result.vector, expected, atol=1e-12, rtol=0)


@pytest.mark.parametrize("engine", ENGINES)
def test_full_gradients_see_the_samples_as_they_are(engine):
    """The transform erases the inputs, but nu at x_1 is the gradient over the data."""

    class Start(fg.Callback):
        def on_start(self, run):
            self.nu = run.server.state["nu"].clone()

    start = Start()
    fed = fg.Federation.from_arrays(PAIRS, transform=lambda inputs, _: 0 * inputs)
    run(linear(), fed, fg.FedaGrac(lr=LR), engine, callbacks=[start])
    X, y = (torch.from_numpy(np.concatenate(part)) for part in zip(*PAIRS, strict=True))
    net = linear()
    functional.cross_entropy(net(X), y).backward()  # weights are shares of the samples
    expected = torch.cat([p.grad.flatten() for p in net.parameters()])
    torch.testing.assert_close(start.nu, expected, atol=1e-12, rtol=0)


def test_evaluation_sees_the_samples_as_they_are():
    fed = fg.Federation.from_arrays(PAIRS, test=PAIRS[0], transform=noisy)
    result = run(linear(), fed)
    output = result.model()(torch.from_numpy(PAIRS[0][0]))
    expected = functional.cross_entropy(output, torch.from_numpy(PAIRS[0][1])).item()
    assert result.history[-1]["test_loss"] == pytest.approx(expected, abs=1e-12)


def cropped(inputs, generator):
    """Four of six columns, from a place of the batch's own."""
    start = int(torch.randint(3, (), generator=generator))
    return inputs[:, start : start + 4]


def test_a_transform_may_change_the_shape():
    fed = fg.Federation.from_arrays(PAIRS, transform=cropped)
    serial, lanes = (run(linear(4), fed, engine=engine) for engine in ENGINES)
    torch.testing.assert_close(lanes.vector, serial.vector, atol=1e-12, rtol=0)
    with pytest.raises(InputError, match=r"a module that accepts inputs of shape \(7, 4\)"):
        run(linear(6), fed)


def test_devices_count_the_operations_of_transformed_samples():
    fed = fg.Federation.from_arrays(PAIRS, transform=cropped)
    options = {"steps": fg.Devices([fg.DeviceProfile("phone", flops=1e6)] * 4, 0.01), "batch_size": 4}
    result = fg.simulate(linear(4), fed, fg.FedAvg(lr=LR), 1, engine="serial", device="cpu", **options)
    # forward and the gradient of the weights: 2 * 2 * batch * 4 * 3 operations, at 1e6 a second
    assert result.history[0]["steps_mean"] == int(0.01 * 1e6 / (4 * 4 * 4 * 3))


class Both(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.out, self.table = (
            nn.Linear(2, CLASSES, dtype=torch.float64),
            nn.Embedding(5, CLASSES, dtype=torch.float64),
        )

    def forward(self, numbers, ids):
        return self.out(numbers) + self.table(ids)


def both(n, rng):
    return {"numbers": rng.normal(size=(n, 2)), "ids": rng.integers(0, 5, n)}


def test_a_transform_of_a_dict():
    def transform(inputs, generator):
        assert set(inputs) == {"numbers", "ids"}
        assert inputs["ids"].dtype == torch.int64
        return {**inputs, "numbers": noisy(inputs["numbers"], generator)}

    rng = np.random.default_rng(1)
    fed = fg.Federation.from_arrays(
        [(both(n, rng), rng.integers(0, CLASSES, n)) for n in SIZES], transform=transform
    )
    serial, lanes = (run(Both(), fed, engine=engine) for engine in ENGINES)
    torch.testing.assert_close(lanes.vector, serial.vector, atol=1e-12, rtol=0)


PICTURES = RNG.integers(0, 256, (40, 1, 6, 6), dtype=np.uint8)
LABELS = RNG.integers(0, CLASSES, 40)


def flat():
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(36, CLASSES, dtype=torch.float64))


def test_a_transform_of_pictures_sees_bytes_before_they_are_normalised():
    seen = []

    def inverted(inputs, generator):
        seen.append(inputs.dtype)
        return 255 - inputs

    pool = {"clients": 4, "partition": fg.IID()}
    ours = fg.Federation.from_pool(PICTURES, LABELS, images=fg.Images(0.0, 1.0), transform=inverted, **pool)
    theirs = fg.Federation.from_pool(255 - PICTURES, LABELS, images=fg.Images(0.0, 1.0), **pool)
    assert torch.equal(run(flat(), ours).vector, run(flat(), theirs).vector)
    assert set(seen) == {torch.uint8}


def test_compiled_steps_run_uncompiled_and_say_so():
    fed = fg.Federation.from_arrays(PAIRS, transform=noisy)
    with pytest.warns(UserWarning, match="steps run uncompiled: samples on disk and transforms of your own"):
        result = run(linear(), fed, engine="lanes", compile=True)
    torch.testing.assert_close(result.vector, run(linear(), fed).vector, atol=1e-12, rtol=0)


def failing(inputs, generator):
    raise ValueError("no such place")


@pytest.mark.parametrize(
    ("transform", "message"),
    [
        (
            failing,
            r"transform = 'failing': expected a function \(inputs .*it said: no such place",
        ),
        (lambda inputs: inputs, r"transform = .*it said: .*takes 1 positional argument but 2 were given"),
        (lambda inputs, _: inputs[:2], r"transform = .*as many samples as it gets, 7; it returned \(2, 6\)"),
        (lambda inputs, _: inputs.sum(), r"transform = "),
        (lambda inputs, _: inputs.numpy(), r"transform = "),
        ("flip", r"transform = 'flip': expected a function \(inputs, generator\) -> inputs"),
    ],
    ids=["error", "arguments", "samples", "scalar", "array", "word"],
)
def test_transforms_that_cannot_be_used_are_refused_by_name(transform, message):
    with pytest.raises(InputError, match=message):
        run(linear(), fg.Federation.from_arrays(PAIRS, transform=transform))


# samples on disk


def on_disk(folder, name, values):
    np.save(folder / f"{name}.npy", values)
    return np.load(folder / f"{name}.npy", mmap_mode="r")


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("algorithm", [fg.FedAvg(lr=LR), fg.FedaGrac(lr=LR), fg.FedLin(lr=LR)])
def test_memory_maps_of_clients_give_the_bits_of_memory(algorithm, engine, tmp_path):
    maps = [(on_disk(tmp_path, f"X-{i}", X), on_disk(tmp_path, f"y-{i}", y)) for i, (X, y) in enumerate(PAIRS)]
    mapped = fg.Federation.from_arrays(maps, test=maps[0])
    assert not isinstance(mapped.inputs, torch.Tensor)
    for options in ({}, {"participation": 2, "sampling": "shuffle"}, {"batch_size": None}):
        expected = run(linear(), fg.Federation.from_arrays(PAIRS, test=PAIRS[0]), algorithm, engine, **options)
        assert same(run(linear(), mapped, algorithm, engine, **options), expected)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("padding", [0, 2])
def test_pictures_on_disk_give_the_bits_of_memory(padding, engine, tmp_path):
    images = fg.Images(mean=0.4, std=0.3, padding=padding)
    pool = {"clients": 4, "partition": fg.Dirichlet(0.5), "images": images}
    mapped = fg.Federation.from_pool(on_disk(tmp_path, "pictures", PICTURES), LABELS, **pool)
    assert mapped.inputs.dtype == torch.uint8
    assert not isinstance(mapped.inputs, torch.Tensor)
    expected = run(flat(), fg.Federation.from_pool(PICTURES, LABELS, **pool), fg.FedaGrac(lr=LR), engine)
    assert same(run(flat(), mapped, fg.FedaGrac(lr=LR), engine), expected)


@pytest.mark.parametrize("engine", ENGINES)
def test_one_part_on_disk_and_one_in_memory(engine, tmp_path):
    rng = np.random.default_rng(2)
    inputs, labels = both(40, rng), rng.integers(0, CLASSES, 40)
    pool = {"clients": 4, "partition": fg.IID(), "transform": None}
    parts = {**inputs, "numbers": on_disk(tmp_path, "numbers", inputs["numbers"])}
    mapped = fg.Federation.from_pool(parts, labels, **pool)
    assert [isinstance(leaf, torch.Tensor) for leaf in mapped.inputs.values()] == [False, True]
    expected = run(Both(), fg.Federation.from_pool(inputs, labels, **pool), engine=engine)
    assert same(run(Both(), mapped, engine=engine), expected)


def test_a_transform_of_samples_on_disk(tmp_path):
    X, y = (np.concatenate(part) for part in zip(*PAIRS, strict=True))
    pool = {"clients": 4, "partition": fg.IID(), "transform": noisy}
    for engine in ENGINES:
        mapped = fg.Federation.from_pool(on_disk(tmp_path, f"inputs-{engine}", X), y, **pool)
        expected = run(linear(), fg.Federation.from_pool(X, y, **pool), engine=engine)
        assert same(run(linear(), mapped, engine=engine), expected)


def test_numbers_on_disk_have_the_precision_of_the_model(tmp_path):
    """float32 on disk and a model in float64, and the reverse."""
    for stored, dtype in (("float32", torch.float64), ("float64", torch.float32)):
        pairs = [(X.astype(stored), y) for X, y in PAIRS]
        maps = [(on_disk(tmp_path, f"{stored}-{i}", X), y) for i, (X, y) in enumerate(pairs)]
        net = linear().to(dtype)
        assert same(run(net, fg.Federation.from_arrays(maps)), run(net, fg.Federation.from_arrays(pairs)))


def test_compiled_steps_on_disk_run_uncompiled_and_say_so(tmp_path):
    maps = [(on_disk(tmp_path, f"inputs-{i}", X), y) for i, (X, y) in enumerate(PAIRS)]
    with pytest.warns(UserWarning, match="steps run uncompiled: samples on disk"):
        run(linear(), fg.Federation.from_arrays(maps), engine="lanes", compile=True)
