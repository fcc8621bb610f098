"""The server's side: rounds of any registered algorithm over clients that come, go and err.

The algorithm's `plan` and `aggregate` are those of the simulation; this module only carries plans to clients and
results back. The server holds all state, x and every client's rows, and writes a checkpoint after every round.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from fedagrac.callbacks.run_folder import environment, to_json, write_description
from fedagrac.checkpoints import Checkpoint, read_checkpoint, write_checkpoint
from fedagrac.clients import ClientTable
from fedagrac.cohort import Cohort, Population
from fedagrac.data.batches import epoch_steps
from fedagrac.data.federation import Federation
from fedagrac.engines import Loss, Workload
from fedagrac.errors import FedagracError, InputError
from fedagrac.evaluation import evaluate
from fedagrac.flower.extra import require_flower
from fedagrac.flower.link import Link, MissedError, RemoteGradients
from fedagrac.flower.wire import BadReplyError, Parcel, fingerprint
from fedagrac.folders import naming, write_atomically
from fedagrac.local import Plan, Result
from fedagrac.models.vector import VectorModel
from fedagrac.results import History
from fedagrac.streams import Purpose, torch_seed

if TYPE_CHECKING:
    import numpy.typing as npt
    from flwr.app import Context
    from flwr.serverapp import Grid, ServerApp
    from torch import Tensor, nn

    from fedagrac.algorithms import Algorithm
    from fedagrac.algorithms.base import Rows, State
    from fedagrac.flower.settings import Settings

__all__ = ["FlowerRun", "needs_steps_first", "server_app"]

log = logging.getLogger("fedagrac")

LONG = 2**40
"""More steps than any client does: plans made for it ask for first gradients of any length."""


def server_app(
    model: Callable[[Context], nn.Module],
    test: Callable[[Context], Any] | None = None,
    loss: Loss | None = None,
) -> ServerApp:
    """Make the Flower ServerApp.

    Args:
        model: returns the module whose weights are x_1.
        test: returns (inputs, targets) to evaluate the global model on; None to evaluate nothing.
        loss: (output, target) -> scalar mean over the batch; None for cross-entropy.
    """
    require_flower()
    from flwr.serverapp import ServerApp

    app = ServerApp()

    @app.main()
    def main(grid: Grid, context: Context) -> None:
        from fedagrac.flower.settings import Settings

        logging.getLogger("fedagrac").setLevel(logging.INFO)
        _log_like_flower()
        settings = Settings.of(context.run_config)
        FlowerRun.of(grid, settings, build_model(settings, model, context), test and test(context), loss).run()

    return app


def build_model(settings: Settings, model: Callable[[Context], nn.Module], context: Context) -> VectorModel:
    """Build the module; random weights are those of the run's seed, as in an experiment."""
    with torch.random.fork_rng([]):
        torch.default_generator.manual_seed(torch_seed(settings.seed, Purpose.MODEL))
        return VectorModel(model(context), dtype=settings.torch_dtype)


def _log_like_flower() -> None:
    """Send this package's messages where Flower's go, so that `flwr log` shows them."""
    from flwr.supercore.logger import FLOWER_LOGGER

    own = logging.getLogger("fedagrac")
    own.handlers = list(FLOWER_LOGGER.handlers)
    own.propagate = False


@dataclass(frozen=True, eq=False)
class Collected:
    """What came back of a round: the members that answered, their part of the plan, and their result."""

    cohort: Cohort
    rows: Rows
    plan: Plan
    result: Result


@dataclass(eq=False)
class FlowerRun:
    """A federation in progress.

    Attributes:
        state: the server's vectors; `state["x"]` is the global model.
        table: what the server remembers of each client.
        history: the rounds so far.
    """

    settings: Settings
    algorithm: Algorithm
    model: VectorModel
    evaluation: Workload | None
    link: Link
    gradients: RemoteGradients
    folder: Path
    state: State = field(default_factory=dict)
    table: ClientTable = field(default_factory=lambda: ClientTable(0))
    history: History = field(default_factory=History)
    bytes_before: int = 0
    time_before: float = 0.0
    began: float = field(default_factory=time.perf_counter)

    @classmethod
    def of(
        cls,
        grid: Grid,
        settings: Settings,
        model: VectorModel,
        test: tuple[Any, Any] | Federation | None = None,
        loss: Loss | None = None,
    ) -> FlowerRun:
        """Check everything that needs no client."""
        from fedagrac.flower.settings import ClientSteps

        algorithm = settings.build_algorithm()
        if isinstance(settings.build_steps(), ClientSteps) and needs_steps_first(algorithm):
            accepted = "a schedule of the server (such as constant or linear): "
            accepted += f"{algorithm.name}'s local rule needs K_i before it starts, clients must not choose it"
            raise InputError("steps.kind", "client", accepted)
        evaluation = None
        if test is not None:
            pool = test if isinstance(test, Federation) else Federation.from_arrays([test], test=test)
            drawing = settings.batch, settings.sampling, float(settings.weight_decay), settings.seed
            evaluation = Workload.of(model, pool, loss, *drawing)
        link = Link(grid, model, settings)
        gradients = RemoteGradients(link, model.dtype)
        return cls(settings, algorithm, model, evaluation, link, gradients, Path(settings.out))

    def run(self) -> None:
        """Start or resume, and do the rounds."""
        self.begin()
        while len(self.history) < self.settings.rounds:
            self.round()
            if not bool(torch.isfinite(self.state["x"]).all()):
                return self.end("diverged", f"round {len(self.history)}: the model is no longer finite")
        return self.end("finished", f"all {len(self.history)} rounds done")

    def begin(self) -> None:
        """Go on from the last checkpoint, or wait for all clients and make the state before round 1."""
        known = self.identity()
        stored = read_checkpoint(self.folder / "checkpoint")
        if stored is not None:
            self.resume(stored, known)
            return
        if (self.folder / "history.jsonl").exists():
            raise InputError("out", str(self.folder), "a new folder: this one holds a run without a checkpoint")
        x = self.model.initial()
        if self.algorithm.starts_with_gradients:
            self.link.x1 = x
        log.info("waiting for %d clients", self.settings.clients)
        self.link.wait_for(self.settings.clients, 0)
        self.gradients.remember(x, self.link.gradients)
        self.table = ClientTable(self.settings.clients)
        self.state = self.algorithm.start(x, Population(self.weights, self.gradients))
        facts = {**environment(self.model.device), "engine": "flower"}
        described = self.settings.model_dump(mode="json", exclude_none=True)
        experiment = {**described, "algorithm": [{**described["algorithm"], "label": self.algorithm.name}]}
        write_description(self.folder, experiment, facts)
        write_atomically(self.folder / "history.jsonl", b"")
        self.link.started = True
        self.save()

    def resume(self, stored: Checkpoint, known: dict[str, Any]) -> None:
        """Go on where a run of the same settings was cut off."""
        for key, value in known.items():
            before = stored.facts.get("identity", {}).get(key)
            if before != value:
                raise InputError(
                    "out", str(self.folder), f"another folder: it holds a run with {key} = {before!r}"
                )
        lines = (self.folder / "history.jsonl").read_text(encoding="utf-8").splitlines()[: stored.round]
        self.history = History(json.loads(line) for line in lines)
        write_atomically(self.folder / "history.jsonl", "".join(line + "\n" for line in lines).encode())
        self.state, self.table = stored.state, stored.table
        self.bytes_before, self.time_before = int(stored.facts["bytes"]), float(stored.facts["seconds"])
        self.link.sizes = dict(enumerate(stored.facts["sizes"]))
        if stored.round < self.settings.rounds:
            self.link.note(f"resumed after round {stored.round}")
            self.link.wait_for(self.settings.min_clients, stored.round)
        self.link.started = True

    def identity(self) -> dict[str, Any]:
        """Return what a run must share with its checkpoint."""
        return {**self.settings.identity(), "model": fingerprint(self.model)}

    @property
    def sizes(self) -> npt.NDArray[np.int64]:
        """n_i of all clients, as they reported them at the start."""
        return np.array([self.link.sizes[i] for i in range(self.settings.clients)], np.int64)

    @property
    def weights(self) -> npt.NDArray[np.float64]:
        """omega_i of all clients."""
        weights: npt.NDArray[np.float64] = self.sizes / self.sizes.sum()
        return weights

    def cohort_of(self, clients: npt.NDArray[np.int64], steps: npt.NDArray[np.int64]) -> Cohort:
        """Return a cohort of these clients in the next round, in the order of their numbers."""
        sizes = self.sizes
        return Cohort(
            round=len(self.history),
            clients=clients,
            steps=steps,
            masses=sizes[clients].tolist(),
            population_weights=self.weights[clients],
            epoch_steps=epoch_steps(sizes[clients], self.settings.batch),
            everyone=len(clients) == len(sizes),
            service=self.gradients,
        )

    def round(self) -> None:
        """Do one round: plan, send, collect, aggregate, write down; ask again where too few answered."""
        t = len(self.history)
        down, up = self.link.bytes_down, self.link.bytes_up
        collected = None
        for _ in range(self.settings.attempts):
            self.link.wait_for(self.settings.min_clients, t)
            asked = len(self.link.nodes)
            collected = self.attempt()
            if collected is not None:
                break
            self.link.note(f"fewer than min_clients = {self.settings.min_clients} usable replies, asked again")
        if collected is None:
            raise FedagracError(
                f"round {t + 1}: fewer than min_clients = {self.settings.min_clients} usable replies in "
                f"attempts = {self.settings.attempts}; run again to resume from the last checkpoint"
            )
        c = collected
        self.state, rows = self.algorithm.aggregate(self.state, c.rows, c.cohort, c.plan, c.result)
        self.table.put(c.cohort.clients, rows)
        number = t + 1
        due = number % self.settings.eval_every == 0 or number == self.settings.rounds
        measured: dict[str, float | None] = dict.fromkeys(["test_accuracy", "test_loss"])
        if due and self.evaluation is not None:
            measured = evaluate(self.evaluation, self.state["x"], {})
        seconds = self.time_before + time.perf_counter() - self.began
        record = {
            "round": number,
            **measured,
            "train_loss": float(np.dot(c.cohort.weights, c.result.loss.numpy())),
            "clients": len(c.cohort),
            "asked": asked,
            "dropped": asked - len(c.cohort),
            "first_gradients": int((c.plan.first_steps > 0).sum()),
            "fast": int(c.cohort.fast.sum()),
            "steps_mean": float(c.cohort.steps.mean()),
            "steps": {str(i): int(k) for i, k in zip(c.cohort.clients, c.cohort.steps, strict=True)},
            "bytes_up": self.link.bytes_up - up,
            "bytes_down": self.link.bytes_down - down,
            "bytes_total": self.bytes_before + self.link.bytes_up + self.link.bytes_down,
            "sim_time": seconds,
            "wall_time": seconds,
            "events": self.link.take_events(),
        }
        self.history.append(record)
        path = self.folder / "history.jsonl"
        with naming(path), path.open("a", encoding="utf-8") as file:
            file.write(to_json(record) + "\n")
        self.save()
        said = ", ".join(f"{k} {v:.4f}" for k, v in measured.items() if v is not None)
        loss = record["train_loss"]
        log.info("round %d: %d of %d clients, train loss %.4f %s", number, len(c.cohort), asked, loss, said)

    def attempt(self) -> Collected | None:
        """Ask everyone who is there once; return what came, or None if that is too little."""
        from fedagrac.flower.settings import ClientSteps

        rule = self.settings.build_steps()
        if isinstance(rule, ClientSteps):
            return self.ask_for_steps_and_model(rule)
        K = rule.counts(len(self.history), self.settings.clients, self.settings.seed)
        begun = self.planned(lambda clients: K[clients])
        if begun is None:
            return None
        cohort, rows, plan = begun
        parcels = {int(i): _ask(self.state["x"], plan, row, cohort) for row, i in enumerate(cohort.clients)}
        replies = self.link.exchange("train.steps", parcels, cohort.round)
        good = self.checked(replies, cohort, plan, lambda row: (int(plan.steps[row]), int(plan.steps[row])))
        return self.collected(cohort, rows, plan, good, np.array([int(plan.steps[row]) for row in good]))

    def ask_for_steps_and_model(self, rule: Any) -> Collected | None:
        """Do the two exchanges of Algorithm 1: K_i and the model from all; the first gradient from the fast."""
        # what a client does before its K is known: the same plan for any K (see `needs_steps_first`), and the
        # longest first gradient that it might be asked for, once as a fast client and once as a slow one
        begun = self.planned(lambda clients: LONG * (1 + np.arange(len(clients)) % 2))
        if begun is None:
            return None
        cohort, rows, plan = begun
        swapped = self.cohort_of(cohort.clients, 3 * LONG - cohort.steps)
        other = self.algorithm.plan(self.state, rows, swapped)
        longest = np.maximum(plan.first_steps, other.first_steps)
        plan = dataclasses.replace(plan, first_steps=longest)
        parcels = {
            int(i): _ask(self.state["x"], plan, row, cohort, chosen=True) for row, i in enumerate(cohort.clients)
        }
        replies = self.link.exchange("train.steps", parcels, cohort.round)
        good = self.checked(
            replies, cohort, dataclasses.replace(plan, first_steps=0 * longest), lambda _: (1, rule.max_steps)
        )
        K = np.array([int(reply.facts["steps"]) for reply in good.values()], np.int64)
        if len(good) < self.settings.min_clients:
            return None
        members = np.array(list(good), np.int64)
        answered = self.cohort_of(cohort.clients[members], K)
        kept = {name: values[torch.from_numpy(members)] for name, values in rows.items()}
        final = self.algorithm.plan(self.state, kept, answered)
        firsts = self.ask_for_first_gradients(answered, final)
        vectors = [
            {**reply.vectors, **({"first": firsts[row]} if row in firsts else {})}
            for row, reply in enumerate(good.values())
        ]
        # whoever missed the second exchange contributes its mean gradient
        came = np.array([row in firsts for row in range(len(answered))])
        final = dataclasses.replace(final, first_steps=np.where(came, final.first_steps, 0))
        loss = [reply.number("loss") for reply in good.values()]
        return Collected(answered, kept, final, _result(self.state["x"], final, vectors, loss))

    def ask_for_first_gradients(self, cohort: Cohort, plan: Plan) -> dict[int, Tensor]:
        """Do the second exchange; return the first gradients by row."""
        rows = {int(cohort.clients[row]): int(row) for row in np.flatnonzero(plan.first_steps)}
        asks = {client: Parcel({"round": cohort.round}) for client in rows if client in self.link.nodes}
        firsts = {}
        for client, reply in self.link.exchange("train.first", asks, cohort.round).items():
            try:
                reply.integer("client", client, client)
                reply.integer("round", cohort.round, cohort.round)
                firsts[rows[client]] = reply.vector("first", self.model.size, self.model.dtype)
            except BadReplyError as error:
                self.link.note(f"client {client}: first gradient dropped, {error}")
        for client, row in rows.items():
            if row not in firsts:
                self.link.note(f"client {client}: missed the second exchange, its mean gradient is used")
        return firsts

    def planned(
        self, steps: Callable[[npt.NDArray[np.int64]], npt.NDArray[np.int64]]
    ) -> tuple[Cohort, Rows, Plan] | None:
        """Plan the round with those who are there; without those whose gradient is needed and does not come."""
        left_out: set[int] = set()
        while True:
            clients = np.array(sorted(set(self.link.nodes) - left_out), np.int64)
            if len(clients) < self.settings.min_clients:
                return None
            cohort = self.cohort_of(clients, steps(clients))
            try:
                self.admit(cohort)
                rows = self.table.rows(clients)
                return cohort, rows, self.algorithm.plan(self.state, rows, cohort)
            except MissedError as missed:
                left_out |= set(missed.clients)

    def admit(self, cohort: Cohort) -> None:
        """Give rows to members that take part for the first time."""
        new = self.table.unseen(cohort.clients)
        if len(new):
            newcomers = self.cohort_of(new, cohort.steps[np.isin(cohort.clients, new)])
            self.table.put(new, self.algorithm.enter(self.state, newcomers))

    def checked(
        self,
        replies: dict[int, Parcel],
        cohort: Cohort,
        plan: Plan,
        bounds: Callable[[int], tuple[int, int]],
    ) -> dict[int, Parcel]:
        """Return the replies that can be used, by row of the cohort; name and drop the others."""
        good = {}
        d, dtype = self.model.size, self.model.dtype
        for row, client in enumerate(cohort.clients.tolist()):
            if client not in replies:
                continue
            reply = replies[client]
            try:
                reply.integer("client", client, client)
                reply.integer("round", cohort.round, cohort.round)
                reply.integer("steps", *bounds(row))
                reply.number("loss")
                reply.vector("model", d, dtype)
                if plan.first_steps[row] > 0:
                    reply.vector("first", d, dtype)
                if "total" in reply.vectors:
                    reply.vector("total", d, dtype)
                good[row] = reply
            except BadReplyError as error:
                self.link.note(f"client {client}: reply dropped, {error}")
        return good

    def collected(
        self, cohort: Cohort, rows: Rows, plan: Plan, good: dict[int, Parcel], steps: npt.NDArray[np.int64]
    ) -> Collected | None:
        """Return the part of the round that came back, its weights normalised over those who answered."""
        if len(good) < self.settings.min_clients:
            return None
        members = np.array(list(good), np.int64)
        places = torch.from_numpy(members)
        part = dataclasses.replace(
            plan,
            steps=plan.steps[members],
            lr=plan.lr[members],
            mu=plan.mu[members],
            first_steps=plan.first_steps[members],
            correction=None if plan.correction is None else plan.correction[places],
        )
        kept = {name: values[places] for name, values in rows.items()}
        answered = self.cohort_of(cohort.clients[members], steps)
        loss = [reply.number("loss") for reply in good.values()]
        vectors = [dict(reply.vectors) for reply in good.values()]
        return Collected(answered, kept, part, _result(self.state["x"], part, vectors, loss))

    def save(self) -> None:
        """Write a checkpoint: everything that a run started anew needs to go on."""
        facts = {
            "identity": self.identity(),
            "sizes": self.sizes.tolist(),
            "bytes": self.bytes_before + self.link.bytes_up + self.link.bytes_down,
            "seconds": self.time_before + time.perf_counter() - self.began,
        }
        checkpoint = Checkpoint(len(self.history), self.state, self.table, facts)
        write_checkpoint(self.folder / "checkpoint", checkpoint)

    def end(self, status: str, reason: str) -> None:
        """Keep the final model and say how the run ended."""
        from safetensors.torch import save

        parameters = {n: v.detach().clone().contiguous() for n, v in self.model.views(self.state["x"]).items()}
        write_atomically(self.folder / "model.safetensors", save(parameters))
        said = {"status": status, "reason": reason, "rounds": len(self.history)}
        write_atomically(self.folder / "status.json", json.dumps(said).encode() + b"\n")
        log.info("%s: %s; written to %s", status, reason, self.folder.absolute())


def needs_steps_first(algorithm: Algorithm) -> bool:
    """Say whether the local rule (step size, correction, proximal term) depends on K_i, as FedLin's does.

    Examples:
        >>> from fedagrac import FedAvg, FedLin
        >>> needs_steps_first(FedAvg(lr=0.1)), needs_steps_first(FedLin(lr=0.1))
        (False, True)
    """

    def service(x: Tensor, clients: npt.NDArray[np.int64], *_: Any, **__: Any) -> Tensor:
        return torch.zeros((len(clients), len(x)))

    def plan(steps: list[int]) -> Plan:
        ones, K = np.ones(2, np.int64), np.array(steps)
        cohort = Cohort(0, np.arange(2), K, [1, 1], ones / 2, ones, True, service)
        state = algorithm.start(torch.zeros(1), Population(ones / 2, service))
        return algorithm.plan(state, algorithm.enter(state, cohort), cohort)

    one, other = plan([1, 3]), plan([7, 2])
    corrections = [torch.zeros(2, 1) if p.correction is None else p.correction for p in (one, other)]
    same = np.array_equal(one.lr, other.lr) and np.array_equal(one.mu, other.mu)
    return not (same and torch.equal(*corrections))


def _ask(x: Tensor, plan: Plan, row: int, cohort: Cohort, chosen: bool = False) -> Parcel:
    """Return what one member is told."""
    facts = {
        "round": cohort.round,
        "steps": 0 if chosen else int(plan.steps[row]),
        "lr": float(plan.lr[row]),
        "mu": float(plan.mu[row]),
        "first": int(plan.first_steps[row]),
        "mean": plan.mean,
    }
    vectors = {"x": x}
    if plan.correction is not None:
        vectors["c"] = plan.correction[row]
    return Parcel(facts, vectors)


def _result(x: Tensor, plan: Plan, vectors: list[dict[str, Tensor]], loss: list[float]) -> Result:
    """Return the members' replies as one result."""
    models = torch.stack([v["model"] for v in vectors])
    first = total = None
    if plan.first_steps.any():
        nothing = torch.zeros_like(x)
        asked = [v["first"] if n else nothing for v, n in zip(vectors, plan.first_steps, strict=True)]
        first = torch.stack(asked)
    if any("total" in v for v in vectors):
        # the others' sums follow from their models accurately enough, or they would have sent them too
        sums = []
        for row, v in enumerate(vectors):
            c = 0 if plan.correction is None else plan.correction[row]
            reconstructed = (x - v["model"]) / float(plan.lr[row]) - int(plan.steps[row]) * c
            sums.append(v.get("total", reconstructed))
        total = torch.stack(sums)
    return Result(models, torch.tensor(loss, dtype=torch.float64), first, total)
