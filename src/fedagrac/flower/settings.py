"""The settings of a federation, in [tool.flwr.app.config] of the app.

Flower passes the same flat table of dotted keys to the server and to every client.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from pydantic import Field, StrictFloat, StrictInt, StrictStr, ValidationError

from fedagrac.algorithms import Algorithm
from fedagrac.engines import ENGINES
from fedagrac.errors import MOST_CLIENTS, InputError, count, non_negative, one_of, positive, unknown
from fedagrac.experiments.build import (
    STEPS,
    build_aggregate,
    build_guard,
    build_kind,
    build_participation,
    build_stop,
    section,
    steps_table,
)
from fedagrac.experiments.schema import AlgorithmSettings, StrictTable
from fedagrac.flower.identity import FINGERPRINT
from fedagrac.heterogeneity import Epochs, Participation, StepSchedule
from fedagrac.parsing import parse_json
from fedagrac.rounds.setup import Setup
from fedagrac.storage.checkpoints import MOST_SAMPLES

if TYPE_CHECKING:
    from fedagrac.engines import Loss
    from fedagrac.rounds.evaluation import Metric

__all__ = ["NOTED", "ClientSteps", "Settings", "partition_of"]

NOTED = ("guard",)
"""Settings that may change when a run resumes. The change is an event of the history, because numbers change."""

UNION_PARTS = ("int", "float", "dict[str,any]")
"""What pydantic adds to the path of a value that may have several types."""

Number = StrictInt | StrictFloat

PLANNED = {kind: schedule for kind, schedule in STEPS.items() if kind != "devices"}
"""Step schedules for a server. Simulated devices are excluded, because a federation has real ones."""


class ClientSteps(StrictTable):
    """[steps] with kind = "client": every client runs until its time is over and reports the number of its steps.

    Attributes:
        seconds: a client's time per round; the keys `seconds` and `steps` of its node config take precedence.
        max_steps: the largest number of steps; a reply with more is dropped.
    """

    kind: Literal["client"]
    seconds: Number = 10.0
    max_steps: StrictInt = 1_000_000


class Settings(StrictTable):
    """The settings of a federation.

    Attributes:
        clients: M, the number of partitions.
        start_clients: how many clients must be connected before round 1; 0 for all that are not excluded. With
            fewer than `clients`, `samples` is required.
        min_clients: the smallest number of usable replies in a round; 0 for all clients of its cohort.
        participation: the cohort of each round: a number, a fraction, or a table with size and by; None for all.
        exclude: clients that do not take part.
        round_seconds: how long the server waits for the replies to one exchange.
        upload_seconds: how long one reply may take from its announcement until it is complete.
        wait_seconds: how long it waits for nodes before round 1, after a resume, and if fewer than min_clients of
            a cohort are connected.
        samples: the number of samples of each partition, by its number; a client that reports another is refused.
        max_samples: the largest number of samples that a client may report.
        keys: the fingerprint of the public key of each partition's node, by its number; a node that cannot sign
            with it does not get the partition. None accepts any node.
        poll_seconds: how often it looks for replies.
        attempts: how often it asks in one round, and how often it greets a node.
        out: the run folder on the server.
        log: "json" to write every log message to log.jsonl in the run folder, too.
        metrics_port: the port of Prometheus metrics and of the health probe; 0 for none.
        metrics_host: the address at which they are served.
        keep_checkpoints: how many checkpoints are kept; a run can be rolled back to each of them.
        app: settings for the functions of the app.

    Examples:
        >>> Settings.of({"clients": 3, "algorithm.name": "fedavg", "algorithm.lr": 0.1}).min_clients
        3
    """

    clients: StrictInt
    rounds: StrictInt = 10
    start_clients: StrictInt = 0
    min_clients: StrictInt = 0
    participation: StrictInt | StrictFloat | dict[str, Any] | None = None
    exclude: list[StrictInt] = Field([])
    seed: StrictInt = 0
    batch_size: StrictInt | Literal["full"] = 20
    sampling: Literal["replacement", "shuffle", "cyclic"] = "replacement"
    weight_decay: Number = 0.0
    buffers: Literal["average", "local", "frozen"] = "average"
    dtype: Literal["float32", "float64"] = "float32"
    engine: StrictStr = "serial"
    eval_every: StrictInt = 1
    round_seconds: Number = 600.0
    upload_seconds: Number = 300.0
    wait_seconds: Number = 300.0
    poll_seconds: Number = 0.5
    attempts: StrictInt = 3
    samples: dict[str, StrictInt] | None = None
    max_samples: StrictInt = 1_000_000_000
    keys: dict[str, StrictStr] | None = None
    name: StrictStr = "flower"
    out: StrictStr = "runs/flower"
    log: Literal["text", "json"] = "text"
    metrics_port: StrictInt = 0
    metrics_host: StrictStr = "127.0.0.1"
    keep_checkpoints: StrictInt = 5
    algorithm: AlgorithmSettings
    steps: dict[str, Any] = Field({"kind": "constant", "steps": 10})
    guard: dict[str, Any] | None = None
    aggregate: dict[str, Any] | None = None
    stop: dict[str, Any] = Field({})
    app: dict[str, Any] = Field({})

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> Settings:
        """Check Flower's flat run config. Return the settings."""
        table = _nested(config)
        if isinstance(table.get("steps"), int | list):
            table["steps"] = steps_table(table["steps"])
        try:
            settings = cls.model_validate(table)
        except ValidationError as error:
            first = error.errors()[0]
            path = ".".join(str(part) for part in first["loc"] if part not in UNION_PARTS)
            if first["type"] == "extra_forbidden":
                raise unknown(path, first["input"], cls.model_fields) from None
            if first["type"] == "missing":
                raise InputError(path, None, "a value: this setting is required") from None
            raise InputError(path, first["input"], first["msg"].removeprefix("Input should be ")) from None
        settings.check_clients()
        if settings.min_clients == 0:
            settings = settings.model_copy(update={"min_clients": settings.cohort_size})
        settings.check()
        return settings

    def check(self) -> None:
        """Check the settings, some of them by building their objects."""
        for field in ("rounds", "eval_every", "attempts", "min_clients", "keep_checkpoints"):
            count(field, getattr(self, field))
        count("seed", self.seed, least=0)
        count("metrics_port", self.metrics_port, least=0, most=65535)
        if self.batch_size != "full":
            count("batch_size", self.batch_size)
        if self.min_clients > self.cohort_size:
            most = f"clients = {self.clients}" if self.participation is None else f"the cohort, {self.cohort_size}"
            raise InputError("min_clients", self.min_clients, f"at most {most}")
        non_negative("weight_decay", self.weight_decay)
        one_of("engine", self.engine, ENGINES)
        for field in ("round_seconds", "upload_seconds", "wait_seconds", "poll_seconds"):
            positive(field, getattr(self, field))
        if self.sampling == "cyclic":
            accepted = '"replacement" or "shuffle": clients keep nothing, so none knows where its last round ended'
            raise InputError("sampling", self.sampling, accepted)
        self.check_samples()
        self.check_keys()
        self.build_algorithm()
        build_guard(self.guard)
        rule = build_aggregate(self.aggregate)
        if rule is not None:
            rule.check_cohort(self.min_clients)
        build_stop(self.stop)
        steps = self.build_steps()
        if isinstance(steps, ClientSteps):
            if self.build_algorithm().traits.first_steps == "pass":
                accepted = '"epoch" or a number: whether a pass ends in a round depends on K, which clients choose'
                raise InputError("algorithm.first_steps", "pass", accepted)
            positive("steps.seconds", steps.seconds)
            count("steps.max_steps", steps.max_steps)
        else:
            steps.check(self.clients, self.rounds)

    def check_clients(self) -> None:
        """Check how many clients there are, which are excluded, and how many the start and a round need."""
        count("clients", self.clients, most=MOST_CLIENTS)
        left = self.clients - len(set(self.exclude))
        known = all(0 <= client < self.clients for client in self.exclude)
        if not known or len(set(self.exclude)) < len(self.exclude) or not left:
            accepted = f"a list of different partitions from 0 to {self.clients - 1}, and not of all"
            raise InputError("exclude", self.exclude, accepted)
        if count("start_clients", self.start_clients, least=0) > left:
            excluded = f" less {len(self.exclude)} excluded ones" if self.exclude else ""
            raise InputError("start_clients", self.start_clients, f"at most clients = {self.clients}{excluded}")
        if self.cohorts is not None:
            self.cohorts.number(self.clients)

    @property
    def cohorts(self) -> Participation | None:
        """The rule by which clients take part in a round; None if all do."""
        return build_participation(self.participation)

    @property
    def cohort_size(self) -> int:
        """The largest number of clients that take part in a round."""
        return self.clients if self.cohorts is None else min(self.clients, self.cohorts.number(self.clients))

    def check_samples(self) -> None:
        """Check the bounds of sample counts."""
        count("max_samples", self.max_samples, most=MOST_SAMPLES)
        if self.samples is None:
            return
        if set(self.samples) != {str(i) for i in range(self.clients)}:
            raise InputError("samples", self.samples, f"one number for each partition, 0 to {self.clients - 1}")
        for partition, number in self.samples.items():
            count(f"samples.{partition}", number, most=self.max_samples)

    def check_keys(self) -> None:
        """Check that every partition has a key of its own."""
        if self.keys is None:
            return
        if set(self.keys) != {str(i) for i in range(self.clients)}:
            raise InputError("keys", self.keys, f"one fingerprint for each partition, 0 to {self.clients - 1}")
        for partition, fingerprint in self.keys.items():
            if not FINGERPRINT.fullmatch(fingerprint):
                accepted = "SHA256: and 43 characters, as ssh-keygen -lf NODE.pub prints it"
                raise InputError(f"keys.{partition}", fingerprint, accepted)
            if list(self.keys.values()).count(fingerprint) > 1:
                raise InputError(f"keys.{partition}", fingerprint, "a key that no other partition has")

    def build_algorithm(self) -> Algorithm:
        """Make the algorithm."""
        with section("algorithm"):
            if self.algorithm.lr is None:
                raise InputError("lr", None, "the local step size, a number above 0")
            return self.algorithm.build()

    def build_steps(self) -> StepSchedule | ClientSteps:
        """Make the server's step schedule, or the rule by which clients choose their steps."""
        with section("steps"):
            if self.steps.get("kind") == "client":
                for key, value in self.steps.items():
                    if key not in ClientSteps.model_fields:
                        raise unknown(key, value, ClientSteps.model_fields)
                try:
                    return ClientSteps(**self.steps)
                except ValidationError as error:
                    first = error.errors()[0]
                    accepted = first["msg"].removeprefix("Input should be ")
                    raise InputError(str(first["loc"][0]), first["input"], accepted) from None
            one_of("kind", self.steps.get("kind"), ["client", *PLANNED])
            steps = build_kind(self.steps, PLANNED)
            return self._counted(steps) if isinstance(steps, Epochs) else steps

    def _counted(self, steps: Epochs) -> Epochs:
        """Return the schedule with the samples that the settings name; those that clients report may be wrong."""
        if self.samples is None and steps.epoch_steps is None:
            accepted = "another kind, or the setting samples with the number of samples of each partition"
            raise InputError("kind", "epochs", accepted)
        sizes = [(self.samples or {}).get(str(client), 1) for client in range(self.clients)]
        counted = steps.with_samples(np.array(sizes, np.int64), self.batch, self.sampling)
        counted.counts(0, self.clients, self.seed)  # refuses too many steps before any client is asked
        return counted

    @property
    def batch(self) -> int | None:
        """The samples per step; None for all samples of a client."""
        return None if self.batch_size == "full" else self.batch_size

    @property
    def torch_dtype(self) -> torch.dtype:
        """The type of every vector."""
        return torch.float64 if self.dtype == "float64" else torch.float32

    def setup(self, loss: Loss | None = None, metrics: Mapping[str, Metric] | None = None) -> Setup:
        """Return the options that a live run shares with a simulation."""
        return Setup(
            rounds=self.rounds,
            batch_size=self.batch,
            loss=loss,
            sampling=self.sampling,
            participation=self.cohorts,
            weight_decay=float(self.weight_decay),
            buffers=self.buffers,
            seed=self.seed,
            eval_every=self.eval_every,
            metrics=metrics,
            stop=build_stop(self.stop),
            guard=build_guard(self.guard),
            aggregate=build_aggregate(self.aggregate),
        )

    def identity(self) -> dict[str, Any]:
        """Return the settings that must stay the same when a run resumes; those in NOTED may change."""
        changeable = {
            "rounds", "round_seconds", "upload_seconds", "wait_seconds", "poll_seconds", "attempts", "out", "name",
            "eval_every", "min_clients", "stop", "app", "samples", "max_samples", "keys", "log", "metrics_port",
            "metrics_host", "start_clients", "exclude", "keep_checkpoints",
        }  # fmt: skip
        settings = self.model_dump(mode="json", exclude_none=True)
        return {key: value for key, value in settings.items() if key not in changeable}


def partition_of(node_config: Mapping[str, Any], clients: int) -> int:
    """Return the number of this node's client.

    Examples:
        >>> partition_of({"partition-id": 2}, clients=3)
        2
    """
    value = node_config.get("partition-id")
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < clients:
        raise InputError(
            "node config partition-id",
            value,
            f"an integer from 0 to {clients - 1} (start the SuperNode with --node-config 'partition-id=0')",
        )
    return value


def _nested(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return nested tables from dotted keys. Flower has no lists, so a string that begins with [ or { is JSON."""
    nested: dict[str, Any] = {}
    for key, value in config.items():
        table = nested
        *parents, last = key.split(".")
        for parent in parents:
            table = table.setdefault(parent, {})
            if not isinstance(table, dict):
                raise InputError(key, value, f"a key inside a table: {parent} is a value")
        table[last] = value
        if isinstance(value, str) and value.startswith(("[", "{")):
            try:
                table[last] = parse_json(value)
            except ValueError as error:
                raise InputError(key, value, f"JSON after [ or {{: {error}") from None
    return nested
