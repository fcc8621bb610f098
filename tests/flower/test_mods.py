"""Flower's modifiers: those that would not do what they say are refused by name."""

import functools

import numpy as np
import pytest

import fedagrac as fg

pytest.importorskip("flwr", reason="the extra fedagrac[flower] is not installed")

import flwr.client.mod
import flwr.clientapp.mod
from flwr.app import Context, Message, RecordDict

from fedagrac.flower import client_app
from fedagrac.flower.wire import PROTOCOL, Parcel, pack

HARMLESS = ["arrays_size_mod", "message_size_mod"]
PROMISING = [
    *(getattr(flwr.client.mod, name) for name in ("secagg_mod", "secaggplus_mod")),
    *(
        getattr(package, name)
        for package in (flwr.client.mod, flwr.clientapp.mod)
        for name in ("fixedclipping_mod", "adaptiveclipping_mod")
    ),
    flwr.client.mod.LocalDpMod(1.0, 1.0, 1.0, 1e-5),
    flwr.clientapp.mod.LocalDpMod(1.0, 1.0, 1.0, 1e-5),
    functools.partial(flwr.client.mod.secaggplus_mod),
]


@pytest.fixture(autouse=True)
def _a_task(monkeypatch):
    """Enter a Flower task, inside which messages must be made."""
    from flwr.supercore.task_identity import TaskIdentity

    for name, value in (("_run_id", 1), ("_node_id", 1), ("_task_id", 1)):
        monkeypatch.setattr(TaskIdentity, name, value)


def greet(mods):
    """Greet a client that has modifiers. Return the facts of its reply."""
    app = client_app(
        lambda context: fg.models.build("logistic", features=4, classes=2),
        lambda context: (np.ones((3, 4), np.float32), np.array([0, 1, 0])),
        mods=mods,
    )
    config = {"clients": 1, "algorithm.name": "fedavg", "algorithm.lr": 0.1}
    ask = Message(pack(Parcel({"protocol": PROTOCOL})), dst_node_id=2, message_type="query.hello", group_id="1")
    ask.metadata.__dict__["_message_id"] = "m"
    return app(ask, Context(1, 2, {"partition-id": 0}, RecordDict(), config)).content["facts"]


@pytest.mark.parametrize("mod", PROMISING)
def test_a_modifier_that_would_protect_nothing_is_refused_by_name(mod):
    kind = getattr(mod, "func", mod)
    name = getattr(kind, "__name__", type(kind).__name__)
    with pytest.raises(fg.InputError, match=f"mods = '{name}': .*no secure aggregation"):
        greet([lambda message, context, call_next: call_next(message, context), mod])


def test_modifiers_that_only_look_and_functions_of_the_app_stay(caplog):
    seen = []

    def own(message, context, call_next):
        seen.append(message.metadata.message_type)
        return call_next(message, context)

    facts = greet([own, *(getattr(flwr.clientapp.mod, name) for name in HARMLESS)])
    assert (facts["client"], facts["samples"], seen) == (0, 3, ["query.hello"])


def test_every_modifier_of_this_flower_is_either_refused_or_known_to_be_harmless():
    """A new version of Flower may bring modifiers that nobody has looked at."""
    names = {name for package in (flwr.client.mod, flwr.clientapp.mod) for name in package.__all__}
    tested = {getattr(getattr(mod, "func", mod), "__name__", type(mod).__name__) for mod in PROMISING}
    assert names == {*tested, *HARMLESS, "make_ffn"}
