"""The public pfl-research CIFAR-10 workload as every peer runs it: data, model, options, the line printed.

Imported inside the peers' own virtual environments: standard library, torch and NumPy only, nothing of fedagrac.
The model is `pfl_cnn` of fedagrac.experiments.bench.cases. A figure is the fastest round, the first left out.
"""

import argparse
import functools
import json
import os

import numpy as np
import torch
from torch import nn

SAMPLES, BATCH, LR = 50, 10, 0.1  # of one user: one epoch of 50 images in batches of 10
STEPS = SAMPLES // BATCH
PARAMETERS = 1_626_442
MEAN, STD = (0.4914, 0.4822, 0.4465), (0.2023, 0.1994, 0.2010)


def options(description, *more):
    """What the command line asked for; `more` are options of one peer, each as (name, settings)."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--rounds", type=int, default=4, help="the first is not timed (default: 4)")
    parser.add_argument("--users", type=int, default=1000)
    parser.add_argument("--cohort", type=int, default=50)
    parser.add_argument("--cores", type=int, default=2, help="in all, whatever the peer divides them into")
    parser.add_argument("--channels-last", action="store_true", help="images in memory as height, width, channel")
    for name, settings in more:
        parser.add_argument(name, **settings)
    chosen = parser.parse_args()
    if chosen.rounds < 2:
        parser.error("--rounds must be at least 2: the first round is not timed")
    if not 1 <= chosen.cohort <= chosen.users:
        parser.error(f"--cohort must be between 1 and --users ({chosen.users}), not {chosen.cohort}")
    return chosen


def network():
    """The CNN, with the number of parameters checked."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 32, 3), nn.ReLU(), nn.Conv2d(32, 64, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Dropout(0.25),
        nn.Flatten(), nn.Linear(64 * 14 * 14, 128), nn.ReLU(), nn.Dropout(0.5), nn.Linear(128, 10),
    )  # fmt: skip
    found = sum(parameter.numel() for parameter in model.parameters())
    if found != PARAMETERS:
        raise AssertionError(f"the model has {found:,} parameters, the public workload's has {PARAMETERS:,}")
    return model


@functools.cache
def pool(users):
    """Random images, as bytes, and labels of all users; user i owns rows 50 i to 50 i + 49. Once per process."""
    rng = np.random.default_rng(0)
    images = rng.integers(0, 256, (users * SAMPLES, 3, 32, 32), dtype=np.uint8)
    return torch.from_numpy(images), torch.from_numpy(rng.integers(0, 10, users * SAMPLES))


def normalise(images, channels_last=False):
    """Bytes to normalised float32, laid out in memory as asked."""
    layout = torch.channels_last if channels_last else torch.contiguous_format
    mean, std = (torch.tensor(values).view(3, 1, 1) for values in (MEAN, STD))
    return images.to(torch.float32, memory_format=layout).div_(255).sub_(mean).div_(std)


def divert_stdout():
    """Send whatever a peer or its children print to stderr; the stream returned is the real stdout."""
    stdout = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    return stdout


def report(stdout, chosen, *, start, rounds, steps, **facts):
    """Print the one line of JSON.

    Args:
        stdout: Where to, from `divert_stdout`.
        chosen: The command line's options.
        start: Seconds from the start of the script to the start of the first round.
        rounds: Seconds of every round, the first included.
        steps: SGD steps counted in every round.
        facts: The peer's name, version and threads.
    """
    expected = [chosen.cohort * STEPS] * chosen.rounds
    if list(steps) != expected:
        raise AssertionError(f"SGD steps counted in each round: {steps}, not {expected}")
    line = {
        **facts,
        "torch": torch.__version__,
        "us_per_client_step": round(min(rounds[1:]) / steps[-1] * 1e6, 1),
        "rounds_s": [round(seconds, 4) for seconds in rounds[1:]],
        "first_round_s": round(rounds[0], 4),
        "start_s": round(start, 4),
        "client_steps_per_round": steps[-1],
        "users": chosen.users,
        "cohort": chosen.cohort,
        "parameters": PARAMETERS,
        "channels_last": chosen.channels_last,
    }
    print(json.dumps(line), file=stdout, flush=True)
