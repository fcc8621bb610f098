"""Heterogeneous least-squares clients, whose gradients and minimisers are known in closed form."""

from dataclasses import dataclass

import numpy as np
import torch

import fedagrac as fg

K = [2, 3, 5, 8, 13, 40]
SIZES = [12, 30, 18, 55, 24, 41]
D = 5


def half_square(output, target):
    return 0.5 * ((output.squeeze(-1) - target) ** 2).mean()


@dataclass
class Quadratics:
    """F_i(x) = |A_i x - b_i|^2 / (2 n_i), F = sum_i omega_i F_i."""

    A: list
    b: list

    @property
    def omega(self):
        sizes = np.array([len(b) for b in self.b])
        return sizes / sizes.sum()

    def gradient(self, i, x):
        return self.A[i].T @ (self.A[i] @ x - self.b[i]) / len(self.b[i])

    def hessian(self, i):
        return self.A[i].T @ self.A[i] / len(self.b[i])

    def local_minimiser(self, i):
        return np.linalg.lstsq(self.A[i], self.b[i], rcond=None)[0]

    def minimiser(self):
        H = sum(w * self.hessian(i) for i, w in enumerate(self.omega))
        r = sum(w * self.A[i].T @ self.b[i] / len(self.b[i]) for i, w in enumerate(self.omega))
        return np.linalg.solve(H, r)

    def federation(self, weights=None, order=None):
        order = range(len(self.b)) if order is None else order
        return fg.Federation.from_arrays([(self.A[i], self.b[i]) for i in order], weights=weights)

    def start(self):
        return np.linspace(-1.0, 2.0, self.A[0].shape[1])

    def module(self, dtype=torch.float64):
        module = torch.nn.Linear(self.A[0].shape[1], 1, bias=False, dtype=dtype)
        with torch.no_grad():
            module.weight.copy_(torch.from_numpy(self.start())[None])
        return module

    def simulate(self, algorithm, rounds=5, steps=None, **options):
        federation = options.pop("federation", None) or self.federation()
        module = options.pop("module", None) or self.module()
        return fg.simulate(
            module,
            federation,
            algorithm,
            rounds=rounds,
            steps=steps or fg.Explicit([K]),
            batch_size=None,
            loss=half_square,
            device="cpu",
            **options,
        )


def quadratics(seed=0, sizes=SIZES, d=D):
    rng = np.random.default_rng(seed)
    A = [rng.normal(size=(n, d)) * rng.uniform(0.7, 1.3, d) for n in sizes]
    b = [a @ rng.normal(0, 3, d) + rng.normal(0, 0.5, len(a)) for a in A]
    return Quadratics(A, b)


def cohorts(participation, rounds):
    """Return the clients of every round, as a simulation with seed 0 draws them."""
    if participation is None:
        return [list(range(len(K)))] * rounds
    drawn = fg.Participation(participation)
    return [drawn.draw(t, np.array(SIZES) / sum(SIZES), 0)[0].tolist() for t in range(rounds)]


class Trace(fg.Callback):
    """Keeps the global model after every round."""

    def __init__(self):
        self.x = []

    def on_round(self, run, record):
        self.x.append(run.state["x"].detach().cpu().numpy().copy())
