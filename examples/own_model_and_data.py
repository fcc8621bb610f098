"""Bring your own model and data: a small network on four clients that hold different digits.

python examples/own_model_and_data.py
"""

import torch
from sklearn.datasets import load_digits

import fedagrac as fg


def main(rounds: int = 15) -> fg.SimulationResult:
    X, y = load_digits(return_X_y=True)
    X = (X / 16).astype("float32").reshape(-1, 1, 8, 8)
    train, test = slice(0, 1500), slice(1500, None)

    # any list of (inputs, targets) is a federation: here each client holds a few digits only
    holds = [[0, 1, 2], [3, 4], [5, 6, 7], [8, 9, 0]]
    clients = []
    for digits in holds:
        mine = torch.isin(torch.from_numpy(y[train]), torch.tensor(digits)).numpy()
        clients.append((X[train][mine], y[train][mine]))
    federation = fg.Federation.from_arrays(clients, test=(X[test], y[test]), name="four writers")

    # any nn.Module
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Conv2d(1, 16, 3, padding=1),
        torch.nn.GroupNorm(4, 16),
        torch.nn.ReLU(),
        torch.nn.MaxPool2d(2),
        torch.nn.Flatten(),
        torch.nn.Linear(16 * 4 * 4, 10),
    )
    result = fg.simulate(
        model,
        federation,
        fg.FedaGrac(lr=0.05, calibration=0.5),
        rounds=rounds,
        steps=fg.Explicit([[5, 10, 20, 40]]),  # the fourth client is eight times as fast as the first
        batch_size=16,
        metrics={"top3": top3},
    )
    for record in result.history[::5] + result.history[-1:]:
        print(f"round {record['round']:3d}: accuracy {record['test_accuracy']:.3f}, top 3 {record['top3']:.3f}")
    return result


def top3(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Share of samples whose label is among the three largest outputs."""
    return (output.topk(3).indices == target[:, None]).any(1).float().mean()


if __name__ == "__main__":
    main()
