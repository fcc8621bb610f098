"""The same algorithms on a real federation, with Flower.

`server_app` makes a Flower ServerApp that runs the same round loop as a simulation. `client_app` makes a ClientApp
that runs the local rule on the client's data with this package's engines. Messages, nodes and failures are handled
here; algorithms and engines do not know of them. Importing this package does not import Flower; calling the two
functions does.
"""

from fedagrac.flower.client import client_app, node_partition
from fedagrac.flower.server import server_app

__all__ = ["client_app", "node_partition", "server_app"]
