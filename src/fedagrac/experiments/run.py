"""Running an experiment: every algorithm of an experiment file with the same data, model and steps."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from fedagrac.algorithms import options_of
from fedagrac.callbacks.checkpoints import Checkpoints
from fedagrac.callbacks.run_folder import KeepRun
from fedagrac.core.schedule import Scaled
from fedagrac.data.describe import describe
from fedagrac.data.trees import num_samples
from fedagrac.engines import Ranks, current_ranks
from fedagrac.engines.workload import SMALL
from fedagrac.errors import InputError, count
from fedagrac.experiments.build import (
    build_aggregate,
    build_clock,
    build_federation,
    build_guard,
    build_loss,
    build_metrics,
    build_model,
    build_participation,
    build_steps,
    build_stop,
    schedule_table,
    section,
)
from fedagrac.experiments.clients import check_measurable, keeping_clients, train_alone
from fedagrac.experiments.schema import Experiment, read_toml
from fedagrac.imports import Imports, is_import_path, last_name
from fedagrac.rounds.api import run_on
from fedagrac.rounds.callback import Callback
from fedagrac.rounds.fleet import Simulated
from fedagrac.rounds.setup import Setup
from fedagrac.storage.claims import claimed, is_leftover, remove_leftovers
from fedagrac.storage.environment import environment
from fedagrac.storage.run_folder import RunFolder, write_description

if TYPE_CHECKING:
    from torch import nn

    from fedagrac.algorithms import Algorithm
    from fedagrac.callbacks.progress import Progress
    from fedagrac.data.federation import Federation
    from fedagrac.heterogeneity import StepSchedule
    from fedagrac.rounds.loop import Run
    from fedagrac.storage.checkpoints import Checkpoint

__all__ = ["Entry", "Prepared", "check_free", "check_same", "prepare", "run_experiment"]

log = logging.getLogger("fedagrac")

LARGEST_BATCH = 10_000
"""The largest batch size that is accepted even if the data hold fewer samples."""

MOST_DRAWN = 2**28
"""The most samples that a client may draw in a round. They are drawn at once and take 2 GiB at this size."""


PLAIN = (str, bool, int, float)
"""The types of defaults that an experiment file can hold."""


@dataclass(frozen=True, eq=False)
class Entry:
    """One run of an experiment.

    Attributes:
        label: the name of the run.
        folder: the name of its run folder.
        algorithm: the algorithm.
        note: a remark for tables, or an empty text.
        table: the fully resolved experiment, with this algorithm only.
    """

    label: str
    folder: str
    algorithm: Algorithm
    note: str
    table: dict[str, Any]


@dataclass(frozen=True, eq=False)
class Prepared:
    """An experiment whose parts are built and fit together.

    Attributes:
        experiment: the settings.
        module: the model with its initial weights.
        fleet: the clients with model, data and engine, which all runs share.
        entries: the runs.
        imports: the import paths that are allowed.
    """

    experiment: Experiment
    module: nn.Module
    fleet: Simulated
    entries: tuple[Entry, ...]
    imports: Imports

    @property
    def federation(self) -> Federation:
        """The clients and their data."""
        return self.fleet.federation

    @property
    def steps(self) -> StepSchedule:
        """The number of steps that each client runs."""
        return self.fleet.steps

    def described(self) -> dict[str, Any]:
        """Return the whole experiment with all defaults."""
        entries = [entry.table["algorithm"][0] for entry in self.entries]
        return {**self.entries[0].table, "algorithm": entries}

    def options(self) -> dict[str, Any]:
        """Return the arguments of `simulate` that all entries share."""
        setup = self.fleet.setup
        options = {field.name: getattr(setup, field.name) for field in dataclasses.fields(setup)}
        return {**options, "steps": self.steps}


def prepare(
    experiment: Experiment,
    data_dir: str | Path | None = None,
    imports: Imports | None = None,
    state_dir: Path | None = None,
) -> Prepared:
    """Load the data, and build and check the model, the clients and the algorithms.

    Args:
        experiment: the experiment to prepare.
        data_dir: the folder to search first for data files.
        imports: the import paths that names of models, data and algorithms may be; by default those of files in
            the current folder.
        state_dir: the folder for files with the clients' state; None to keep it in memory.

    Examples:
        >>> prepared = prepare(Experiment.default())
        >>> prepared.federation.num_clients, len(prepared.entries)
        (20, 9)
    """
    imports = imports or Imports()
    _check_imports(experiment, imports)
    experiment.check_algorithms(imports)
    federation = build_federation(experiment.data.table, experiment.seed, data_dir, imports)
    if experiment.per_client is not None:
        check_measurable(federation)
    batch = experiment.data.samples or int(federation.sizes.max())
    count("data.batch_size", batch, most=max(num_samples(federation.inputs), LARGEST_BATCH))
    module = build_model(experiment.model.model_dump(), experiment.seed, federation, imports)
    module = module.to(getattr(torch, experiment.dtype))
    fleet = Simulated.of(module, federation, build_setup(experiment, state_dir, imports))
    K = fleet.steps.counts(0, federation.num_clients, experiment.seed)
    if int(K.max()) * batch > MOST_DRAWN:
        accepted = f"at most {MOST_DRAWN // batch} local steps with batches of {batch} samples"
        raise InputError("steps", f"{K.max()} steps", accepted)
    resolved = experiment.resolved()
    if not is_import_path(experiment.data.name):
        resolved["data"]["clients"] = federation.num_clients
    entries = _entries(experiment, resolved, imports, mean_steps=float(federation.weights @ K))
    for i, entry in enumerate(entries):
        with section(f"algorithm[{i}]"):
            fleet.check(entry.algorithm)
    return Prepared(experiment, module, fleet, entries, imports)


def _check_imports(experiment: Experiment, imports: Imports) -> None:
    """Refuse import paths that may not be followed, before any of them is."""
    named = [("model", experiment.model.name), ("data", experiment.data.name)]
    named += [("steps", str(experiment.steps.get("kind")))]
    named += [(f"algorithm[{i}]", name) for i, entry in enumerate(experiment.algorithm) for name in entry.names]
    for table, name in named:
        if is_import_path(name):
            with section(table):
                imports.check(name)


def build_setup(experiment: Experiment, state_dir: Path | None = None, imports: Imports | None = None) -> Setup:
    """Return the options that all runs of an experiment share."""
    return Setup.of(
        rounds=experiment.rounds,
        steps=build_steps(experiment.steps, imports),
        batch_size=experiment.data.samples,
        loss=build_loss(experiment.loss),
        sampling=experiment.data.sampling,
        participation=build_participation(experiment.participation),
        weight_decay=float(experiment.weight_decay),
        buffers=experiment.buffers,
        seed=experiment.seed,
        engine=experiment.engine,
        compile=experiment.compile,
        device=experiment.device,
        precision=experiment.precision,
        eval_every=experiment.eval_every,
        stop=build_stop(experiment.stop.model_dump()),
        clock=build_clock(None if experiment.clock is None else experiment.clock.model_dump()),
        guard=build_guard(experiment.guard),
        aggregate=build_aggregate(experiment.aggregate),
        metrics=build_metrics(experiment.metrics) or None,
        state_dir=state_dir,
    )


def _entries(
    experiment: Experiment, resolved: dict[str, Any], imports: Imports, mean_steps: float
) -> tuple[Entry, ...]:
    """Return the runs. A shared lr is multiplied by Kbar for an algorithm whose lr is that of a whole round."""
    entries = []
    for index, settings in enumerate(experiment.algorithm):
        algorithm, note = settings.build(experiment.lr, imports), ""
        if algorithm.traits.lr == "round" and settings.lr is None:
            shared = algorithm.lr
            shown = shared if callable(shared) else f"{shared:g}"
            note = f"lr {shown} x Kbar {mean_steps:.1f}, because this algorithm divides its steps by K_i"
            scaled = Scaled(mean_steps, shared) if callable(shared) else shared * mean_steps
            algorithm = algorithm.with_lr(scaled)
        if algorithm.traits.personal:
            note = "; ".join(filter(None, [note, "measured with the clients' own models, not with one for all"]))
        label, defaults = settings.label or algorithm.name, {}
        if is_import_path(settings.name):
            label = settings.label or last_name(settings.name)
            options = options_of(settings.name, imports)
            defaults = {key: value for key, value in options.items() if isinstance(value, PLAIN)}
        lr = schedule_table(algorithm.lr) if callable(algorithm.lr) else algorithm.lr
        table = {**defaults, **resolved["algorithm"][index], "lr": lr, "label": label}
        entries.append(Entry(label, settings.folder, algorithm, note, {**resolved, "algorithm": [table]}))
    return tuple(entries)


class _DescribeExperiment(Callback):
    """Write what all runs of an experiment share, once the first run has passed its checks."""

    def __init__(self, prepared: Prepared, out: Path) -> None:
        self.prepared, self.out = prepared, out

    def on_start(self, run: Run) -> None:
        """Write experiment.toml, environment.json and federation.json; replace them if the experiment resumes."""
        fleet = self.prepared.fleet
        K = fleet.steps.counts(0, fleet.federation.num_clients, fleet.setup.seed)
        write_description(
            self.out,
            self.prepared.described(),
            environment(fleet.model.device),
            describe(fleet.federation, K),
        )


def run_experiment(
    prepared: Prepared,
    out: Path,
    progress: Progress | None = None,
    *,
    side_by_side: bool = False,
    resume: bool = False,
) -> list[Path]:
    """Run every algorithm in its own folder below `out`. Return the folders.

    Nothing is written before the first run has passed all checks. A run that diverges does not end the others. No
    other process can write to the folder meanwhile. If several processes share the experiment, only the first one
    writes and shows progress.

    Args:
        prepared: the experiment.
        out: the folder of the experiment.
        progress: a progress bar, or None.
        side_by_side: whether the runs of a small model share batches of lanes.
        resume: whether to resume an experiment. Runs that have ended are not run again; the others resume from
            their last checkpoint, or start if they have none.
    """
    ranks = current_ranks()
    with claimed(out) if ranks.rank == 0 else contextlib.nullcontext():
        begun = (out / "experiment.toml").exists()
        if ranks.rank == 0:
            if resume and begun:
                check_same(prepared, out)
            else:
                check_free(out)
            remove_leftovers(out)
        return _run_all(prepared, out, progress, ranks, side_by_side, ranks.agree(resume and begun))


@dataclass(frozen=True, eq=False)
class PendingRun:
    """A run that has not ended.

    Attributes:
        entry: the run.
        callbacks: its callbacks.
        checkpoint: the checkpoint to resume from; None if the run starts.
    """

    entry: Entry
    callbacks: list[Callback]
    checkpoint: Checkpoint | None

    @property
    def round(self) -> int:
        """The number of rounds done."""
        return 0 if self.checkpoint is None else self.checkpoint.round


def _run_all(
    prepared: Prepared, out: Path, progress: Progress | None, ranks: Ranks, side_by_side: bool, resume: bool
) -> list[Path]:
    """Do or resume all runs that have not ended. Return the folders of all runs."""
    folders = [RunFolder(out / entry.folder) for entry in prepared.entries]
    unfinished = ranks.agree([not folder.ended for folder in folders])
    pending = []
    for entry, folder, is_unfinished in zip(prepared.entries, folders, unfinished, strict=True):
        if is_unfinished:
            callbacks = _callbacks(prepared, entry, folder, progress, ranks)
            pending.append(PendingRun(entry, callbacks, folder.last_checkpoint() if resume else None))
        elif progress is not None:
            progress.skip()
    if pending and ranks.rank == 0:
        pending[0].callbacks.insert(0, _DescribeExperiment(prepared, out))
    groups = [[run] for run in pending]
    if side_by_side and prepared.fleet.model.size <= SMALL:  # runs after the same round form a group
        rounds = dict.fromkeys(run.round for run in pending)
        groups = [[run for run in pending if run.round == round] for round in rounds]
    for group in groups:
        if progress is not None:
            from rich.markup import escape

            progress.name = escape(group[0].entry.label) if len(group) == 1 else f"{len(group)} runs"
        run_on(
            prepared.fleet,
            [run.entry.algorithm for run in group],
            [run.callbacks for run in group],
            [run.checkpoint for run in group],
        )
    if prepared.experiment.per_client is not None and ranks.rank == 0:
        train_alone(prepared, out)
    checkpoint_bytes = sum(folder.checkpoint_bytes() for folder in folders) if ranks.rank == 0 else 0
    if checkpoint_bytes:
        log.info("checkpoints: %.3g MB on disk, the last two of each run", checkpoint_bytes / 1e6)
    return [folder.path for folder in folders]


def _callbacks(
    prepared: Prepared, entry: Entry, folder: RunFolder, progress: Progress | None, ranks: Ranks
) -> list[Callback]:
    """Return the callbacks of a run. Processes other than the first only write their part of checkpoints."""
    callbacks: list[Callback] = []
    if ranks.rank == 0:
        callbacks.extend(keeping_clients(prepared, folder, KeepRun(folder.path, entry.table)))
    if prepared.experiment.checkpoint_every:
        callbacks.append(Checkpoints(folder, prepared.experiment.checkpoint_every))
    if progress is not None and ranks.rank == 0:
        callbacks.append(progress)
    return callbacks


def check_same(prepared: Prepared, out: Path) -> None:
    """Check that a folder holds the same experiment, so that it can be resumed there."""
    path = out / "experiment.toml"
    before, now = read_toml(path), json.loads(json.dumps(prepared.described()))
    changed = differences(before, now)
    if changed:
        raise InputError("resume", str(out), f"the same experiment as in {path}; changed: {'; '.join(changed)}")


def differences(before: Any, after: Any, name: str = "") -> list[str]:
    """Return one line for each difference between two tables.

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
    """Check that a folder is new or empty, so that no files are overwritten or mixed."""
    if not out.exists() or (out.is_dir() and all(map(is_leftover, out.iterdir()))):
        return
    holds = "holds other files"
    if not out.is_dir():
        holds = "is a file"
    elif (out / "experiment.toml").exists():
        holds = "already holds an experiment"
    raise InputError("out", str(out), f"a new or empty folder: this one {holds}")
