"""The algorithms, one file each, and the registry of their names.

An algorithm is mathematics on vectors. Batches, devices, processes and files do not belong here.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from fedagrac.algorithms.base import Algorithm
from fedagrac.algorithms.fedagrac import NAMES, FedaGrac
from fedagrac.algorithms.fedavg import FedAvg
from fedagrac.algorithms.fedlin import FedLin
from fedagrac.algorithms.fednova import FedNova
from fedagrac.algorithms.fedprox import FedProx
from fedagrac.algorithms.scaffold import Scaffold
from fedagrac.errors import InputError, one_of, unknown

__all__ = [
    "PAPER",
    "REGISTRY",
    "Algorithm",
    "FedAvg",
    "FedLin",
    "FedNova",
    "FedProx",
    "FedaGrac",
    "Scaffold",
    "algorithm",
    "options_of",
]

PAPER: tuple[type[Algorithm], ...] = (FedAvg, FedProx, FedNova, Scaffold, FedLin, FedaGrac)
"""The algorithms that the paper compares."""

REGISTRY: dict[str, tuple[type[Algorithm], dict[str, Any]]] = {
    "fedavg": (FedAvg, {}),
    "fedprox": (FedProx, {}),
    "fednova": (FedNova, {}),
    "scaffold": (Scaffold, {}),
    "fedlin": (FedLin, {}),
    **{
        name: (FedaGrac, {} if transmit == "hybrid" else {"transmit": transmit})
        for transmit, name in NAMES.items()
    },
}
"""Every algorithm by name: its class, and the settings that the name fixes."""


def options_of(name: str) -> dict[str, Any]:
    """Return the settings of an algorithm besides lr, with their defaults.

    Examples:
        >>> options_of("fedprox")
        {'mu': 0.1}
    """
    cls, fixed = REGISTRY[one_of("name", name, REGISTRY)]
    return {f.name: f.default for f in dataclasses.fields(cls) if f.name not in {"lr", *fixed}}


def algorithm(name: str, **options: Any) -> Algorithm:
    """Make an algorithm by its registered name.

    Examples:
        >>> algorithm("fedagrac-first", lr=0.01).transmit
        'first'
    """
    cls, fixed = REGISTRY[one_of("name", name, REGISTRY)]
    accepted = ["lr", *options_of(name)]
    for key, value in options.items():
        if key not in accepted:
            raise unknown(f"{name}.{key}", value, accepted)
    if "lr" not in options:
        raise InputError(f"{name}.lr", None, "the local step size, a number above 0")
    return cls(**fixed, **options)
