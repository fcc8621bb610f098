"""Compares the theory with runs: FedAvg's floor on a9a, FedNova in an extreme case, best radii of two estimates.

python benchmarks/theory.py floor --json floor.json       a9a, 20 clients, increasingly unequal K
python benchmarks/theory.py extreme --json extreme.json   rounds to an error, with an increasingly fast client
python benchmarks/theory.py radii                         hybrid against average: which has the smaller best radius
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

import fedagrac as fg
from fedagrac.experiments.study import Errors, quadratic_at
from fedagrac.theory import Problem, bounds, constants, round_map
from fedagrac.theory.measure import minimise
from fedagrac.theory.quadratic import Quadratic, recommend

SPREADS = {
    "variance 0": fg.Gaussian(500, 0),
    "variance 100": fg.Gaussian(500, 100),
    "variance 10000": fg.Gaussian(500, 10_000),
    "one 100 x": fg.Extreme(100, 10_000),
}


def floor(rounds: int) -> list[dict[str, Any]]:
    """Return the excess of FedAvg and FedaGrac on a9a with weight decay, and Theorem 1's term, per spread of K."""
    fed = fg.Federation.load("a9a", clients=20, partition=fg.Dirichlet(0.3), seed=0)
    model = fg.models.build("logistic", features=123, classes=2)
    options: dict[str, Any] = {"weight_decay": 0.01, "batch_size": 20}
    problem = Problem(model, fed, **options)
    measured = constants(problem)
    assert measured.value is not None
    assert measured.optimum is not None
    assert measured.local_values is not None
    lowest = [local_minimum(model, fed, i, options) for i in range(fed.num_clients)]
    quadratic = quadratic_at(problem, measured.optimum)
    by_steps = Problem(model, fed, **options)
    rows = []
    for name, steps in SPREADS.items():
        K = steps.counts(0, fed.num_clients, 0)
        by_steps.weights = torch.from_numpy(fed.weights * K / (fed.weights @ K))
        small_steps = minimise(by_steps)  # FedAvg's limit as eta -> 0, the minimiser of sum_i omega_i K_i F_i
        algorithms = [fg.FedAvg(lr=0.005), fg.FedaGrac(lr=0.005)]
        errors = [Errors(problem, measured.value, 5) for _ in algorithms]
        begun = time.perf_counter()
        fg.simulate_many(
            model,
            fed,
            algorithms,
            rounds=rounds,
            steps=steps,
            callbacks=[[e] for e in errors],
            eval_every=rounds,
            **options,
        )
        tail = len(errors[0].values) // 5
        limit = round_map(fg.FedAvg(lr=0.005), quadratic, K).fixed_point
        rows.append(
            {
                "K": name, "Kbar": float(fed.weights @ K), "Kmin": int(K.min()), "Kmax": int(K.max()),
                "theorem1": bounds.theorem1(fed.weights, K, measured.local_values, L=measured.L).total,
                "theorem1_above_minima": bounds.theorem1(
                    fed.weights, K, measured.local_values - np.array(lowest), L=measured.L
                ).total,
                "fedavg": float(np.mean(errors[0].values[-tail:])),
                "fedavg_small_steps": problem.total(small_steps) - measured.value,
                "fedavg_quadratic_model": problem.total(torch.from_numpy(limit)) - measured.value,
                "fedagrac": float(np.mean(errors[1].values[-tail:])),
                "rounds": errors[0].rounds, "fedavg_curve": errors[0].values, "fedagrac_curve": errors[1].values,
                "seconds": time.perf_counter() - begun,
            }
        )  # fmt: skip
        print(
            {key: value for key, value in rows[-1].items() if "curve" not in key and key != "rounds"}, flush=True
        )
    return rows


def local_minimum(model: torch.nn.Module, fed: fg.Federation, client: int, options: dict[str, Any]) -> float:
    """Return the smallest value of a client's F_i."""
    samples = fed.samples_of(client)
    alone = fg.Federation.from_arrays([(fed.inputs[samples], fed.targets[samples])])
    problem = Problem(model, alone, **options)
    return problem.total(minimise(problem))


def extreme(rounds: int) -> list[dict[str, Any]]:
    """Return the rounds to fractions of the initial excess at the best eta of a grid, for several fast clients."""
    rng = np.random.default_rng(0)
    clients, d, n = 10, 10, 60
    data = []
    for _ in range(clients):
        X = rng.normal(size=(n, d))
        data.append((X, X @ (rng.normal(size=d) + 1.0) + rng.normal(size=n)))
    fed = fg.Federation.from_arrays(data)

    def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return 0.5 * ((output.squeeze(-1) - target) ** 2).mean()

    model = torch.nn.Linear(d, 1, bias=False, dtype=torch.float64)
    torch.nn.init.zeros_(model.weight)
    rows = []
    for batch in (None, 5):
        options: dict[str, Any] = {"loss": loss, "batch_size": batch}
        problem = Problem(model, fed, **options)
        measured = constants(problem, convex=True)
        assert measured.value is not None
        for fast in (1, 10, 100, 1000):
            K = bounds.extreme_steps(clients, fast)
            row: dict[str, Any] = {
                "batch": batch,
                "fast": fast,
                "Kbar": float(np.mean(K)),
                "condition": bounds.fednova_condition(K),
            }
            for kind in (fg.FedNova, fg.FedaGrac, fg.FedAvg):
                grid = [kind(lr=float(lr)) for lr in np.geomspace(1e-4, 1.0, 17)]
                errors = [Errors(problem, measured.value) for _ in grid]
                fg.simulate_many(
                    model, fed, grid, rounds=rounds, steps=fg.Explicit([list(map(int, K))]),
                    callbacks=[[e] for e in errors], eval_every=rounds, engine="lanes", **options,
                )  # fmt: skip
                for fraction in (1e-2, 1e-3, 1e-4):
                    target = fraction * measured.gap
                    reached = [
                        (next((t for t, v in zip(e.rounds, e.values, strict=True) if v <= target), None), a.lr)
                        for e, a in zip(errors, grid, strict=True)
                    ]
                    row[f"{kind.__name__} {fraction:g}"] = min(
                        ((t, lr) for t, lr in reached if t is not None), default=(None, None)
                    )
            rows.append(row)
            print(row, flush=True)
    return rows


RADII: dict[tuple[int, int], dict[str, Any]] = {  # clients and d: how K is drawn
    (8, 4): {
        "Gaussian": lambda rng: np.maximum(1, np.rint(rng.normal(20, 8, 8))).astype(int),
        "linear": lambda rng: 2 + 5 * np.arange(8),
        "one fast": lambda rng: np.array([2] * 7 + [100]),
    },
    (10, 2): {
        "Gaussian": lambda rng: np.maximum(1, np.rint(rng.normal(100, 40, 10))).astype(int),
        "linear": lambda rng: 10 + 30 * np.arange(10),
        "one fast": lambda rng: np.array([5] * 9 + [500]),
    },
}
SPREADS_OF_INPUTS = {"alike": (1.0, 1.0), "scaled": (0.5, 1.5)}
"""Each client's inputs are Normal(0, 1) times a factor per coordinate from this range."""


def radii(problems: int) -> list[dict[str, Any]]:
    """Return in how many random problems FedaGrac's hybrid form has a smaller best radius than FedaGrac-avg."""
    rows = []
    for (clients, d), patterns in RADII.items():
        for inputs, (low, high) in SPREADS_OF_INPUTS.items():
            for pattern, draw in patterns.items():
                smaller, ratios = 0, []
                for seed in range(problems):
                    rng = np.random.default_rng(seed)
                    quadratic = least_squares(rng, clients, d, low, high)
                    K = draw(rng)
                    hybrid, average = (
                        recommend(
                            quadratic, K, fg.FedaGrac(lr=1.0, transmit=form), calibrations=[1.0]
                        ).spectral_radius
                        for form in ("hybrid", "average")
                    )
                    smaller += hybrid < average * (1 - 1e-6)
                    ratios.append(hybrid / average)
                rows.append(
                    {
                        "clients": clients, "d": d, "inputs": inputs, "K": pattern, "smaller": smaller,
                        "problems": problems, "median ratio": float(np.median(ratios)),
                    }
                )  # fmt: skip
                print(rows[-1], flush=True)
    return rows


def least_squares(rng: np.random.Generator, clients: int, d: int, low: float, high: float) -> Quadratic:
    """Return a problem whose clients hold 20 samples each and have minimisers of their own."""
    hessians, linear = [], []
    for _ in range(clients):
        X = rng.normal(size=(20, d)) * rng.uniform(low, high, size=d)
        y = X @ rng.normal(size=d) + 0.3 * rng.normal(size=20)
        hessians.append(X.T @ X / 20)
        linear.append(X.T @ y / 20)
    return Quadratic(np.array(hessians), np.array(linear), np.full(clients, 1 / clients))


def main() -> None:
    """Run one of the comparisons."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["floor", "extreme", "radii"])
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--json", type=Path)
    o = parser.parse_args()
    if o.what == "radii":
        rows = radii(problems=12)
    else:
        rows = floor(o.rounds or 300) if o.what == "floor" else extreme(o.rounds or 300)
    if o.json:
        o.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
