"""What a live federation refuses by name, with the reason."""

import pytest

import fedagrac as fg
from fedagrac.experiments.schema import Experiment, default_table

settings = pytest.importorskip("fedagrac.flower.settings")

BASE = {"clients": 3, "algorithm.name": "fedagrac", "algorithm.lr": 0.1}


def test_cyclic_sampling_runs_in_experiments_and_is_refused_on_flower():
    table = default_table()
    table["data"] = {**table["data"], "sampling": "cyclic"}
    assert Experiment.of(table).data.sampling == "cyclic"
    with pytest.raises(
        fg.InputError, match=r'sampling = .cyclic.*"replacement" or "shuffle".*clients keep nothing'
    ):
        settings.Settings.of({**BASE, "sampling": "cyclic"})


def test_first_gradients_to_the_end_of_a_pass_need_steps_that_the_server_plans():
    first = {**BASE, "algorithm.first_steps": "pass"}
    assert settings.Settings.of(first).build_algorithm().first_steps == "pass"
    with pytest.raises(fg.InputError, match=r"algorithm.first_steps = .pass.*which clients choose"):
        settings.Settings.of({**first, "steps.kind": "client"})
