"""Run guarded, diverging and robust simulations in each process of a sharded test; every rank writes results."""

import json
import sys
from pathlib import Path

import torch

import fedagrac as fg
from fedagrac.engines import SerialEngine
from fedagrac.engines.ranks import leave_ranks, start_ranks
from quadratics import Quadratics, quadratics


class FarAway(SerialEngine):
    """Spoils one model a round: NaN from client 4 in round 2, a far too large one from client 1 otherwise."""

    def run(self, plan, x, clients, round):
        result = super().run(plan, x, clients, round)
        result.models[clients == (4 if round == 1 else 1)] *= torch.nan if round == 1 else 1e4
        return result


def outcome():
    """Return the dropped clients, the final model, and the reasons given for two divergences."""
    q = quadratics()
    guarded = q.simulate(fg.FedaGrac(lr=0.01), rounds=4, engine=FarAway, guard=fg.Guard())
    lost = Quadratics([A * s for A, s in zip(q.A, [1, 1e5, 1, 1e3, 1e3, 1], strict=True)], q.b)
    steps = fg.Constant(90)
    by_all = q.simulate(fg.FedAvg(lr=1e3), rounds=90)
    by_some = lost.simulate(fg.FedAvg(lr=0.01), rounds=3, steps=steps)
    rules = [fg.Median(), fg.TrimmedMean(share=0.2), fg.NormBounded()]
    robust = [
        q.simulate(fg.algorithm(name, lr=0.01), rounds=3, participation=cohort, aggregate=rule)
        for rule in rules
        for name in ("fednova", "fedagrac")
        for cohort in (None, 4)
    ]
    return {
        "robust": [result.vector.tolist() for result in robust],
        "dropped": guarded.history.column("dropped"),
        "x": guarded.vector.tolist(),
        "reasons": [by_all.reason, by_some.reason],
    }


if __name__ == "__main__":
    torch.set_num_threads(1)
    ranks = start_ranks()
    Path(f"{sys.argv[1]}.{ranks.rank}").write_text(json.dumps(outcome()))
    leave_ranks()
