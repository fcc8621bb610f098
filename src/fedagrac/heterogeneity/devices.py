"""Devices: how fast each client computes and communicates, and how many steps it makes before a deadline."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from fedagrac.core.streams import Purpose, stream
from fedagrac.errors import MOST_CLIENTS, InputError, count, fraction, non_negative, one_of, positive, unknown
from fedagrac.heterogeneity.steps import StepSchedule, whole_steps

if TYPE_CHECKING:
    import numpy.typing as npt

__all__ = ["DEVICES", "DeviceProfile", "Devices", "step_times"]


@dataclass(frozen=True)
class DeviceProfile:
    """One kind of device.

    Attributes:
        name: the name.
        step_time: the seconds of a local step; give either this or flops.
        flops: floating-point operations per second; the step time follows from them and the model.
        bandwidth_up, bandwidth_down: bytes per second; infinite by default.
        latency: the seconds before a transfer begins, once for the download and once for the upload.
        source: where the throughput comes from.

    Examples:
        >>> DeviceProfile("phone", step_time=0.02, bandwidth_up=1e6, bandwidth_down=5e6).seconds_per_step(None)
        0.02
        >>> DeviceProfile("board", flops=2e9).seconds_per_step(step_flops=1e9)
        0.5
    """

    name: str
    step_time: float | None = None
    flops: float | None = None
    bandwidth_up: float = math.inf
    bandwidth_down: float = math.inf
    latency: float = 0.0
    source: str = ""

    def __post_init__(self) -> None:
        if (self.step_time is None) == (self.flops is None):
            value = {"step_time": self.step_time, "flops": self.flops}
            raise InputError(f"device {self.name}", value, "either step_time or flops")
        for field in ("step_time", "flops"):
            if getattr(self, field) is not None:
                positive(f"device {self.name}.{field}", getattr(self, field))
        for field in ("bandwidth_up", "bandwidth_down"):
            if getattr(self, field) != math.inf:
                positive(f"device {self.name}.{field}", getattr(self, field))
        non_negative(f"device {self.name}.latency", self.latency)

    def seconds_per_step(self, step_flops: float | None) -> float:
        """Return the seconds of one local step of `step_flops` operations."""
        if self.step_time is not None:
            return self.step_time
        if step_flops is None:
            raise InputError(
                "step_flops", None, f"the operations per step: device {self.name} is given by its flops"
            )
        assert self.flops is not None
        return step_flops / self.flops

    def transfer_time(self, down: float, up: float) -> float:
        """Return the seconds to download `down` bytes and upload `up` bytes."""
        return 2 * self.latency + down / self.bandwidth_down + up / self.bandwidth_up


DEVICES = {
    profile.name: profile
    for profile in (
        DeviceProfile(
            "raspberry-pi-4",
            flops=48e9,
            source="peak: 4 Cortex-A72 cores x 1.5 GHz x 8 single-precision operations per cycle (128-bit fused "
            "multiply-add), Broadcom BCM2711",
        ),
        DeviceProfile(
            "jetson-nano",
            flops=236e9,
            source="peak: 128 CUDA cores x 0.9216 GHz x 2; NVIDIA states 472 GFLOPS in half precision, twice it",
        ),
        DeviceProfile("gtx-1080-ti", flops=11.3e12, source="peak: 3584 CUDA cores x 1.582 GHz boost x 2 (NVIDIA)"),
        DeviceProfile("rtx-2080-ti", flops=13.4e12, source="peak: 4352 CUDA cores x 1.545 GHz boost x 2 (NVIDIA)"),
        DeviceProfile(
            "rtx-3080-ti", flops=34.1e12, source="peak: 10240 CUDA cores x 1.665 GHz boost x 2 (NVIDIA)"
        ),
    )
}
"""The paper's devices with their peak single-precision throughput, of which small models reach a few percent."""


def step_times(
    profiles: Sequence[DeviceProfile], step_flops: float | None, jitter: float, round: int, seed: int
) -> npt.NDArray[np.float64]:
    """Return every client's seconds per step in a round, [M]; jitter is the spread of a log-normal factor."""
    times = np.array([profile.seconds_per_step(step_flops) for profile in profiles])
    if jitter:
        times = times * np.exp(jitter * stream(seed, Purpose.JITTER, round).standard_normal(len(times)))
    return times


@dataclass(frozen=True)
class Devices(StepSchedule):
    """K_i = the steps that device i makes before the deadline, at least one.

    Attributes:
        profiles: a profile or a name in `DEVICES` per client; or the number of each, {"raspberry-pi-4": 9, ...}.
        deadline: the seconds of computation in a round.
        utilization: the share of its capacity that a device uses, one for all or one per client.
        jitter: the spread of a log-normal factor on every client's step time, drawn in every round.
        step_flops: the operations per step, for devices given by their flops; None to count them from the model.

    Examples:
        >>> slow, fast = DeviceProfile("slow", step_time=0.5), DeviceProfile("fast", step_time=0.01)
        >>> Devices([slow, slow, fast], deadline=1.2).counts(round=0, clients=3, seed=0).tolist()
        [2, 2, 120]
        >>> Devices([slow, fast], deadline=1.2, utilization=0.25).counts(round=0, clients=2, seed=0).tolist()
        [1, 30]
    """

    profiles: Sequence[DeviceProfile | str] | Mapping[str, int]
    deadline: float
    utilization: float | Sequence[float] = 1.0
    jitter: float = 0.0
    step_flops: float | None = None

    def __post_init__(self) -> None:
        given: Any = self.profiles
        if isinstance(given, Mapping):
            most = MOST_CLIENTS // max(1, len(given))
            given = [
                name for name, many in given.items() for _ in range(count(f"profiles.{name}", many, most=most))
            ]
        if isinstance(given, str | DeviceProfile) or not isinstance(given, Sequence) or not given:
            raise InputError("profiles", given, "a list with one device profile, or name of one, per client")
        object.__setattr__(self, "profiles", tuple(_profile(f"profiles[{i}]", p) for i, p in enumerate(given)))
        positive("deadline", self.deadline)
        if isinstance(self.utilization, Sequence) and not isinstance(self.utilization, str):
            shares = tuple(fraction(f"utilization[{i}]", u) for i, u in enumerate(self.utilization))
            if len(shares) != len(self.profiles):
                raise InputError(
                    "utilization", shares, f"one for each of {len(self.profiles)} devices, or one for all"
                )
            object.__setattr__(self, "utilization", shares)
        else:
            fraction("utilization", self.utilization)
        non_negative("jitter", self.jitter)
        if self.step_flops is not None:
            positive("step_flops", self.step_flops)

    @property
    def resolved(self) -> tuple[DeviceProfile, ...]:
        """The profiles; names are replaced by what they name."""
        return tuple(profile for profile in self.profiles if isinstance(profile, DeviceProfile))

    @property
    def needs_flops(self) -> bool:
        """Whether the operations per step must be counted from the model."""
        return self.step_flops is None and any(profile.flops is not None for profile in self.resolved)

    def with_flops(self, step_flops: float) -> Devices:
        """Return these devices with the operations per step of a model."""
        return replace(self, step_flops=step_flops)

    def check(self, clients: int, rounds: int) -> None:
        """Refuse profiles that are not one per client."""
        if len(self.profiles) != clients:
            raise InputError("profiles", f"{len(self.profiles)} devices", f"one for each of {clients} clients")

    def counts(self, round: int, clients: int, seed: int) -> npt.NDArray[np.int64]:
        """Return K_i = max(1, floor(utilization_i * deadline / step time_i))."""
        budget = np.asarray(self.utilization) * self.deadline
        with np.errstate(all="ignore"):  # whole_steps refuses a device that is too fast for a float
            times = step_times(self.resolved, self.step_flops, self.jitter, round, seed)
            # the factor undoes rounding: in floats 1.2 / 0.01 is 119.99999999999999
            return whole_steps("deadline", self.deadline, np.floor(budget / times * (1 + 1e-12)))


def _profile(field: str, given: Any) -> DeviceProfile:
    """Return the profile that a user gave as a profile, a table or a name."""
    if isinstance(given, DeviceProfile):
        return given
    if isinstance(given, Mapping):
        known = [f.name for f in fields(DeviceProfile)]
        for key, value in given.items():
            if key not in known:
                raise unknown(f"{field}.{key}", value, known)
        return DeviceProfile(**{"name": field, **given})
    return DEVICES[one_of(field, given, DEVICES)]
