"""Running an experiment: every algorithm of an experiment file on the same data, model and steps."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from fedagrac import models
from fedagrac.callbacks.base import Callback
from fedagrac.callbacks.run_folder import RunFolder, environment, write_description
from fedagrac.config import Experiment, section
from fedagrac.data.describe import describe
from fedagrac.engines import Workload
from fedagrac.engines.base import SMALL
from fedagrac.errors import InputError
from fedagrac.folders import write_atomically
from fedagrac.heterogeneity import Devices
from fedagrac.models.vector import VectorModel
from fedagrac.simulation import simulate_many
from fedagrac.streams import Purpose, torch_seed

if TYPE_CHECKING:
    from torch import nn

    from fedagrac.algorithms import Algorithm
    from fedagrac.callbacks.progress import Progress
    from fedagrac.data.federation import Federation
    from fedagrac.heterogeneity import StepSchedule
    from fedagrac.simulation import Run

__all__ = ["Entry", "Prepared", "check_free", "prepare", "run_experiment"]


@dataclass(frozen=True, eq=False)
class Entry:
    """One run of an experiment: an algorithm, what it is called, and what the table must say about it."""

    label: str
    folder: str
    algorithm: Algorithm
    note: str
    table: dict[str, Any]


@dataclass(frozen=True, eq=False)
class Prepared:
    """An experiment whose parts exist and fit together."""

    experiment: Experiment
    federation: Federation
    module: nn.Module
    entries: tuple[Entry, ...]
    steps: StepSchedule

    def options(self) -> dict[str, Any]:
        """Return the arguments of `simulate` that all entries share."""
        e = self.experiment
        return {
            "rounds": e.rounds,
            "steps": self.steps,
            "batch_size": _batch_size(e),
            "sampling": e.data.sampling,
            "participation": e.build_participation(),
            "weight_decay": float(e.weight_decay),
            "seed": e.seed,
            "engine": e.engine,
            "compile": e.compile,
            "device": e.device,
            "precision": e.precision,
            "eval_every": e.eval_every,
            "stop": e.build_stop(),
            "clock": e.build_clock(),
        }


def prepare(experiment: Experiment, data_dir: str | Path | None = None) -> Prepared:
    """Load the data, build the model and the algorithms; what is wrong with any of them is said now.

    Examples:
        >>> prepared = prepare(Experiment.default())
        >>> prepared.federation.num_clients, len(prepared.entries)
        (20, 9)
    """
    federation = experiment.data.build(experiment.seed, data_dir)
    with section("model"):
        module = _build_model(experiment, federation)
    module = module.to(getattr(torch, experiment.dtype))
    steps = experiment.build_steps()
    steps.check(federation.num_clients, experiment.rounds)
    if isinstance(steps, Devices) and steps.needs_flops:
        steps = steps.with_flops(_step_flops(experiment, federation, module))
    K = steps.counts(0, federation.num_clients, experiment.seed)
    entries = []
    resolved = experiment.resolved()
    for index, settings in enumerate(experiment.algorithm):
        lr, note = settings.lr if settings.lr is not None else experiment.lr, ""
        assert lr is not None  # checked with the experiment
        if settings.name == "fedlin" and settings.lr is None:
            mean_steps = float(federation.weights @ K)
            note = f"lr {lr:g} x Kbar {mean_steps:.1f}, because FedLin divides its steps by K_i"
            lr = lr * mean_steps
        algorithm = settings.build(float(lr))
        label = settings.label or algorithm.name
        table = {**resolved, "algorithm": [{**resolved["algorithm"][index], "lr": float(lr), "label": label}]}
        entries.append(Entry(label, settings.folder, algorithm, note, table))
    return Prepared(experiment, federation, module, tuple(entries), steps)


def _batch_size(experiment: Experiment) -> int | None:
    return None if experiment.data.batch_size == "full" else experiment.data.batch_size


def _step_flops(experiment: Experiment, federation: Federation, module: nn.Module) -> float:
    """Count the operations of one local step, so that devices given by their flops have step counts."""
    model = VectorModel(module)
    settings = experiment.data.sampling, float(experiment.weight_decay), experiment.seed
    return Workload.of(model, federation, None, _batch_size(experiment), *settings).step_flops()


def _build_model(experiment: Experiment, federation: Federation) -> nn.Module:
    sizes = experiment.model.sizes
    if experiment.model.name == "logistic":
        sizes.setdefault("features", federation.inputs[0].numel())
    if experiment.model.name in models.REGISTRY:
        sizes.setdefault("classes", max(2, federation.num_classes or 2))
    with torch.random.fork_rng([]):
        torch.default_generator.manual_seed(torch_seed(experiment.seed, Purpose.MODEL))
        return models.build(experiment.model.name, **sizes)


class _ExperimentFiles(Callback):
    """Writes what the whole experiment shares, once the first run has passed its checks."""

    def __init__(self, prepared: Prepared, out: Path) -> None:
        self.prepared, self.out = prepared, out

    def on_start(self, run: Run) -> None:
        """Write experiment.toml, environment.json and federation.json."""
        entries = [entry.table["algorithm"][0] for entry in self.prepared.entries]
        resolved = {**self.prepared.experiment.resolved(), "algorithm": entries}
        write_description(self.out, resolved, environment(run.workload.model.device))
        facts = describe(run.federation, run.steps.counts(0, run.federation.num_clients, run.seed))
        write_atomically(self.out / "federation.json", json.dumps(asdict(facts)).encode() + b"\n")


def run_experiment(
    prepared: Prepared, out: Path, progress: Progress | None = None, side_by_side: bool = False
) -> list[Path]:
    """Run every algorithm into its own folder below `out`; return the folders.

    Nothing is written before the first run has passed all checks. A run that diverges ends with that status; the
    others go on. Side by side, runs of a small model share their batches of lanes.
    """
    check_free(out)
    folders = [out / entry.folder for entry in prepared.entries]
    callbacks: list[list[Callback]] = [
        [RunFolder(folder, entry.table), *([] if progress is None else [progress])]
        for folder, entry in zip(folders, prepared.entries, strict=True)
    ]
    callbacks[0].insert(0, _ExperimentFiles(prepared, out))
    groups: list[slice] = [slice(i, i + 1) for i in range(len(folders))]
    if side_by_side and sum(p.numel() for p in prepared.module.parameters()) <= SMALL:
        groups = [slice(None)]
    for group in groups:
        entries = prepared.entries[group]
        if progress is not None:
            progress.name = entries[0].label if len(entries) == 1 else f"{len(entries)} runs"
        algorithms = [entry.algorithm for entry in entries]
        options = prepared.options()
        simulate_many(prepared.module, prepared.federation, algorithms, callbacks=callbacks[group], **options)
    return folders


def check_free(out: Path) -> None:
    """Check that nothing would be overwritten or mixed with another experiment."""
    if not out.exists() or (out.is_dir() and not any(out.iterdir())):
        return
    holds = "holds other files"
    if not out.is_dir():
        holds = "is a file"
    elif (out / "experiment.toml").exists():
        holds = "already holds an experiment"
    raise InputError("--out", str(out), f"a new or empty folder: this one {holds}")
