"""Trackers receive every field of every round."""

import pytest

import fedagrac as fg


def run(callback):
    fed = fg.Federation.load("digits", clients=3, seed=0)
    model = fg.models.build("logistic", features=64, classes=10)
    return fg.simulate(model, fed, fg.FedAvg(lr=0.1), rounds=3, steps=fg.Constant(2), callbacks=[callback])


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_tensorboard_shows_what_the_history_holds(tmp_path):
    pytest.importorskip("tensorboard", reason="needs the tensorboard extra")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    result = run(fg.TensorBoard(tmp_path))
    events = EventAccumulator(str(tmp_path / "fedavg"))
    events.Reload()
    shown = events.Scalars("test_accuracy")
    assert [e.step for e in shown] == [1, 2, 3]
    assert [e.value for e in shown] == pytest.approx(result.history.column("test_accuracy"))
    assert "bytes_up" in events.Tags()["scalars"]


@pytest.mark.filterwarnings("ignore::Warning")
def test_mlflow_shows_what_the_history_holds(tmp_path, monkeypatch):
    mlflow = pytest.importorskip("mlflow", reason="needs the mlflow extra")
    mlflow.set_tracking_uri(f"sqlite:///{tmp_path / 'mlflow.db'}")
    result = run(fg.MLflow(experiment="test"))
    (logged,) = mlflow.search_runs(experiment_names=["test"], output_format="list")
    assert logged.info.run_name == "fedavg"
    assert logged.info.status == "FINISHED"
    assert logged.data.params["lr"] == "0.1"
    assert logged.data.metrics["test_accuracy"] == pytest.approx(result.history[-1]["test_accuracy"])


@pytest.mark.parametrize(("callback", "module"), [(fg.TensorBoard("x"), "tensorboard"), (fg.MLflow(), "mlflow")])
def test_a_missing_tracker_says_what_to_install(callback, module, monkeypatch):
    import sys

    monkeypatch.setitem(sys.modules, module, None)
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(fg.InputError, match="pip install"):
        run(callback)
