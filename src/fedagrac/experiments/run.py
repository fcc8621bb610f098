"""Running an experiment: every algorithm of an experiment file on the same data, model and steps."""

from __future__ import annotations

import contextlib
import json
import logging
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from fedagrac import models
from fedagrac.callbacks.base import Callback
from fedagrac.callbacks.checkpoints import Checkpoints
from fedagrac.callbacks.run_folder import RunFolder, environment, write_description
from fedagrac.core.streams import first_weights
from fedagrac.data.describe import describe
from fedagrac.engines import Ranks, Workload, current_ranks
from fedagrac.engines.workload import SMALL
from fedagrac.errors import InputError, count
from fedagrac.experiments.schema import Experiment, build_guard, read_toml, section
from fedagrac.files import write_atomically
from fedagrac.heterogeneity import Devices
from fedagrac.models.vector import VectorModel
from fedagrac.rounds.api import simulate, simulate_many
from fedagrac.storage.checkpoints import Checkpoint, read_checkpoint
from fedagrac.storage.claims import claimed, is_leftover, remove_leftovers

if TYPE_CHECKING:
    from torch import nn

    from fedagrac.algorithms import Algorithm
    from fedagrac.callbacks.progress import Progress
    from fedagrac.data.federation import Federation
    from fedagrac.heterogeneity import StepSchedule
    from fedagrac.rounds.api import Run

__all__ = ["Entry", "Prepared", "check_free", "check_same", "prepare", "run_experiment"]

log = logging.getLogger("fedagrac")

LARGEST_BATCH = 10_000
"""Samples that a batch may have even where there are fewer in all."""

MOST_DRAWN = 2**28
"""Samples that a client may draw in a round: they are drawn at once, 2 GiB of sample numbers at this size."""


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
    imports: models.Imports

    def described(self) -> dict[str, Any]:
        """Return the whole experiment with every default written out."""
        entries = [entry.table["algorithm"][0] for entry in self.entries]
        return {**self.experiment.resolved(), "algorithm": entries}

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
            "guard": build_guard(e.guard),
        }


def prepare(
    experiment: Experiment, data_dir: str | Path | None = None, imports: models.Imports | None = None
) -> Prepared:
    """Load the data, build the model and the algorithms; what is wrong with any of them is said now.

    Args:
        experiment: what to prepare.
        data_dir: where to look for data files first.
        imports: which import paths model.name may be; by default those of files in the current folder.

    Examples:
        >>> prepared = prepare(Experiment.default())
        >>> prepared.federation.num_clients, len(prepared.entries)
        (20, 9)
    """
    imports = imports or models.Imports()
    with section("model"):
        if ":" in experiment.model.name:
            imports.check(experiment.model.name)
    federation = experiment.data.build(experiment.seed, data_dir)
    batch = _batch_size(experiment) or int(federation.sizes.max())
    count("data.batch_size", batch, most=max(len(federation.inputs), LARGEST_BATCH))
    with section("model"):
        module = _build_model(experiment, federation, imports)
    module = module.to(getattr(torch, experiment.dtype))
    steps = experiment.build_steps()
    steps.check(federation.num_clients, experiment.rounds)
    if isinstance(steps, Devices) and steps.needs_flops:
        steps = steps.with_flops(_step_flops(experiment, federation, module))
    K = steps.counts(0, federation.num_clients, experiment.seed)
    if int(K.max()) * batch > MOST_DRAWN:
        accepted = f"at most {MOST_DRAWN // batch} local steps with batches of {batch} samples"
        raise InputError("steps", f"{K.max()} steps", accepted)
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
    return Prepared(experiment, federation, module, tuple(entries), steps, imports)


def _batch_size(experiment: Experiment) -> int | None:
    return None if experiment.data.batch_size == "full" else experiment.data.batch_size


def _step_flops(experiment: Experiment, federation: Federation, module: nn.Module) -> float:
    """Count the operations of one local step, so that devices given by their flops have step counts."""
    model = VectorModel(module)
    settings = experiment.data.sampling, float(experiment.weight_decay), experiment.seed
    return Workload.of(model, federation, None, _batch_size(experiment), *settings).step_flops()


def _build_model(experiment: Experiment, federation: Federation, imports: models.Imports) -> nn.Module:
    sizes = experiment.model.sizes
    if experiment.model.name == "logistic":
        features = federation.inputs[0].numel()
        if sizes.setdefault("features", features) != features:  # before a layer of any size is made
            raise InputError("features", sizes["features"], f"{features}, the numbers of a sample of the data")
    if experiment.model.name in models.REGISTRY:
        sizes.setdefault("classes", max(2, federation.num_classes or 2))
    with first_weights(experiment.seed):
        if ":" in experiment.model.name:
            return imports.build(experiment.model.name, sizes)
        return models.build(experiment.model.name, **sizes)


class _ExperimentFiles(Callback):
    """Writes what the whole experiment shares, once the first run has passed its checks."""

    def __init__(self, prepared: Prepared, out: Path) -> None:
        self.prepared, self.out = prepared, out

    def on_start(self, run: Run) -> None:
        """Write experiment.toml, environment.json and federation.json; anew where an experiment goes on."""
        write_description(self.out, self.prepared.described(), environment(run.workload.model.device))
        facts = describe(run.federation, run.steps.counts(0, run.federation.num_clients, run.seed))
        write_atomically(self.out / "federation.json", json.dumps(asdict(facts)).encode() + b"\n")


def run_experiment(
    prepared: Prepared,
    out: Path,
    progress: Progress | None = None,
    *,
    side_by_side: bool = False,
    resume: bool = False,
    state_dir: Path | None = None,
) -> list[Path]:
    """Run every algorithm into its own folder below `out`; return the folders.

    Nothing is written before the first run has passed all checks. A run that diverges ends with that status; the
    others go on. Side by side, runs of a small model share their batches of lanes. With `resume`, runs that have
    ended are left alone, and the others go on from their last checkpoint, or begin. Of several processes the first
    alone writes and shows progress. Nobody else can write into the folder meanwhile.
    """
    ranks = current_ranks()
    with claimed(out) if ranks.rank == 0 else contextlib.nullcontext():
        begun = (out / "experiment.toml").exists()
        if ranks.rank == 0:
            check_same(prepared, out) if resume and begun else check_free(out)
            remove_leftovers(out)
        return _run_all(prepared, out, progress, ranks, side_by_side, ranks.agree(resume and begun), state_dir)


def _run_all(
    prepared: Prepared,
    out: Path,
    progress: Progress | None,
    ranks: Ranks,
    side_by_side: bool,
    resume: bool,
    state_dir: Path | None,
) -> list[Path]:
    folders = [out / entry.folder for entry in prepared.entries]
    going = ranks.agree([not (folder / "status.json").exists() for folder in folders])
    callbacks = [_callbacks(prepared, entry, out, progress, ranks) for entry in prepared.entries]
    if any(going) and ranks.rank == 0:
        callbacks[going.index(True)].insert(0, _ExperimentFiles(prepared, out))
    together = side_by_side and sum(p.numel() for p in prepared.module.parameters()) <= SMALL
    if progress is not None:
        for _ in range(going.count(False)):
            progress.skip()
    run = _run_side_by_side if together else _run_one_after_another
    left = [
        Left(entry, out / entry.folder, own)
        for entry, own, goes in zip(prepared.entries, callbacks, going, strict=True)
        if goes
    ]
    run(prepared, left, resume, progress, state_dir)
    if ranks.rank == 0:
        _say_disk_use(folders)
    return folders


@dataclass(frozen=True, eq=False)
class Left:
    """A run that is still to do, or to go on with."""

    entry: Entry
    folder: Path
    callbacks: list[Callback]


def _run_one_after_another(
    prepared: Prepared, left: list[Left], resume: bool, progress: Progress | None, state_dir: Path | None
) -> None:
    for one in left:
        if progress is not None:
            progress.name = one.entry.label
        simulate(
            prepared.module,
            prepared.federation,
            one.entry.algorithm,
            callbacks=one.callbacks,
            state_dir=state_dir,
            resume=_last_checkpoint(one.folder) if resume else None,
            **prepared.options(),
        )


def _run_side_by_side(
    prepared: Prepared, left: list[Left], resume: bool, progress: Progress | None, state_dir: Path | None
) -> None:
    """Run them together; after an interruption those together that stand after the same round."""
    groups: dict[int, list[tuple[Left, Checkpoint | None]]] = {}
    for one in left:
        stored = _last_checkpoint(one.folder) if resume else None
        groups.setdefault(0 if stored is None else stored.round, []).append((one, stored))
    for group in groups.values():
        if progress is not None:
            progress.name = f"{len(group)} runs"
        simulate_many(
            prepared.module,
            prepared.federation,
            [one.entry.algorithm for one, _ in group],
            callbacks=[one.callbacks for one, _ in group],
            state_dir=state_dir,
            resume=[stored for _, stored in group],
            **prepared.options(),
        )


def _say_disk_use(folders: list[Path]) -> None:
    """Log what the checkpoints of an experiment take; they stay."""
    sizes = [path.stat().st_size for folder in folders for path in folder.glob("checkpoint/*")]
    if sizes:
        log.info("checkpoints: %.3g MB on disk, the last two of each run", sum(sizes) / 1e6)


def _callbacks(
    prepared: Prepared, entry: Entry, out: Path, progress: Progress | None, ranks: Ranks
) -> list[Callback]:
    """Return what one run writes and shows; of several processes only the first does more than keep its part."""
    found: list[Callback] = [RunFolder(out / entry.folder, entry.table)] if ranks.rank == 0 else []
    every = prepared.experiment.checkpoint_every
    if every:
        found.append(Checkpoints(out / entry.folder / "checkpoint", every))
    return [*found, progress] if progress is not None and ranks.rank == 0 else found


def _last_checkpoint(folder: Path) -> Checkpoint | None:
    """Return where a run stands that was interrupted, with its history; None where it has to start anew."""
    return read_checkpoint(folder / "checkpoint", history=folder / "history.jsonl")


def check_same(prepared: Prepared, out: Path) -> None:
    """Check that a folder holds this very experiment, so that it can go on there."""
    path = out / "experiment.toml"
    there, here = read_toml(path), json.loads(json.dumps(prepared.described()))
    changed = differences(there, here)
    if changed:
        raise InputError("resume", str(out), f"the same experiment as in {path}; changed: {'; '.join(changed)}")


def differences(before: Any, after: Any, name: str = "") -> list[str]:
    """Return what changed between two tables, a line each.

    Examples:
        >>> differences({"rounds": 5, "data": {"clients": 2}}, {"rounds": 7, "data": {"clients": 2, "alpha": 1}})
        ['rounds: 5 -> 7', 'data.alpha: nothing -> 1']
    """
    if isinstance(before, dict) and isinstance(after, dict):
        keys = dict.fromkeys([*before, *after])
        pairs = [(str(key), before.get(key), after.get(key)) for key in keys]
    elif isinstance(before, list) and isinstance(after, list) and len(before) == len(after):
        pairs = [(str(i), a, b) for i, (a, b) in enumerate(zip(before, after, strict=True))]
    else:
        shown = ["nothing" if value is None else value for value in (before, after)]
        return [] if before == after else [f"{name}: {shown[0]} -> {shown[1]}"]
    return [line for key, a, b in pairs for line in differences(a, b, f"{name}.{key}" if name else key)]


def check_free(out: Path) -> None:
    """Check that nothing would be overwritten or mixed with another experiment."""
    if not out.exists() or (out.is_dir() and all(map(is_leftover, out.iterdir()))):
        return
    holds = "holds other files"
    if not out.is_dir():
        holds = "is a file"
    elif (out / "experiment.toml").exists():
        holds = "already holds an experiment"
    raise InputError("out", str(out), f"a new or empty folder: this one {holds}")
