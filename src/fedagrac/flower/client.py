"""The client of a federation: it runs the local rule on the data of its node.

The server sends x~, c_i and the numbers of the local rule, so the client keeps nothing between rounds. Between the
two exchanges of a round, the first gradient is kept in Flower's `Context.state`, with the run and the round.

Flower starts a process for every message. Importing this module does not import torch: a message that asks for
something that was kept does not pay for it. Functions that compute import what they need.
"""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, cast

import numpy as np

from fedagrac.errors import FedagracError, InputError, count, positive
from fedagrac.flower.extra import require_flower
from fedagrac.flower.identity import Greeting, sign
from fedagrac.flower.wire import PROTOCOL, VECTORS, Parcel, fingerprint, pack, slot_names, unpack

if TYPE_CHECKING:
    import torch
    from flwr.app import Context, Message, RecordDict
    from flwr.clientapp import ClientApp
    from torch import nn

    from fedagrac.core.local import Plan, Result
    from fedagrac.engines import Loss, Workload
    from fedagrac.flower.settings import ClientSteps, Settings

__all__ = ["LocalClient", "client_app", "node_partition"]

SELF = np.zeros(1, np.int64)
"""The number of the only client in the federation of this node."""

LOOKING_MODS = ("arrays_size_mod", "message_size_mod")
"""Flower's modifiers that log sizes and change nothing."""

WAITING = "fedagrac-first"
"""The key in `Context.state` of the first gradient that waits for the second exchange."""


def client_app(
    model: Callable[[Context], nn.Module],
    data: Callable[[Context], Any],
    loss: Loss | None = None,
    mods: Sequence[Any] = (),
) -> ClientApp:
    """Make the Flower ClientApp.

    Args:
        model: returns the module. Only the shapes of its weights matter, because the server sends the weights.
        data: returns (inputs, targets) of this node, or a `Federation` of one client.
        loss: (output, target) -> scalar mean over the batch; None for cross-entropy.
        mods: Flower's modifiers, which wrap every exchange: functions of yours, and those of Flower that only look
            at messages. Other modifiers of Flower are refused by name when the server greets the node.

    Both functions receive Flower's Context; `context.node_config["partition-id"]` is the number of the client.
    """
    require_flower()
    from flwr.app import Message as Reply
    from flwr.clientapp import ClientApp

    app = ClientApp()
    mod_list, fault = list(mods), refused_mod(mods)

    def refuse(message: Message, context: Context) -> Message:
        assert fault is not None
        raise fault

    if fault is not None:  # raised in the first exchange, because the server sees no error in loading an app
        app.query("hello")(refuse)
        return app

    def answer(act: Callable[[LocalClient, Parcel], Parcel]) -> Any:
        def handle(message: Message, context: Context) -> Message:
            client = LocalClient.of(context, model, data, loss)
            return Reply(pack(act(client, unpack(message.content))), reply_to=message)

        return handle

    def pass_on(message: Message, context: Context) -> Message:
        return Reply(kept_gradient(context, int(unpack(message.content).facts["round"])), reply_to=message)

    app.query("hello", mods=mod_list)(answer(LocalClient.hello))
    app.query("gradient", mods=mod_list)(answer(LocalClient.gradient))
    app.train("steps", mods=mod_list)(answer(LocalClient.train))
    app.train("first", mods=mod_list)(pass_on)
    return app


def refused_mod(mods: Sequence[Any]) -> InputError | None:
    """Return the error for the first modifier of Flower that would not do what it says; None if there is none.

    Flower's modifiers for secure aggregation and differential privacy work on messages of its own strategies. They
    pass these messages on unchanged, or answer with an error.

    Examples:
        >>> refused_mod([print])
    """
    for mod in mods:
        function = mod.func if isinstance(mod, functools.partial) else mod
        kind = function if isinstance(function, type) or hasattr(function, "__name__") else type(function)
        if str(kind.__module__).split(".")[0] == "flwr" and kind.__name__ not in LOOKING_MODS:
            accepted = f"functions of yours, {' or '.join(LOOKING_MODS)}: {kind.__name__} does nothing or fails "
            accepted += "on these messages; there is no secure aggregation and no differential privacy here yet"
            return InputError("mods", kind.__name__, accepted)
    return None


def kept_gradient(context: Context, t: int) -> RecordDict:
    """Return the reply to the second exchange: the first gradient of round t, as it was kept in the first.

    This needs neither torch nor the settings.
    """
    stamp = context.state.config_records.get(WAITING)
    if stamp is None or (stamp["run"], stamp["round"]) != (str(context.run_id), t):
        raise FedagracError(f"this node has no first gradient of round {t + 1}")
    content = pack(Parcel({"client": stamp["client"], "round": t}))
    content.array_records[VECTORS]["first"] = context.state.array_records[WAITING + "-vector"]["first"]
    return content


def node_partition(context: Context) -> tuple[int, int]:
    """Return the number of this node's client and the number of all clients."""
    client = LocalClient.idle(context)
    return client.number, client.settings.clients


@dataclass(frozen=True, eq=False)
class LocalClient:
    """The client of a node, while it handles one message.

    Attributes:
        number: the number of the client, which is its partition id.
        settings: the settings of the federation.
        context: Flower's context.
        workload: the model and the data of this client; None if the message needs neither.
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
        """Make a client: build the model, load the data and check that they fit together."""
        from fedagrac.core.streams import first_weights
        from fedagrac.data.federation import Federation
        from fedagrac.engines import Workload
        from fedagrac.models.vector import VectorModel

        idle = cls.idle(context)
        settings = idle.settings
        local_data = data(context)
        federation = local_data if isinstance(local_data, Federation) else Federation.from_arrays([local_data])
        if federation.num_clients != 1:
            raise InputError("data", federation, "(inputs, targets) of this node, or a Federation of one client")
        with first_weights(settings.seed):  # what does not train is the same on every node
            vector_model = VectorModel(model(context), _device(context), settings.torch_dtype)
        workload = Workload.of(
            vector_model,
            federation,
            loss,
            settings.batch,
            settings.sampling,
            float(settings.weight_decay),
            settings.seed,
            np.array([idle.number]),
        )
        return cls(idle.number, settings, context, workload)

    @classmethod
    def idle(cls, context: Context) -> LocalClient:
        """Make a client from the settings alone, without model and data."""
        from fedagrac.flower.settings import Settings, partition_of

        settings = Settings.of(context.run_config)
        return cls(partition_of(context.node_config, settings.clients), settings, context, None)

    @property
    def work(self) -> Workload:
        """The model and the data."""
        assert self.workload is not None
        return self.workload

    def hello(self, ask: Parcel) -> Parcel:
        """Return the number of this client, its samples and its model.

        If the server sends x_1, the reply holds the full local gradient at x_1, too.
        """
        model = self.work.model
        if ask.facts.get("protocol") != PROTOCOL:
            raise FedagracError(f"the server uses protocol {ask.facts.get('protocol')}, this client {PROTOCOL}")
        facts = {
            "client": self.number,
            "samples": int(self.work.federation.sizes[0]),
            "model": fingerprint(model),
            "parameters": model.size,
            "dtype": str(model.dtype),
        }
        if self.settings.build_algorithm().traits.labels:
            facts |= self._labels()
        if model.buffers.names:  # message_size_mod of Flower fails on empty text
            facts["buffers"] = "\n".join(model.buffers.names)
        facts |= self._proof(ask)
        if "x" not in ask.vectors or ask.facts.get("model") != facts["model"]:
            return Parcel(facts)
        return Parcel(facts, self.gradient(ask).vectors)

    def _labels(self) -> dict[str, str]:
        """Return the classes of this client's samples, if targets are labels."""
        from fedagrac.data.describe import label_counts

        counts = label_counts(self.work.federation, np.zeros(1, np.int64))
        return {} if counts is None else {"labels": " ".join(map(str, np.flatnonzero(counts[0])))}

    def _proof(self, ask: Parcel) -> dict[str, str]:
        """Return this node's public key and its signature of a greeting, if the settings name keys."""
        if self.settings.keys is None:
            return {}
        nonce, context = str(ask.facts.get("nonce")), self.context
        greeting = Greeting(context.run_id, context.node_id, self.number, nonce)
        return sign(context.node_config.get("key"), greeting)

    def gradient(self, ask: Parcel) -> Parcel:
        """Return the local gradient at x, over all data or over the first batch of the round."""
        from fedagrac.engines import SerialEngine

        t = int(ask.facts["round"])
        kind = cast('Literal["full", "first"]', ask.facts["batch"])
        engine = SerialEngine(self.work)
        row = engine.gradients(self._place(ask, "x"), SELF, t, kind, self._buffers(ask))[0]
        return Parcel({"client": self.number, "round": t}, {"gradient": row.cpu()})

    def train(self, ask: Parcel) -> Parcel:
        """Run the local rule for the steps that the server planned, or until this client's time is over.

        Return the model, K_i, the training loss, and the gradients that the server asked for.
        """
        from fedagrac.core.local import Plan
        from fedagrac.engines import LanesEngine, SerialEngine

        t, x = int(ask.facts["round"]), self._place(ask, "x")
        correction = self._place(ask, "c")[None] if "c" in ask.vectors else None
        planned, mean = int(ask.facts["steps"]), bool(ask.facts["mean"])
        lr, mu = float(ask.facts["lr"]), float(ask.facts["mu"])
        parts: dict[str, Any] = {
            name: self._place(ask, name)[None]
            for name in ("start", "mask", "beside", "scale")
            if name in ask.vectors
        }
        if float(ask.facts.get("ascent", 0.0)):
            parts["ascent"] = np.array([float(ask.facts["ascent"])])
        parts |= {"buffers": self._buffers(ask), "anchored": bool(ask.facts.get("anchored", False))}
        local = self.settings.build_algorithm().local
        if "before" in ask.facts:
            names = slot_names(range(local.slots))
            parts["slots"] = tuple(self._place(ask, name)[None] for name in names)
            parts["before"] = np.array([int(ask.facts["before"])])

        def plan(steps: int, mean: bool) -> Plan:
            made = Plan.of([steps], lr, correction, mu, int(ask.facts["first"]), mean, local)
            return dataclasses.replace(made, **parts)

        if planned:
            chosen = plan(planned, mean)
            engine = LanesEngine(self.work) if self.settings.engine == "lanes" else SerialEngine(self.work)
            result, K = engine.run(chosen, x, SELF, t), planned
        else:
            # K is not known yet, so gradients are summed if a run of one step would need their sum
            sum_needed = mean and plan(1, mean).inexact(0, 1)
            result, K = self._run_until_time_is_over(lambda most: plan(most, sum_needed), x, t)
        sent = {"model": result.models[0]}
        if result.first is not None and planned:
            sent["first"] = result.first[0]
        if result.total is not None and plan(K, mean).accumulate:
            sent["total"] = result.total[0]
        if ask.facts.get("gradient", False):
            sent["gradient"] = SerialEngine(self.work).gradients(x, SELF, t, "full", self._buffers(ask))[0]
        if result.buffers is not None:
            sent["buffers"] = result.buffers[0]
        if "second" in ask.vectors:
            sent["second"] = self._second(plan(K, False), ask, x, t)
        sent |= {name: slot[0] for name, slot in zip(slot_names(result.slots), result.slots or (), strict=True)}
        if not planned:
            self._keep(t, None if result.first is None else result.first[0])
        facts = {"client": self.number, "round": t, "steps": K, "loss": float(result.loss[0])}
        return Parcel(facts, {name: vector.cpu() for name, vector in sent.items()})

    def _second(self, plan: Plan, ask: Parcel, x: torch.Tensor, t: int) -> torch.Tensor:
        """Train this client's second model for as many steps as its first. Return it."""
        from fedagrac.core.local import Second
        from fedagrac.engines import SerialEngine

        lr, mu = (np.array([float(ask.facts[name])]) for name in ("second-lr", "second-mu"))
        second = dataclasses.replace(plan, second=Second(self._place(ask, "second")[None], lr, mu)).of_second()
        return SerialEngine(self.work).run(second, x, SELF, t).models[0]

    def _run_until_time_is_over(self, plan: Callable[[int], Plan], x: torch.Tensor, t: int) -> tuple[Result, int]:
        """Run for the seconds or steps of the node config, or else for the seconds of the run.

        Return the result and K_i.
        """
        from fedagrac.engines import SerialEngine

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
        """Keep the first gradient of this round for the second exchange, and remove an earlier one."""
        from flwr.app import Array, ArrayRecord, ConfigRecord

        state = self.context.state
        for key in (WAITING, WAITING + "-vector"):
            state.pop(key, None)
        if first is not None:
            state[WAITING] = ConfigRecord({"run": str(self.context.run_id), "round": t, "client": self.number})
            state[WAITING + "-vector"] = ArrayRecord({"first": Array(first.cpu().numpy())})

    def _buffers(self, ask: Parcel) -> torch.Tensor | None:
        """Return the moving buffers of the parcel as one row; None if it has none."""
        model = self.work.model
        if "buffers" not in ask.vectors:
            return None
        return ask.vector("buffers", model.buffers.size, model.dtype).to(model.device)[None]

    def _place(self, ask: Parcel, name: str) -> torch.Tensor:
        """Return a vector of the parcel on the model's device."""
        model = self.work.model
        return ask.vector(name, model.size, model.dtype).to(model.device)


def _device(context: Context) -> torch.device:
    """Return the device in the node config, by default the CPU."""
    import torch

    name = context.node_config.get("device", "cpu")
    try:
        device = torch.device(str(name))
        torch.zeros(1, device=device)
    except (RuntimeError, AssertionError) as error:
        raise InputError("node config device", name, f"a usable device such as cpu or cuda ({error})") from error
    return device
