"""A result as text and as a picture."""

import numpy as np
import pytest
import torch

import fedagrac as fg


def digits(**options):
    return fg.simulate(
        fg.models.build("logistic", features=64, classes=10), fg.Federation.load("digits", clients=4),
        fg.FedaGrac(lr=0.1, calibration=0.5), 3, steps=fg.Linear(1, 2), **options,
    )  # fmt: skip


def test_a_result_reads_as_five_lines():
    result = digits()
    ran, ended, measured, work, costs = repr(result).splitlines()
    assert ran.startswith("FedaGrac(lr=0.1, calibration=0.5) on Federation('digits', 4 clients")
    assert ended == "finished: all 3 rounds done"
    last = result.history[-1]
    assert measured == (
        f"test accuracy {last['test_accuracy']:.4f} (best {max(result.history.column('test_accuracy')):.4f}), "
        f"test loss {last['test_loss']:.4g} after round 3"
    )
    assert work == f"train loss {last['train_loss']:.4g}; 4 clients x 4 local steps a round"
    assert costs.startswith(f"{last['bytes_total'] / 1e6:.4g} MB moved, {last['sim_time']:.4g} s simulated, ")


def test_a_result_without_tests_and_one_that_diverged_read_as_five_lines():
    fed = fg.Federation.from_arrays([(np.ones((4, 1), np.float32), np.ones((4, 1), np.float32))])
    for lr, status in ((0.1, "finished"), (1e30, "diverged")):
        result = fg.simulate(
            torch.nn.Linear(1, 1), fed, fg.FedAvg(lr=lr), 3, steps=5, loss=torch.nn.functional.mse_loss
        )
        lines = repr(result).splitlines()
        assert len(lines) == 5
        assert lines[1].startswith(f"{status}: ")
        assert lines[2] == "the model was not tested"


@pytest.mark.parametrize("eval_every", [1, 3])
def test_the_picture_shows_accuracy_and_losses_of_every_round(eval_every):
    result = digits(eval_every=eval_every)
    accuracy, losses = result.plot().axes
    (line,) = accuracy.lines
    measured = [(r["round"], r["test_accuracy"]) for r in result.history if r["test_accuracy"] is not None]
    assert line.get_xydata() == pytest.approx(np.array(measured))
    train, test = losses.lines
    assert train.get_ydata() == pytest.approx(result.history.column("train_loss"))
    assert len(test.get_xdata()) == len(measured)


def test_the_picture_of_a_regression_has_losses_alone():
    fed = fg.Federation.from_arrays([(np.ones((4, 1), np.float32), np.ones((4, 1), np.float32))])
    loss = torch.nn.functional.mse_loss
    (losses,) = fg.simulate(torch.nn.Linear(1, 1), fed, fg.FedAvg(lr=0.1), 2, steps=1, loss=loss).plot().axes
    assert [line.get_label() for line in losses.lines] == ["train loss"]
