"""The same algorithms on a real federation, carried by Flower.

`server_app` makes a Flower ServerApp whose rounds go through the same `plan` and `aggregate` as a simulation, and
`client_app` a ClientApp that runs the local rule on the client's own data with this package's engines. Messages,
nodes and failures live here; algorithms and engines know nothing of them. Importing this package does not import
Flower: the two functions do.
"""

from fedagrac.flower.client import client_app, node_partition
from fedagrac.flower.server import server_app

__all__ = ["client_app", "node_partition", "server_app"]
