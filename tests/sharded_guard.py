"""What each process of a sharded test runs: guarded, and diverging; every rank writes what it knows."""

import json
import sys
from pathlib import Path

import torch

import fedagrac as fg
from fedagrac.engines import SerialEngine
from fedagrac.engines.ranks import leave_ranks, start_ranks
from quadratics import Quadratics, quadratics


class FarAway(SerialEngine):
    """In rounds 1 and 3 client 1 comes back from far away, and in round 2 client 4 from nowhere."""

    def run(self, plan, x, clients, round):
        result = super().run(plan, x, clients, round)
        result.models[clients == (4 if round == 1 else 1)] *= torch.nan if round == 1 else 1e4
        return result


def found():
    """Return who is dropped and the final model, and how two runs diverge: by clients, and by one alone."""
    q = quadratics()
    guarded = q.simulate(fg.FedaGrac(lr=0.01), rounds=4, engine=FarAway, guard=fg.Guard())
    lost = Quadratics([A * s for A, s in zip(q.A, [1, 1e5, 1, 1e3, 1e3, 1], strict=True)], q.b)
    steps = fg.Constant(90)
    ways = [q.simulate(fg.FedAvg(lr=1e3), rounds=90), lost.simulate(fg.FedAvg(lr=0.01), rounds=3, steps=steps)]
    dropped = guarded.history.column("dropped")
    return {"dropped": dropped, "x": guarded.vector.tolist(), "reasons": [way.reason for way in ways]}


if __name__ == "__main__":
    torch.set_num_threads(1)
    ranks = start_ranks()
    Path(f"{sys.argv[1]}.{ranks.rank}").write_text(json.dumps(found()))
    leave_ranks()
