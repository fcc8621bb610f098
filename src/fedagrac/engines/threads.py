"""The number of torch's threads for a run on a CPU.

Threads that wait for one another spin. Where other programs want the same cores, a step of a small model on two
threads takes many times as long as on one, and on an idle machine it gains nothing. Therefore one thread runs a
model unless all of torch's threads are clearly faster. A number that the user set is never changed.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
from collections.abc import Iterator
from typing import TYPE_CHECKING, Literal

import numpy as np
import torch

from fedagrac.engines.choice import MEASURE_FROM, Measurements, candidates

if TYPE_CHECKING:
    from fedagrac.engines.workload import Workload

__all__ = ["choose_threads", "restored_threads", "set_by_user", "use_threads"]

log = logging.getLogger("fedagrac")

AT_IMPORT = torch.get_num_threads()
"""Torch's threads when this package was imported."""

VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")
"""Environment variables that set torch's threads."""

GAIN = 1.15
"""How many times faster all threads must be than one."""

BUSY = 2.0
"""How many times slower all threads are only on a busy machine; later runs then measure them again."""

SMALL_STEP = 10_000_000
"""The most parameters times samples, in one step of all lanes, for which one thread is taken without a trial."""


def choose_threads(
    workload: Workload,
    engine: str,
    compile: bool | Literal["auto"],
    lanes: int,
    client_steps: float,
    corrected: bool = True,
) -> tuple[int, str]:
    """Return the number of torch's threads for a run, and the reason; no reason if it stays as it is.

    Args:
        workload: the problem.
        engine: the requested engine.
        compile: whether to compile steps, as requested.
        lanes: clients that run at a time.
        client_steps: local steps of all clients in the whole run.
        corrected: whether steps have a correction; then they are measured with one.
    """
    threads = torch.get_num_threads()
    if threads == 1 or workload.model.device.type != "cpu" or set_by_user(threads):
        return threads, ""
    if workload.small and _products(workload, lanes) <= SMALL_STEP:
        return 1, "1 thread: the model is small"
    if client_steps < MEASURE_FROM or lanes == 1 or len(candidates(workload, engine, compile)) == 1:
        return threads, ""
    uncompiled = candidates(workload, engine, False)  # compiled steps hold the number that they were compiled for
    us = {}
    with restored_threads():
        for number in (1, threads):
            use_threads(number)
            measurements = Measurements(workload, lanes, corrected)
            us[number] = measurements.fastest(uncompiled)
    if us[threads] > BUSY * us[1]:
        measurements.forget()
    if not math.isfinite(us[1]):
        return threads, ""  # nothing could be measured
    compared = f"1 thread {us[1]:.3g} us, {threads} threads {us[threads]:.3g} us"
    log.info("threads (per client-step: %s)", compared)
    return (threads if us[threads] * GAIN < us[1] else 1), f"threads by measurement: {compared}"


def _products(workload: Workload, lanes: int) -> int:
    """Return parameters times samples of one step of all lanes."""
    samples = workload.batch_sizes(np.arange(workload.federation.num_clients)).max()
    return workload.model.size * int(samples) * lanes


def set_by_user(threads: int) -> bool:
    """Return whether the user set torch's threads: in the environment, or to another number than torch's own.

    Torch's own number is that of the usable cores, or half of it where two hardware threads share a core. Torch
    does not say whether the user set this same number.

    Examples:
        >>> set_by_user(AT_IMPORT + 1)
        True
    """
    if any(os.environ.get(variable) for variable in VARIABLES):
        return True
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return threads != AT_IMPORT or threads not in (cores, cores // 2)


@contextlib.contextmanager
def restored_threads() -> Iterator[None]:
    """Restore the caller's number of torch's threads after a block.

    Examples:
        >>> before = torch.get_num_threads()
        >>> with restored_threads():
        ...     torch.set_num_threads(before + 1)
        >>> torch.get_num_threads() == before
        True
    """
    before = torch.get_num_threads()
    try:
        yield
    finally:
        use_threads(before)


def use_threads(number: int) -> None:
    """Set the number of torch's threads if it is another one: setting it also changes what MKL decides by itself.

    Examples:
        >>> with restored_threads():
        ...     use_threads(3)
        ...     torch.get_num_threads()
        3
    """
    if torch.get_num_threads() != number:
        torch.set_num_threads(number)
