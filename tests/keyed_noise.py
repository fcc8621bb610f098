"""An algorithm that draws from the keyed streams of its cohort, and moves fewer bytes than vectors."""

from dataclasses import dataclass

import numpy as np
import torch

import fedagrac as fg
from fedagrac.core.streams import Purpose, stream


@dataclass(frozen=True)
class Noisy(fg.Stateless):
    """x = r + sum_i omega_i (x_i + r_i), where the eta of a client is uniform in [eta / 2, eta]."""

    scale: float = 0.01
    name = "noisy"

    def plan(self, state, rows, cohort):
        halves = np.array([cohort.generator(client, number=1).random() / 2 for client in cohort.clients])
        return fg.Plan.of(cohort.steps, self.lr * (0.5 + halves))

    def aggregate(self, state, rows, cohort, plan, result):
        models = result.models.clone()
        for row, client in enumerate(cohort.clients):
            models[row] += self.scale * torch.from_numpy(cohort.generator(client).normal(size=models.shape[1]))
        noise = torch.from_numpy(cohort.generator().normal(size=models.shape[1]))
        return {"x": (cohort.sum(cohort.weights, models) + self.scale * noise).to(state["x"].dtype)}, {}

    def cost(self, cohort):
        return fg.Cost.of(cohort, down=1, up_bytes=7 + cohort.clients, step_work=0.25)


def noisy_rounds(q, cohorts, steps, lr, scale, seed):
    """Return x after each round of Noisy on least squares with full batches, in NumPy."""
    x, d = q.start(), len(q.start())
    for t, clients in enumerate(cohorts):
        total = np.zeros(d)
        sizes = np.array([len(q.b[i]) for i in clients])
        for i, weight in zip(clients, sizes / sizes.sum(), strict=True):
            x_i = x
            eta = lr * (0.5 + stream(seed, Purpose.MEMBER, t, i, 1).random() / 2)
            for _ in range(steps[i]):
                x_i = x_i - eta * q.gradient(i, x_i)
            total += weight * (x_i + scale * stream(seed, Purpose.MEMBER, t, i).normal(size=d))
        x = total + scale * stream(seed, Purpose.ROUND, t).normal(size=d)
        yield x
