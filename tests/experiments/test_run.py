"""An experiment makes one model, one workload and one engine for all its algorithms."""

import pytest
import torch

import fedagrac as fg
from fedagrac.algorithms import REGISTRY
from fedagrac.engines import LanesEngine, SerialEngine, Workload
from fedagrac.experiments.run import prepare, run_experiment
from fedagrac.experiments.schema import Experiment
from fedagrac.heterogeneity import Clock
from fedagrac.models import VectorModel
from fedagrac.rounds.stop import Stop

TABLE = {
    "name": "small",
    "rounds": 2,
    "lr": 0.1,
    "data": {"clients": 4, "partition": {"kind": "dirichlet", "alpha": 0.3}, "batch_size": 5},
    "steps": {"kind": "linear", "first": 1, "increment": 2},
    "algorithm": [{"name": name} for name in sorted(REGISTRY)],
    "clock": {"step_time": 0.1},
    "stop": {"accuracy": 0.999},
}


@pytest.fixture
def made(monkeypatch):
    """Return how often objects of each class are made, by the name of the class."""
    counts = {}

    def count(kind, method):
        counts[kind.__name__] = 0
        original = getattr(kind, method)

        def counting(*arguments, **options):
            counts[kind.__name__] += 1
            return original(*arguments, **options)

        monkeypatch.setattr(kind, method, counting)

    for kind in (VectorModel, LanesEngine, SerialEngine, Clock, Stop):
        count(kind, "__init__")
    count(Workload, "of")
    count(fg.Federation, "load")
    return counts


@pytest.mark.parametrize("side_by_side", [False, True])
def test_all_algorithms_share_model_workload_and_engine(side_by_side, made, tmp_path):
    experiment = Experiment.of({**TABLE, "engine": "lanes", "compile": False})
    made.update(Clock=0, Stop=0)  # checking an experiment builds them once
    folders = run_experiment(prepare(experiment), tmp_path / "out", side_by_side=side_by_side)
    assert len(folders) == len(REGISTRY)
    assert (made["Federation"], made["VectorModel"], made["Workload"], made["LanesEngine"]) == (1, 1, 1, 1)
    assert made["SerialEngine"] == 1  # lanes run the last client with it
    assert (made["Clock"], made["Stop"]) == (1, 1)


def test_runs_that_share_a_fleet_have_the_numbers_of_runs_alone(tmp_path):
    prepared = prepare(Experiment.of({**TABLE, "engine": "lanes", "compile": False}))
    run_experiment(prepared, tmp_path / "out")
    from safetensors.torch import load_file

    options = prepared.options()
    for entry in prepared.entries:
        alone = fg.simulate(prepared.module, prepared.federation, entry.algorithm, **options)
        stored = load_file(tmp_path / "out" / entry.folder / "model.safetensors")
        for name, values in alone.params.items():
            assert torch.equal(values, stored[name]), entry.label


def test_an_algorithm_that_does_not_fit_the_model_is_refused_before_any_run():
    experiment = Experiment.of(
        {**TABLE, "algorithm": [{"name": "fedavg"}, {"name": "fedper", "personal": ["head"]}]}
    )
    with pytest.raises(fg.InputError, match=r"algorithm\[1\]\.personal = 'head': expected names of parameters"):
        prepare(experiment)
