"""Devices, the clock and the wire."""

import math

import numpy as np
import pytest
import torch
from torch import nn

import fedagrac as fg
from constant_gradients import simulate as simulate_constant

SLOW = fg.DeviceProfile("slow", step_time=0.5, bandwidth_up=10.0, bandwidth_down=100.0, latency=0.25)
FAST = fg.DeviceProfile("fast", step_time=0.01)


def test_a_device_runs_what_it_manages_before_the_deadline():
    devices = fg.Devices([SLOW, FAST, FAST], deadline=1.3)
    assert devices.counts(0, 3, 0).tolist() == [2, 130, 130]
    assert fg.Devices([SLOW], deadline=0.1).counts(0, 1, 0).tolist() == [1]  # at least one step
    assert fg.Devices([FAST], deadline=1.2).counts(0, 1, 0).tolist() == [120]  # 1.2 / 0.01 < 120 in floats


def test_utilization_leaves_capacity_unused():
    assert fg.Devices([SLOW, FAST], deadline=2.0, utilization=0.25).counts(0, 2, 0).tolist() == [1, 50]
    assert fg.Devices([SLOW, FAST], deadline=2.0, utilization=[1.0, 0.05]).counts(0, 2, 0).tolist() == [4, 10]


def test_jitter_changes_every_round_and_averages_out():
    devices = fg.Devices([FAST] * 50, deadline=1.0, jitter=0.2)
    a, b = devices.counts(0, 50, 7), devices.counts(1, 50, 7)
    assert not np.array_equal(a, b)
    assert np.array_equal(a, devices.counts(0, 50, 7))
    logs = np.log(np.concatenate([devices.counts(t, 50, 7) for t in range(40)]) / 100)
    assert abs(logs.mean()) < 0.02
    assert abs(logs.std() - 0.2) < 0.02


def test_names_and_numbers_of_devices():
    devices = fg.Devices({"raspberry-pi-4": 9, "rtx-3080-ti": 1}, deadline=1.0, step_flops=1e9)
    assert [p.name for p in devices.resolved] == ["raspberry-pi-4"] * 9 + ["rtx-3080-ti"]
    K = devices.counts(0, 10, 0)
    assert K[0] == 48
    assert K[-1] == 34100


def test_the_papers_devices_are_there_with_their_sources():
    assert set(fg.DEVICES) == {"raspberry-pi-4", "jetson-nano", "gtx-1080-ti", "rtx-2080-ti", "rtx-3080-ti"}
    flops = [device.flops for device in fg.DEVICES.values()]
    assert flops == sorted(flops)
    assert 500 < flops[-1] / flops[0] < 1000  # the paper: up to a thousandfold
    assert all("x" in device.source for device in fg.DEVICES.values())


def test_flops_become_step_times_once_the_model_is_known():
    """One linear layer: forward 2 n d c, backward 2 n d c for the weight (none for the input)."""
    X, y = torch.randn(40, 30), torch.randint(0, 5, (40,))
    fed = fg.Federation.from_arrays([(X[:20], y[:20]), (X[20:], y[20:])])
    flops = 2 * (2 * 10 * 30 * 5)
    profile = fg.DeviceProfile("board", flops=flops / 0.25)  # a quarter of a second per step
    other = fg.DeviceProfile("other", step_time=0.5)
    devices = fg.Devices([profile, other], deadline=2.0)
    result = fg.simulate(nn.Linear(30, 5), fed, fg.FedAvg(lr=0.1), rounds=2, steps=devices, batch_size=10)
    assert result.history[0]["steps_mean"] == (8 + 4) / 2
    assert result.history.column("sim_time") == pytest.approx([2.0, 4.0])


def test_a_round_lasts_as_long_as_its_slowest_member():
    """d = 2 doubles = 16 bytes. Slow: 0.5 + 16/100 + 2 * 0.5 + 16/10; fast: 100 * 0.01."""
    clock = fg.Clock([SLOW, FAST])
    gradients = [np.array([1.0, 0.0])] * 2
    result = simulate_constant(fg.FedAvg(lr=0.1), gradients, K=[2, 100], clock=clock)
    assert result.history[0]["sim_time"] == pytest.approx(0.5 + 0.16 + 1.0 + 1.6)
    result = simulate_constant(fg.FedAvg(lr=0.1), gradients, K=[2, 1000], clock=clock)
    assert result.history[0]["sim_time"] == pytest.approx(10.0)


def test_bytes_cost_time_where_the_wire_is_slow():
    """FedaGrac moves a second vector down and, where fast, up: with K = 1 and 3 client 1 is fast."""
    clock = fg.Clock(fg.DeviceProfile("radio", step_time=1e-9, bandwidth_up=16.0, bandwidth_down=32.0))
    gradients = [np.array([1.0, 0.0])] * 2
    start = 16 / 32 + 16 / 16
    two = simulate_constant(fg.FedaGrac(lr=0.1), gradients, K=[1, 3], clock=clock)
    assert two.history[0]["sim_time"] == pytest.approx(start + 32 / 32 + 32 / 16, rel=1e-6)
    one = simulate_constant(fg.FedAvg(lr=0.1), gradients, K=[1, 3], clock=clock)
    assert one.history[0]["sim_time"] == pytest.approx(16 / 32 + 16 / 16, rel=1e-6)


def test_only_the_members_of_the_cohort_are_waited_for():
    clock = fg.Clock([SLOW, FAST, FAST])
    gradients = [np.array([1.0, 0.0])] * 3
    result = simulate_constant(
        fg.FedAvg(lr=0.1), gradients, K=[10, 10, 10], clock=clock, participation=1, rounds=12
    )
    waits = np.diff([0.0, *result.history.column("sim_time")])
    assert set(np.round(waits, 6)) == {0.1, round(5 + 0.5 + 0.16 + 1.6, 6)}


def test_jittered_steps_and_clock_tell_the_same_time():
    """A device with jitter never computes beyond its deadline, and uses most of it."""
    devices = fg.Devices([FAST] * 4, deadline=1.0, jitter=0.5)
    gradients = [np.array([1.0, 0.0])] * 4
    federation = simulate_constant(fg.FedAvg(lr=0.1), gradients, K=[1] * 4).federation
    from constant_gradients import Point, inner_product

    result = fg.simulate(
        Point([0.0, 0.0]), federation, fg.FedAvg(lr=0.01), rounds=10, steps=devices, batch_size=None,
        loss=inner_product, device="cpu",
    )  # fmt: skip
    waits = np.diff([0.0, *result.history.column("sim_time")])
    assert waits.max() <= 1.0 + 1e-9
    assert waits.min() > 0.95


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: fg.DeviceProfile("x"), "either step_time or flops"),
        (lambda: fg.DeviceProfile("x", step_time=1.0, flops=1.0), "either step_time or flops"),
        (lambda: fg.DeviceProfile("x", step_time=-1.0), "step_time"),
        (lambda: fg.DeviceProfile("x", step_time=1.0, bandwidth_up=0), "bandwidth_up"),
        (lambda: fg.DeviceProfile("x", step_time=1.0, latency=-1), "latency"),
        (lambda: fg.DeviceProfile("x", step_time=1.0, bandwidth_down=math.nan), "bandwidth_down"),
        (lambda: fg.Devices([], deadline=1.0), "profiles"),
        (lambda: fg.Devices(FAST, deadline=1.0), "profiles"),
        (lambda: fg.Devices(["raspberry-pi-5"], deadline=1.0), "did you mean 'raspberry-pi-4'"),
        (lambda: fg.Devices([FAST], deadline=0), "deadline"),
        (lambda: fg.Devices([FAST], deadline=1, utilization=25), "utilization"),
        (lambda: fg.Devices([FAST], deadline=1, utilization=[1.0, 1.0]), "one for each of 1 devices"),
        (lambda: fg.Devices([FAST], deadline=1, jitter=-0.1), "jitter"),
        (lambda: fg.Devices({"rtx-3080-ti": 0}, deadline=1), "rtx-3080-ti"),
        (lambda: fg.Devices(["rtx-3080-ti"], deadline=1).counts(0, 1, 0), "step_flops"),
        (lambda: fg.Devices([FAST], deadline=1).check(2, 1), "one for each of 2 clients"),
        (lambda: fg.Clock([FAST]).check(2), "one for each of 2 clients"),
        (lambda: fg.Clock("fast"), "DeviceProfile"),
    ],
)
def test_bad_devices_are_refused(make, message):
    with pytest.raises(fg.InputError, match=message):
        make()
