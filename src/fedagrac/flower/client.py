"""The client's side: run the local rule on this node's data, and keep nothing between rounds.

The server sends x~, c_i and the numbers of the local rule. Between the two exchanges of one round the first
gradient waits in Flower's `Context.state`, stamped with the run and the round.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, cast

import numpy as np
import torch

from fedagrac.core.local import EXACT_BELOW, Plan, Result
from fedagrac.data.federation import Federation
from fedagrac.engines import LanesEngine, Loss, SerialEngine, Workload
from fedagrac.errors import FedagracError, InputError, count, positive
from fedagrac.flower.extra import require_flower
from fedagrac.flower.wire import PROTOCOL, Parcel, fingerprint, pack, unpack
from fedagrac.models.vector import VectorModel

if TYPE_CHECKING:
    from flwr.app import Context, Message
    from flwr.clientapp import ClientApp
    from torch import nn

    from fedagrac.flower.settings import ClientSteps, Settings

__all__ = ["LocalClient", "client_app", "node_partition"]

SELF = np.zeros(1, np.int64)
"""The one client of this node's own federation."""

WAITING = "fedagrac-first"


def client_app(
    model: Callable[[Context], nn.Module],
    data: Callable[[Context], Any],
    loss: Loss | None = None,
    mods: Sequence[Any] = (),
) -> ClientApp:
    """Make the Flower ClientApp.

    Args:
        model: returns the module; only its shapes matter here, the weights come from the server.
        data: returns this node's own (inputs, targets), or a `Federation` of one client.
        loss: (output, target) -> scalar mean over the batch; None for cross-entropy.
        mods: Flower's modifiers, around every exchange.

    All hooks receive Flower's Context: `context.node_config["partition-id"]` says which client this is.
    """
    require_flower()
    from flwr.app import Message as Reply
    from flwr.clientapp import ClientApp

    app = ClientApp()
    around = list(mods)

    def answer(act: Callable[[LocalClient, Parcel], Parcel], needs_data: bool = True) -> Any:
        def handle(message: Message, context: Context) -> Message:
            client = LocalClient.of(context, model, data, loss) if needs_data else LocalClient.idle(context)
            return Reply(pack(act(client, unpack(message.content))), reply_to=message)

        return handle

    app.query("hello", mods=around)(answer(LocalClient.hello))
    app.query("gradient", mods=around)(answer(LocalClient.gradient))
    app.train("steps", mods=around)(answer(LocalClient.train))
    app.train("first", mods=around)(answer(LocalClient.first, needs_data=False))
    return app


def node_partition(context: Context) -> tuple[int, int]:
    """Return which client this node is, and how many there are: for data hooks."""
    client = LocalClient.idle(context)
    return client.number, client.settings.clients


@dataclass(frozen=True, eq=False)
class LocalClient:
    """One client on its own machine, for the time of one message.

    Attributes:
        number: which client of the federation it is, its partition id.
        workload: the model and this client's data alone; None where a message needs neither.
    """

    number: int
    settings: Settings
    context: Context
    workload: Workload | None

    @classmethod
    def of(
        cls,
        context: Context,
        model: Callable[[Context], nn.Module],
        data: Callable[[Context], Any],
        loss: Loss | None,
    ) -> LocalClient:
        """Build the model, load the data and check that they fit together."""
        idle = cls.idle(context)
        s = idle.settings
        own = data(context)
        federation = own if isinstance(own, Federation) else Federation.from_arrays([own])
        if federation.num_clients != 1:
            raise InputError("data", federation, "(inputs, targets) of this node, or a Federation of one client")
        vector_model = VectorModel(model(context), _device(context), s.torch_dtype)
        numbers = np.array([idle.number])
        drawing = s.batch, s.sampling, float(s.weight_decay), s.seed, numbers
        return cls(idle.number, s, context, Workload.of(vector_model, federation, loss, *drawing))

    @classmethod
    def idle(cls, context: Context) -> LocalClient:
        """Read the settings alone."""
        from fedagrac.flower.settings import Settings, partition_of

        settings = Settings.of(context.run_config)
        return cls(partition_of(context.node_config, settings.clients), settings, context, None)

    @property
    def work(self) -> Workload:
        """The model and the data."""
        assert self.workload is not None
        return self.workload

    def hello(self, ask: Parcel) -> Parcel:
        """Say who this is; where the server sends x_1, send the full local gradient there along."""
        model = self.work.model
        theirs = ask.facts.get("model")
        if ask.facts.get("protocol") != PROTOCOL:
            raise FedagracError(f"the server speaks protocol {ask.facts.get('protocol')}, this client {PROTOCOL}")
        facts = {
            "client": self.number,
            "samples": int(self.work.federation.sizes[0]),
            "model": fingerprint(model),
            "parameters": model.size,
            "dtype": str(model.dtype),
        }
        if "x" not in ask.vectors or theirs != facts["model"]:
            return Parcel(facts)
        return Parcel(facts, self.gradient(ask).vectors)

    def gradient(self, ask: Parcel) -> Parcel:
        """Return the local gradient at x: over all data, or over the round's first batch."""
        t = int(ask.facts["round"])
        kind = cast('Literal["full", "first"]', ask.facts["batch"])
        row = SerialEngine(self.work).gradients(self._place(ask, "x"), SELF, t, kind)[0]
        return Parcel({"client": self.number, "round": t}, {"gradient": row.cpu()})

    def train(self, ask: Parcel) -> Parcel:
        """Run the local rule: so many steps as the server planned, or until this client's time is over."""
        t, x = int(ask.facts["round"]), self._place(ask, "x")
        correction = self._place(ask, "c")[None] if "c" in ask.vectors else None
        planned, mean = int(ask.facts["steps"]), bool(ask.facts["mean"])
        numbers = {"lr": float(ask.facts["lr"]), "mu": float(ask.facts["mu"])}

        def plan(steps: int, mean: bool) -> Plan:
            return Plan.of(
                [steps], correction=correction, first_steps=int(ask.facts["first"]), mean=mean, **numbers
            )

        if planned:
            chosen = plan(planned, mean)
            engine = LanesEngine(self.work) if self.settings.engine == "lanes" else SerialEngine(self.work)
            result, K = engine.run(chosen, x, SELF, t), planned
        else:
            # K is not known yet: add the gradients up where the shortest run might need their sum
            needed = mean and (numbers["lr"] < EXACT_BELOW or numbers["mu"] > 0)
            result, K = self._own_time(lambda most: plan(most, needed), x, t)
        sent = {"model": result.models[0]}
        if result.first is not None and planned:
            sent["first"] = result.first[0]
        if result.total is not None and plan(K, mean).accumulate:
            sent["total"] = result.total[0]
        if not planned:
            self._keep(t, None if result.first is None else result.first[0])
        facts = {"client": self.number, "round": t, "steps": K, "loss": float(result.loss[0])}
        return Parcel(facts, {name: vector.cpu() for name, vector in sent.items()})

    def first(self, ask: Parcel) -> Parcel:
        """Send the first gradient of the round that waits here."""
        t = int(ask.facts["round"])
        stamp = self.context.state.config_records.get(WAITING)
        if stamp is None or (stamp["run"], stamp["round"]) != (str(self.context.run_id), t):
            raise FedagracError(f"client {self.number} holds no first gradient of round {t + 1}")
        waiting = self.context.state.array_records[WAITING + "-vector"]["first"].numpy()
        return Parcel({"client": self.number, "round": t}, {"first": torch.from_numpy(waiting.copy())})

    def _own_time(self, plan: Callable[[int], Plan], x: torch.Tensor, t: int) -> tuple[Result, int]:
        """Run until this node's time is over: its own seconds or steps, or those of the run."""
        rule = cast("ClientSteps", self.settings.build_steps())
        node = self.context.node_config
        most, seconds = rule.max_steps, float(rule.seconds)
        if "steps" in node:
            most, seconds = min(most, count("node config steps", node["steps"])), float("inf")
        elif "seconds" in node:
            seconds = positive("node config seconds", node["seconds"])
        end = time.monotonic() + seconds
        chosen = dataclasses.replace(plan(most), exact=True)
        result, K = SerialEngine(self.work).run_until(chosen, x, SELF, t, lambda _: time.monotonic() >= end)
        return result, int(K[0])

    def _keep(self, t: int, first: torch.Tensor | None) -> None:
        """Let the first gradient wait for the second exchange of this round, in place of any other."""
        from flwr.app import Array, ArrayRecord, ConfigRecord

        state = self.context.state
        for key in (WAITING, WAITING + "-vector"):
            state.pop(key, None)
        if first is not None:
            state[WAITING] = ConfigRecord({"run": str(self.context.run_id), "round": t})
            state[WAITING + "-vector"] = ArrayRecord({"first": Array(first.cpu().numpy())})

    def _place(self, ask: Parcel, name: str) -> torch.Tensor:
        model = self.work.model
        return ask.vector(name, model.size, model.dtype).to(model.device)


def _device(context: Context) -> torch.device:
    """Return the device of this node: its node config's, or the CPU."""
    name = context.node_config.get("device", "cpu")
    try:
        device = torch.device(str(name))
        torch.zeros(1, device=device)
    except (RuntimeError, AssertionError) as error:
        raise InputError("node config device", name, f"a usable device such as cpu or cuda ({error})") from error
    return device
