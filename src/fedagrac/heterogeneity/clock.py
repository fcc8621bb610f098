"""The simulated clock and wire of a synchronous round, which lasts as long as its slowest client."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from fedagrac.errors import InputError, non_negative
from fedagrac.heterogeneity.devices import DeviceProfile, Devices, step_times

if TYPE_CHECKING:
    import numpy.typing as npt

__all__ = ["Clock"]

DEFAULT = DeviceProfile("default", step_time=0.001)


@dataclass(frozen=True)
class Clock:
    """Counts simulated seconds: a round lasts until its slowest member has downloaded, computed and uploaded.

    Attributes:
        devices: one profile for all clients, or one per client. By default every step takes 1 ms and transfers
            take no time.
        jitter: the spread of a log-normal factor on every client's step time, drawn in every round.
        step_flops: the operations per step, for devices given by their flops.

    Examples:
        >>> clock = Clock(DeviceProfile("phone", step_time=0.5, bandwidth_up=10.0))
        >>> K, nothing = np.array([2, 7, 4]), np.zeros(3)
        >>> clock.client_times(0, np.arange(3), K, down=nothing, up=np.array([100, 0, 20]), seed=0).tolist()
        [11.0, 3.5, 4.0]
    """

    devices: DeviceProfile | Sequence[DeviceProfile] = DEFAULT
    jitter: float = 0.0
    step_flops: float | None = None

    def __post_init__(self) -> None:
        given: Any = self.devices
        non_negative("clock.jitter", self.jitter)
        if isinstance(given, DeviceProfile):
            return
        if not isinstance(given, Sequence) or not all(isinstance(p, DeviceProfile) for p in given):
            raise InputError("clock.devices", given, "a DeviceProfile, or one per client")
        object.__setattr__(self, "devices", tuple(given))

    @classmethod
    def of(cls, devices: Devices) -> Clock:
        """Return the clock of the devices that decide the step counts."""
        return cls(devices.resolved, devices.jitter, devices.step_flops)

    def check(self, clients: int) -> None:
        """Refuse profiles that are neither one for all nor one per client."""
        if not isinstance(self.devices, DeviceProfile) and len(self.devices) != clients:
            accepted = f"one profile, or one for each of {clients} clients"
            raise InputError("clock.devices", f"{len(self.devices)} profiles", accepted)

    def client_times(
        self,
        round: int,
        clients: npt.NDArray[np.int64],
        steps: npt.NDArray[Any],
        down: npt.NDArray[Any],
        up: npt.NDArray[Any],
        seed: int,
    ) -> npt.NDArray[np.float64]:
        """Return after how many seconds each member has downloaded, computed its steps and uploaded, [m].

        Args:
            round: rounds already done.
            clients: the members, [m].
            steps: the work of each, counted in steps of the whole model, [m].
            down: bytes each receives, [m].
            up: bytes each sends, [m].
            seed: names the jitter.
        """
        if isinstance(self.devices, DeviceProfile):
            device = self.devices
            each = np.full(len(clients), device.seconds_per_step(self.step_flops))
            members = [device] * len(clients)
            if self.jitter:
                many = [device] * (int(clients.max()) + 1)
                each = step_times(many, self.step_flops, self.jitter, round, seed)[clients]
        else:
            each = step_times(self.devices, self.step_flops, self.jitter, round, seed)[clients]
            members = [self.devices[i] for i in clients]
        wire = np.array([p.transfer_time(d, u) for p, d, u in zip(members, down, up, strict=True)])
        times: npt.NDArray[np.float64] = wire + steps * each
        return times
