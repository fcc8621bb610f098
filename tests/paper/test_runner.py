"""Trials that the time budget cuts off, and their checkpoints."""

import types

import pytest

from command_line import command
from fedagrac.paper import RECIPES, Recipe, Records, Table, Trial, run_trials, runner
from fedagrac.paper.__main__ import main
from fedagrac.paper.runner import Deadline, run_simulations


def trial(name, lr, **more):
    """Return a trial of logistic regression on digits whose clients run 2, 4, 6 and 8 steps."""
    settings = {
        "data": {"name": "digits", "clients": 4, "partition": {"kind": "dirichlet", "alpha": 0.5}, "seed": 0},
        "model": {"name": "logistic", "features": 64, "classes": 10},
        "steps": {"kind": "linear", "first": 2, "increment": 2},
        "batch_size": 10,
        "rounds": 7,
        "seed": 0,
        "algorithm": {"name": name, "lr": lr},
        **more,
    }
    return Trial(f"{name}/lr={lr}", settings)


@pytest.fixture
def clock(monkeypatch):
    """A clock that advances by one when a run has done a round."""
    now = types.SimpleNamespace(value=0)
    monkeypatch.setattr(runner, "time", types.SimpleNamespace(monotonic=lambda: now.value))
    return now


def run_until_complete(trials, store, clock, budget, checkpoints, run=run_simulations):
    """Call run_trials until all trials are finished. Return the number of calls."""

    def seen():
        clock.value += 1

    for call in range(1, 20):
        if run_trials("r", trials, store, run, budget, seen=seen, checkpoints=checkpoints):
            return call
    raise AssertionError("the trials never end")


def outcomes(trials, store):
    """Return the outcomes without what depends on the calls."""
    return [
        {key: value for key, value in store.get("r", one).outcome.items() if key not in ("seconds", "together")}
        for one in trials
    ]


def test_trials_that_are_cut_off_go_on_to_the_record_of_an_uninterrupted_run(tmp_path, clock):
    trials = [trial("fedagrac", 0.05), trial("scaffold", 0.05), trial("fedavg", 0.02)]
    straight, cut = Records(tmp_path / "straight"), Records(tmp_path / "cut")
    assert run_until_complete(trials, straight, clock, None, None) == 1
    clock.value = 0
    calls = run_until_complete(trials, cut, clock, 3.5, tmp_path / "checkpoints")  # two rounds a call
    assert calls == 4
    assert clock.value == 3 * 7  # no round is run twice
    assert outcomes(trials, cut) == outcomes(trials, straight)
    assert list((tmp_path / "checkpoints").iterdir()) == []
    assert cut.get("r", trials[0]).outcome["seconds"] == 3 * 7  # those of all calls
    assert cut.get("r", trials[0]).outcome["together"] == 3


def test_without_checkpoints_a_trial_that_is_cut_off_starts_again(tmp_path, clock):
    one, store = trial("fedavg", 0.05), Records(tmp_path)
    run_trials("r", [one], store, run_simulations, 2.5, seen=lambda: setattr(clock, "value", clock.value + 1))
    assert not store.get("r", one).finished
    run_until_complete([one], store, clock, None, None)
    assert clock.value == 3 + 7


def test_a_trial_that_reaches_its_target_ends_while_another_goes_on_later(tmp_path, clock):
    goal = {"target": 0.6, "stop_at_target": True}
    trials = [trial("fedavg", 0.1, **goal), trial("fedavg", 0.0001, **goal)]
    straight, cut = Records(tmp_path / "straight"), Records(tmp_path / "cut")
    run_until_complete(trials, straight, clock, None, None)
    reached = straight.get("r", trials[0]).outcome["rounds"]
    assert reached < 6
    clock.value = 0
    assert run_until_complete(trials, cut, clock, 2 * reached + 0.5, tmp_path / "checkpoints") == 2
    assert outcomes(trials, cut) == outcomes(trials, straight)
    assert clock.value == reached + 7
    assert cut.get("r", trials[1]).outcome["together"] == 1


def test_runs_of_a_group_at_different_rounds_go_on(tmp_path, clock):
    trials = [trial("fedagrac", 0.05), trial("scaffold", 0.05), trial("fedavg", 0.02)]
    group = [one.settings for one in trials]
    whole = run_simulations(group, Deadline(None))
    for settings, rounds in zip(group[:2], (2, 4), strict=True):
        clock.value = 0
        run_simulations(
            [settings], Deadline(rounds - 0.5, lambda: setattr(clock, "value", clock.value + 1), tmp_path)
        )
    assert {path.name for path in tmp_path.iterdir()} == {trials[0].key, trials[1].key}
    done = []
    after = run_simulations(group, Deadline(None, lambda: done.append(1), tmp_path))
    assert len(done) == 5 + 3 + 7
    for one, other in zip(after, whole, strict=True):  # alone and side by side differ in rounding
        assert one["rounds"] == 7
        assert one["train_loss"] == pytest.approx(other["train_loss"], rel=1e-3)


def test_a_run_that_ends_when_the_time_is_up_is_finished(tmp_path, clock):
    settings = trial("fedavg", 0.05, rounds=3).settings

    def seen():
        clock.value += 1

    (outcome,) = run_simulations([settings], Deadline(2.5, seen, tmp_path))
    assert (outcome["rounds"], outcome["finished"]) == (3, True)
    clock.value = 0
    given_up = {**settings, "give_up": 2, "target": 0.999}
    (outcome,) = run_simulations([given_up], Deadline(1.5, seen, tmp_path))
    assert (outcome["rounds"], outcome["finished"]) == (2, True)
    clock.value = 0
    diverging = {**settings, "algorithm": {"name": "fedavg", "lr": 1e38}}
    (outcome,) = run_simulations([diverging], Deadline(0.5, seen, tmp_path))
    assert (outcome["status"], outcome["finished"]) == ("diverged", True)
    assert list(tmp_path.iterdir()) == []


def test_a_damaged_checkpoint_starts_the_trial_again(tmp_path, clock, caplog):
    one, store = trial("fedagrac", 0.05), Records(tmp_path)

    def seen():
        clock.value += 1

    assert not run_trials("r", [one], store, run_simulations, 2.5, seen=seen, checkpoints=tmp_path / "kept")
    (file,) = (tmp_path / "kept" / one.key / "checkpoint").iterdir()
    file.write_bytes(file.read_bytes()[:-100])
    assert run_until_complete([one], store, clock, None, tmp_path / "kept") == 1
    assert clock.value == 3 + 7
    assert "the run starts again" in caplog.text


def test_an_interrupted_trial_leaves_a_checkpoint(tmp_path):
    one, seen = trial("fedagrac", 0.05), []

    def interrupt():
        seen.append(1)
        if len(seen) == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_trials("r", [one], Records(tmp_path), run_simulations, seen=interrupt, checkpoints=tmp_path / "kept")
    assert run_trials(
        "r", [one], Records(tmp_path), run_simulations, seen=interrupt, checkpoints=tmp_path / "kept"
    )
    assert len(seen) == 7
    whole = Records(tmp_path / "whole")
    assert run_trials("r", [one], whole, run_simulations)
    assert outcomes([one], Records(tmp_path)) == outcomes([one], whole)


def tiny_recipe(one, run):
    """Return a recipe of one trial whose table shows how many rounds it has done."""
    return Recipe(
        name="tiny",
        title="",
        assumptions=(),
        trials=lambda scale: [one],
        table=lambda records, scale: Table(
            ("rounds",), tuple((str(r.outcome["rounds"]),) for r in records.values())
        ),
        claims=lambda records: [],
        run=run,
    )


def test_the_module_takes_a_folder_for_checkpoints(tmp_path, monkeypatch, capsys):
    one = trial("fedavg", 0.05)
    monkeypatch.setitem(RECIPES, "tiny", tiny_recipe(one, run_simulations))
    kept = tmp_path / "kept"
    arguments = ["tiny", "--out", str(tmp_path), "--checkpoints", str(kept)]
    main([*arguments, "--time-budget", "1e-9"])
    assert "rounds" in capsys.readouterr().out
    assert not Records(tmp_path).all("tiny")  # the time was up before the first run
    main(arguments)
    assert Records(tmp_path).get("tiny", one).outcome["rounds"] == 7


def test_the_command_resumes_a_run_from_its_folder_of_checkpoints(tmp_path, monkeypatch, capsys):
    one, rounds = trial("fedagrac", 0.05), []

    def run(group, deadline, data_dir=None):
        """Cut the first call off after a round."""
        rounds.append(0)

        def seen():
            rounds[-1] += 1

        return run_simulations(group, Deadline(0.0 if len(rounds) == 1 else None, seen, deadline.folder))

    monkeypatch.setitem(RECIPES, "tiny", tiny_recipe(one, run))
    kept = tmp_path / "kept"
    arguments = ["reproduce", "tiny", "--out", str(tmp_path), "--checkpoints", str(kept)]
    code, _, notes = command(*arguments, capsys=capsys)
    assert code == 0
    assert "run the same command again" in notes
    assert [path.name for path in kept.iterdir()] == [one.key]
    assert command(*arguments, capsys=capsys)[0] == 0
    assert rounds == [1, 6]
    assert list(kept.iterdir()) == []
    straight = run_simulations([one.settings], Deadline(None))[0]
    outcome = Records(tmp_path).get("tiny", one).outcome
    assert {key: outcome[key] for key in straight} == straight
