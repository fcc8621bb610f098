"""The same algorithms on a real federation, with Flower.

`server_app` makes a Flower ServerApp that runs the same round loop as a simulation. `client_app` makes a ClientApp
that runs the local rule on the client's data with this package's engines. Messages, nodes and failures are handled
here; algorithms and engines do not know of them. Importing this package does not import Flower; calling the two
functions does. The first use of a name imports its module, so that a client does not import the server.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fedagrac.flower.client import client_app, node_partition
    from fedagrac.flower.server import server_app

__all__ = ["client_app", "node_partition", "server_app"]

_HOMES = {"client_app": "client", "node_partition": "client", "server_app": "server"}

if not TYPE_CHECKING:  # type checkers know the names above, and no others

    def __getattr__(name: str) -> Any:
        """Import what a name stands for when it is first used, and return it."""
        if name not in _HOMES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
