"""Which launcher started this process, read from the environment.

A number of processes in the environment does not mean that so many were started: a script that sbatch runs has
SLURM_NTASKS=4 and SLURM_PROCID=0 and is one process, and a shell may keep WORLD_SIZE from earlier work. A process
is therefore a rank only with a launcher's number, its rank, and a sign that only a launcher leaves in the
processes it starts:

| launcher | size and rank | sign |
|---|---|---|
| torchrun | WORLD_SIZE, RANK | TORCHELASTIC_RUN_ID |
| by hand, or a PyTorchJob | WORLD_SIZE, RANK | MASTER_ADDR and MASTER_PORT |
| mpirun of Open MPI | OMPI_COMM_WORLD_SIZE, OMPI_COMM_WORLD_RANK | PMIX_RANK or OMPI_UNIVERSE_SIZE |
| mpirun of MPICH or Intel MPI | PMI_SIZE, PMI_RANK | PMI_FD, PMI_PORT, PMI_CONTROL_PORT or HYDI_CONTROL_FD |
| srun | SLURM_STEP_NUM_TASKS, SLURM_PROCID | SLURM_STEP_ID of a step that srun started |

The first row that fits decides. Nothing here imports torch.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from fedagrac.errors import InputError, positive

__all__ = ["RANK_SECONDS", "Launch", "find_launch", "rank_seconds", "why_alone"]

RANK_SECONDS = 60.0
"""How long processes wait for one another at the start, unless FEDAGRAC_RANK_SECONDS says otherwise."""

RESERVED_STEPS = 0xFFFFFFF0
"""Slurm numbers the steps of batch scripts, interactive shells and the like from here on."""

PORT = 29500
"""The port where processes meet if MASTER_PORT is not set."""


@dataclass(frozen=True)
class Launch:
    """What a launcher says about this process.

    Attributes:
        launcher: the name of the launcher.
        size: the number of processes.
        rank: the number of this process.
        local: its number on its host.
        address: the host where the processes meet.
        port: the port there.
        job: a name that the processes of this launch share, and those of another do not.
        hosted: whether the launcher itself answers at the meeting place, rather than rank 0.
        variables: the variables that say so.
    """

    launcher: str
    size: int
    rank: int
    local: int = 0
    address: str = "127.0.0.1"
    port: int = PORT
    job: str = ""
    hosted: bool = False
    variables: str = ""


@dataclass(frozen=True)
class Launcher:
    """The variables of a launcher.

    Attributes:
        name: the name of the launcher.
        size: the variable with the number of processes.
        rank: the variable with the number of a process.
        local: the variable with its number on its host.
        local_size: the variable with the number of processes on its host.
        job: the variables that together name the launch.
        is_sign: tells whether an environment is that of a process which this launcher started.
    """

    name: str
    size: str
    rank: str
    local: str
    local_size: str
    job: tuple[str, ...]
    is_sign: Callable[[Mapping[str, str]], bool]


def _any_of(*names: str) -> Callable[[Mapping[str, str]], bool]:
    return lambda environment: any(environment.get(name) for name in names)


def _all_of(*names: str) -> Callable[[Mapping[str, str]], bool]:
    return lambda environment: all(environment.get(name) for name in names)


def _is_step(environment: Mapping[str, str]) -> bool:
    """Return whether srun started this process as a step of its own."""
    step = environment.get("SLURM_STEP_ID", "")
    return step.isdecimal() and int(step) < RESERVED_STEPS


TORCH = ("WORLD_SIZE", "RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
LAUNCHERS = (
    Launcher(
        "torchrun", *TORCH, ("TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT"), _any_of("TORCHELASTIC_RUN_ID")
    ),
    Launcher("MASTER_ADDR and MASTER_PORT", *TORCH, (), _all_of("MASTER_ADDR", "MASTER_PORT")),
    Launcher(
        "mpirun (Open MPI)",
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_LOCAL_RANK",
        "OMPI_COMM_WORLD_LOCAL_SIZE",
        ("PMIX_NAMESPACE",),
        _any_of("PMIX_RANK", "OMPI_UNIVERSE_SIZE"),
    ),
    Launcher(
        "mpirun (MPICH, Intel MPI)",
        "PMI_SIZE",
        "PMI_RANK",
        "MPI_LOCALRANKID",
        "MPI_LOCALNRANKS",
        ("PMI_JOBID",),
        _any_of("PMI_FD", "PMI_PORT", "PMI_CONTROL_PORT", "HYDI_CONTROL_FD"),
    ),
    Launcher(
        "srun",
        "SLURM_STEP_NUM_TASKS",
        "SLURM_PROCID",
        "SLURM_LOCALID",
        "SLURM_STEP_TASKS_PER_NODE",
        ("SLURM_JOB_ID", "SLURM_STEP_ID"),
        _is_step,
    ),
)


def find_launch(environment: Mapping[str, str] = os.environ) -> Launch | None:
    """Return what a launcher says about this process, or None for a single process.

    Variables that are set but hold no number, or numbers that cannot be, are an error even without a launcher.

    Examples:
        >>> run = {"WORLD_SIZE": "4", "RANK": "3", "LOCAL_RANK": "1", "TORCHELASTIC_RUN_ID": "none"}
        >>> launch = find_launch(run)
        >>> launch.launcher, launch.size, launch.rank, launch.local
        ('torchrun', 4, 3, 1)
        >>> find_launch({"SLURM_NTASKS": "4", "SLURM_PROCID": "0"}) is None  # a script that sbatch runs
        True
        >>> step = {"SLURM_STEP_NUM_TASKS": "4", "SLURM_PROCID": "2", "SLURM_STEP_ID": "0"}
        >>> find_launch(step).launcher
        'srun'
    """
    for launcher in LAUNCHERS:
        size = _number(environment, launcher.size, least=1)
        rank = _number(environment, launcher.rank)
        local = _number(environment, launcher.local)
        if size is None or rank is None:
            continue
        if rank >= size:
            accepted = f"a number below {launcher.size} = {size} ({_unset(launcher.size, launcher.rank)})"
            raise InputError(launcher.rank, rank, accepted)
        if launcher.is_sign(environment):
            return _launch(environment, launcher, size, rank, local or 0) if size > 1 else None
    return None


def _launch(environment: Mapping[str, str], launcher: Launcher, size: int, rank: int, local: int) -> Launch:
    """Return what a launcher says, with the place where its processes meet."""
    address = environment.get("MASTER_ADDR")
    if not address and environment.get(launcher.local_size, str(size)) != str(size):
        accepted = f"the name of the first host, because {launcher.name} started processes on several hosts"
        raise InputError("MASTER_ADDR", address, accepted)
    port = _number(environment, "MASTER_PORT", least=1, most=65535)
    job = ".".join(environment[name] for name in launcher.job if environment.get(name))
    variables = f"{launcher.size} {launcher.rank}"
    hosted = environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    return Launch(launcher.name, size, rank, local, address or "127.0.0.1", port or PORT, job, hosted, variables)


def _number(environment: Mapping[str, str], name: str, least: int = 0, most: int = 2**31 - 1) -> int | None:
    """Return the number in a variable, or None if it is not set or empty."""
    text = environment.get(name, "").strip()
    if not text:
        return None
    if not (text.isascii() and text.isdecimal() and len(text) <= 10 and least <= int(text) <= most):
        raise InputError(name, text, f"an integer from {least} to {most}, as a launcher sets it ({_unset(name)})")
    return int(text)


def _unset(*names: str) -> str:
    """Return how to run without some variables."""
    return f"to run as a single process: unset {' '.join(names)}"


def why_alone(environment: Mapping[str, str] = os.environ) -> str | None:
    """Return why a process runs alone although its environment speaks of several, or None if it does not.

    Examples:
        >>> print(why_alone({"SLURM_NTASKS": "4", "SLURM_PROCID": "0"}))
        running alone: SLURM_NTASKS = 4, but srun did not start it (start 4 with: srun python -m fedagrac)
        >>> why_alone({}) is None
        True
    """
    commands = {
        "WORLD_SIZE": ("torchrun", "torchrun --nproc-per-node {} -m fedagrac"),
        "SLURM_NTASKS": ("srun", "srun python -m fedagrac"),
    }
    for name, (launcher, command) in commands.items():
        size = environment.get(name, "").strip()
        if size.isdecimal() and int(size) > 1 and find_launch(environment) is None:
            reason = f"{name} = {size}, but {launcher} did not start it"
            return f"running alone: {reason} (start {size} with: {command.format(size)})"
    return None


def rank_seconds(environment: Mapping[str, str] = os.environ) -> float:
    """Return how long processes wait for one another at the start.

    Examples:
        >>> rank_seconds({}), rank_seconds({"FEDAGRAC_RANK_SECONDS": "300"})
        (60.0, 300.0)
    """
    name, text = "FEDAGRAC_RANK_SECONDS", environment.get("FEDAGRAC_RANK_SECONDS", "").strip()
    if not text:
        return RANK_SECONDS
    try:
        return min(positive(name, float(text)), 86400.0)
    except ValueError:
        raise InputError(name, text, f"a number of seconds above 0; {RANK_SECONDS:g} if it is not set") from None
