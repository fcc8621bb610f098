"""Let the calibration rate grow over the rounds, as in the paper's "Increase" schedule.

python examples/calibration_schedule.py
"""

import fedagrac as fg


def main(rounds: int = 20) -> dict[str, fg.SimulationResult]:
    federation = fg.Federation.load("synthetic", clients=10, alpha=1.0, beta=1.0, seed=0)
    calibrations = {
        "constant 0.1": 0.1,
        "constant 1": 1.0,
        "increase": fg.schedule.Piecewise({0: 0.1, rounds // 4: 0.5, 3 * rounds // 4: 1.0}),
    }
    results = {}
    for name, calibration in calibrations.items():
        results[name] = fg.simulate(
            fg.models.build("logistic", features=60, classes=10),
            federation,
            fg.FedaGrac(lr=0.01, calibration=calibration),
            rounds=rounds,
            steps=fg.Uniform(1, 30, mode="random"),
            batch_size=10,
        )
        last = results[name].history[-1]
        print(f"{name:13s} test loss {last['test_loss']:.3f}, accuracy {last['test_accuracy']:.3f}")
    return results


if __name__ == "__main__":
    main()
