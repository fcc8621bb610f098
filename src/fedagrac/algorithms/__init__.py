"""The algorithms, one file each, and the registry of their names.

An algorithm is mathematics on vectors. Batches, devices, processes and files do not belong here.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

from fedagrac.algorithms.base import Algorithm, Traits
from fedagrac.algorithms.diloco import DiLoCo
from fedagrac.algorithms.ditto import Ditto
from fedagrac.algorithms.fedacg import FedACG
from fedagrac.algorithms.fedagrac import NAMES, FedaGrac
from fedagrac.algorithms.fedavg import FedAvg
from fedagrac.algorithms.fedcm import FedCM
from fedagrac.algorithms.feddyn import FedDyn
from fedagrac.algorithms.fedexp import FedExP
from fedagrac.algorithms.fedlin import FedLin
from fedagrac.algorithms.fednova import FedNova
from fedagrac.algorithms.fedopt import FedAdagrad, FedAdam, FedAvgM, FedYogi, ServerOptimizer
from fedagrac.algorithms.fedper import FedBN, FedPer
from fedagrac.algorithms.fedprox import FedProx
from fedagrac.algorithms.fedsam import FedLESAM, FedSAM
from fedagrac.algorithms.fedvarp import MIFA, FedVARP
from fedagrac.algorithms.heterofl import HeteroFL
from fedagrac.algorithms.mime import Mime, MimeLite
from fedagrac.algorithms.scaffnew import Scaffnew
from fedagrac.algorithms.scaffold import Scaffold
from fedagrac.errors import InputError, one_of, unknown
from fedagrac.imports import Imports, is_import_path

__all__ = [
    "MIFA",
    "PAPER",
    "PAPER_NAMES",
    "REGISTRY",
    "Algorithm",
    "DiLoCo",
    "Ditto",
    "FedACG",
    "FedAdagrad",
    "FedAdam",
    "FedAvg",
    "FedAvgM",
    "FedBN",
    "FedCM",
    "FedDyn",
    "FedExP",
    "FedLESAM",
    "FedLin",
    "FedNova",
    "FedPer",
    "FedProx",
    "FedSAM",
    "FedVARP",
    "FedYogi",
    "FedaGrac",
    "HeteroFL",
    "Mime",
    "MimeLite",
    "Scaffnew",
    "Scaffold",
    "ServerOptimizer",
    "algorithm",
    "build_imported",
    "check_declared",
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
    "fedavgm": (FedAvgM, {}),
    "fedadam": (FedAdam, {}),
    "fedyogi": (FedYogi, {}),
    "fedadagrad": (FedAdagrad, {}),
    "feddyn": (FedDyn, {}),
    "fedcm": (FedCM, {}),
    "fedacg": (FedACG, {}),
    "mimelite": (MimeLite, {}),
    "mime": (Mime, {}),
    "fedvarp": (FedVARP, {}),
    "mifa": (MIFA, {}),
    "fedexp": (FedExP, {}),
    "scaffnew": (Scaffnew, {}),
    "fedsam": (FedSAM, {}),
    "fedlesam": (FedLESAM, {}),
    "heterofl": (HeteroFL, {}),
    "fedper": (FedPer, {}),
    "fedbn": (FedBN, {}),
    "ditto": (Ditto, {}),
    "diloco": (DiLoCo, {}),
}
"""Every algorithm by name: its class, and the settings that the name fixes."""

PAPER_NAMES = tuple(name for name, (cls, _) in REGISTRY.items() if cls in PAPER)
"""The names of the algorithms that the paper compares, its own in four forms."""

COMMON = ("lr", "local")
"""The settings that all algorithms share."""


def options_of(name: str, imports: Imports | None = None) -> dict[str, Any]:
    """Return the settings of an algorithm besides lr and local, with their defaults; None for one without.

    `imports` says which import paths may be followed; by default those of files in the current folder.

    Examples:
        >>> options_of("fedprox")
        {'mu': 0.1}
    """
    if is_import_path(name):
        parameters = (imports or Imports()).parameters(name)
        return {key: value for key, value in parameters.items() if key not in COMMON}
    cls, fixed = REGISTRY[one_of("name", name, REGISTRY)]
    return {f.name: f.default for f in dataclasses.fields(cls) if f.name not in {*COMMON, *fixed}}


def algorithm(name: str, **options: Any) -> Algorithm:
    """Make an algorithm by its registered name, or one of your own as "module:Class".

    An import path runs the code that it names, so use `build_imported` for paths from files that may not be
    trusted.

    Examples:
        >>> algorithm("fedagrac-first", lr=0.01).transmit
        'first'
        >>> algorithm("fedagrac.algorithms:FedProx", lr=0.01, mu=0.5)
        FedProx(lr=0.01, local=SGD(), mu=0.5)
    """
    if is_import_path(name):
        return build_imported(name, options, Imports(trusted=True))
    cls, fixed = REGISTRY[one_of("name", name, REGISTRY)]
    _check_options(name, options, [*COMMON, *options_of(name)])
    return cls(**fixed, **options)


def build_imported(path: str, options: Mapping[str, Any], imports: Imports) -> Algorithm:
    """Make an algorithm of the user's own: "module:factory" is a subclass of Algorithm, or a function.

    Args:
        path: the import path.
        options: the arguments of the factory; it must take `lr`.
        imports: the import paths that may be followed.
    """
    parameters = imports.parameters(path)
    if "lr" not in parameters:
        raise InputError("name", path, "a factory of Algorithm, which takes lr and its settings by name")
    _check_options(path, options, parameters)
    made: Algorithm = imports.build(path, options, Algorithm)
    check_declared(made, path)
    return made


def _check_options(name: str, options: Mapping[str, Any], accepted: Iterable[str]) -> None:
    """Check that an algorithm has these settings, and that lr is among them."""
    for key, value in options.items():
        if key not in accepted:
            raise unknown(f"{name}.{key}", value, accepted)
    if "lr" not in options:
        raise InputError(f"{name}.lr", None, "the local step size, a number above 0")


def check_declared(algorithm: Algorithm, field: str = "algorithm") -> None:
    """Check what an algorithm declares about itself: its name and its traits.

    Examples:
        >>> check_declared(FedAvg(lr=0.1))
    """
    name, traits = algorithm.name, algorithm.traits
    if not isinstance(name, str) or not name:
        raise InputError(f"{field}.name", name, "a text, as an attribute or a property")
    if not isinstance(traits, Traits):
        raise InputError(f"{field}.traits", traits, "fedagrac.Traits(...), as an attribute or a property")
    for group in ("vectors", "sums", "rows", "counts"):
        names = getattr(traits, group)
        if not isinstance(names, tuple) or not all(isinstance(one, str) and one for one in names):
            raise InputError(f"{field}.traits.{group}", names, 'a tuple of names, such as ("x",)')
    vectors = traits.vectors + traits.sums
    if "x" not in traits.vectors or len(set(vectors)) < len(vectors):
        raise InputError(f"{field}.traits.vectors", vectors, 'different names, and "x" among the vectors')
    if not set(traits.counts) <= set(traits.rows):
        raise InputError(f"{field}.traits.counts", traits.counts, f"names among its rows, {traits.rows}")
    for choice, accepted in (("start", ("nothing", "gradients")), ("lr", ("step", "round"))):
        one_of(f"{field}.traits.{choice}", getattr(traits, choice), accepted)
    if traits.exchanges not in (1, 2):
        raise InputError(f"{field}.traits.exchanges", traits.exchanges, "1 or 2")
