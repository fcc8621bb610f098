"""The smallest models of digits on which every algorithm is itself.

On logistic regression FedBN is FedAvg, HeteroFL has no hidden layer to narrow, and all of FedPer's model is
personal. These algorithms get a hidden layer, FedBN with BatchNorm. Units whose weights are 0 have the output 1/2,
so without its mask a narrow client would train what it does not hold.
"""

import torch
from torch import nn

import fedagrac as fg

LAYERED = ("ditto", "fedbn", "fedper", "heterofl")


def module_for(name):
    """Return a model for an algorithm; its weights are always the same."""
    if name not in LAYERED:
        return fg.models.build("logistic", features=64, classes=10)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        norm = [nn.BatchNorm1d(8)] if name == "fedbn" else []
        return nn.Sequential(nn.Flatten(), nn.Linear(64, 8), *norm, nn.Sigmoid(), nn.Linear(8, 10))
