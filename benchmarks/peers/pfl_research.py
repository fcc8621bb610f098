"""Time per client-step of pfl-research on its own public CIFAR-10 workload, in one process on the CPU.

    python benchmarks/peers/pfl_research.py [--rounds 4] [--users 1000] [--cohort 50]

Runs in a virtual environment with requirements-pfl.txt installed (run.py makes it). Prints one line of JSON.
"""

import os
import time


def main():
    begun = time.perf_counter()
    os.environ["PFL_PYTORCH_DEVICE"] = "cpu"
    import workload  # imports are in here because they are part of the time to start

    chosen = workload.options("pfl-research on its public CIFAR-10 workload")
    stdout = workload.divert_stdout()

    import numpy as np
    import pfl
    import torch
    from pfl.aggregate.simulate import SimulatedBackend
    from pfl.aggregate.weighting import WeightByDatapoints
    from pfl.algorithm.base import NNAlgorithmParams
    from pfl.algorithm.federated_averaging import FederatedAveraging
    from pfl.callback.base import TrainingProcessCallback
    from pfl.data.federated_dataset import FederatedDataset
    from pfl.data.sampling import get_user_sampler
    from pfl.hyperparam.base import NNEvalHyperParams, NNTrainHyperParams
    from pfl.metrics import Metrics
    from pfl.model.pytorch import PyTorchModel

    class Classifier(torch.nn.Module):
        """The network with the two methods pfl calls; counts its training steps."""

        def __init__(self):
            super().__init__()
            self.network = workload.network()
            self.steps = 0

        def loss(self, images, labels):
            self.steps += 1
            self.train()
            return torch.nn.functional.cross_entropy(self.network(images), labels)

        def metrics(self, images, labels):
            return {}  # pfl always evaluates in its first round: not timed, and here not computed either

    class Clock(TrainingProcessCallback):
        """When training began and when each round ended, and the steps made until then."""

        def __init__(self, module):
            self.module, self.times, self.steps = module, [], [0]

        def on_train_begin(self, *, model):
            self.times.append(time.perf_counter())
            return Metrics()

        def after_central_iteration(self, aggregate_metrics, model, *, central_iteration):
            self.times.append(time.perf_counter())
            self.steps.append(self.module.steps)
            return False, Metrics()

    torch.set_num_threads(chosen.cores)
    torch.manual_seed(0)
    np.random.seed(0)  # pfl draws users from NumPy's global generator

    images, labels = workload.pool(chosen.users)
    images = workload.normalise(images, chosen.channels_last)
    users = list(zip(images.split(workload.SAMPLES), labels.split(workload.SAMPLES), strict=True))
    federation = FederatedDataset.from_slices(users, get_user_sampler("random", range(chosen.users)))

    module = Classifier()
    model = PyTorchModel(
        model=module,
        local_optimizer_create=torch.optim.SGD,
        central_optimizer=torch.optim.SGD(module.parameters(), lr=1.0),
    )
    clock = Clock(module)
    FederatedAveraging().run(
        algorithm_params=NNAlgorithmParams(
            central_num_iterations=chosen.rounds,
            evaluation_frequency=chosen.rounds,
            train_cohort_size=chosen.cohort,
            val_cohort_size=None,
        ),
        backend=SimulatedBackend(federation, federation, postprocessors=[WeightByDatapoints()]),
        model=model,
        model_train_params=NNTrainHyperParams(
            local_batch_size=workload.BATCH, local_num_epochs=1, local_learning_rate=workload.LR
        ),
        model_eval_params=NNEvalHyperParams(local_batch_size=None),
        callbacks=[clock],
        send_metrics_to_platform=False,
    )
    workload.report(
        stdout,
        chosen,
        peer="pfl-research",
        version=pfl.__version__,
        threads=torch.get_num_threads(),
        start=clock.times[0] - begun,
        rounds=np.diff(clock.times).tolist(),
        steps=np.diff(clock.steps).tolist(),
    )


if __name__ == "__main__":
    main()
