"""Compare two algorithms under unequal step counts, and plot them.

python examples/compare_two.py
"""

from pathlib import Path

import matplotlib.pyplot as plt

import fedagrac as fg


def main(rounds: int = 20, picture: str | Path = "compare_two.png") -> dict[str, fg.SimulationResult]:
    federation = fg.Federation.load("digits", clients=20, partition=fg.Dirichlet(0.3), seed=1)
    results = {}
    for algorithm in (fg.FedAvg(lr=0.1), fg.FedaGrac(lr=0.1)):
        results[algorithm.name] = fg.simulate(
            fg.models.build("logistic", features=64, classes=10),
            federation,
            algorithm,
            rounds=rounds,
            steps=fg.Gaussian(mean=20, variance=200),
        )

    figure, axes = plt.subplots()
    for name, result in results.items():
        history = result.history.to_pandas()
        axes.plot(history["round"], history["test_accuracy"], label=name)
        print(f"{name:10s} {result.history.last():.3f}, 90 % after {result.rounds_to(accuracy=0.9)} rounds")
    axes.set(xlabel="round", ylabel="test accuracy")
    axes.legend()
    figure.savefig(picture)
    plt.close(figure)
    return results


if __name__ == "__main__":
    main()
