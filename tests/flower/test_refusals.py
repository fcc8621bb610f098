"""What a live federation refuses by name, with the reason."""

import pytest

import fedagrac as fg
from fedagrac.experiments.schema import Experiment, default_table
from fedagrac.models.vector import VectorModel

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


def test_a_step_size_that_becomes_zero_is_refused_before_the_federation_starts(tmp_path):
    from fedagrac.flower.server import run_federation

    cosine = {"algorithm.lr.kind": "cosine", "algorithm.lr.first": 0.1, "algorithm.lr.rounds": 2}
    base = {key: value for key, value in BASE.items() if key != "algorithm.lr"}
    chosen = settings.Settings.of({**base, **cosine, "rounds": 3, "steps": 5, "out": str(tmp_path / "run")})
    model = VectorModel(fg.models.build("logistic", features=2))
    with pytest.raises(fg.InputError, match=r"lr of fedagrac in round 3 = 0\.0"):
        run_federation(None, chosen, model)
    assert not (tmp_path / "run").exists()
