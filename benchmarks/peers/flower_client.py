"""What one of Flower's clients does, inside a Ray actor: five SGD steps on its own images."""

import functools

import torch
import workload


@functools.cache
def module():
    """The actor's module, built once: a client only loads its weights."""
    return workload.network()


def train(state, *, user, users, threads, channels_last, **_):
    """One local epoch from `state`; the new state, the SGD steps made, the threads used."""
    torch.set_num_threads(threads)
    model = module()
    model.load_state_dict(state)
    model.train()
    optimiser = torch.optim.SGD(model.parameters(), lr=workload.LR)
    images, labels = workload.pool(users)
    own = slice(user * workload.SAMPLES, (user + 1) * workload.SAMPLES)
    batches = workload.normalise(images[own], channels_last).split(workload.BATCH)
    steps = 0
    for inputs, targets in zip(batches, labels[own].split(workload.BATCH), strict=True):
        optimiser.zero_grad()
        torch.nn.functional.cross_entropy(model(inputs), targets).backward()
        optimiser.step()
        steps += 1
    return model.state_dict(), steps, torch.get_num_threads()
