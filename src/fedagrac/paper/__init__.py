"""The paper's tables and figures: how to run them, and the paper's numbers beside ours."""

from fedagrac.paper import (
    figure_estimators,
    figure_lambda,
    figure_lr_lambda,
    figure_pretest,
    figure_time,
    participation,
    regime_map,
    table1,
    table2,
    table_models,
    table_variance,
)
from fedagrac.paper.recipe import Recipe, Scale, Table, Verdict
from fedagrac.paper.records import Records, Trial, TrialRecord
from fedagrac.paper.runner import run_trials

__all__ = [
    "RECIPES",
    "Recipe",
    "Records",
    "Scale",
    "Table",
    "Trial",
    "TrialRecord",
    "Verdict",
    "records_of",
    "run_trials",
    "trials_of",
]

RECIPES: dict[str, Recipe] = {
    module.RECIPE.name: module.RECIPE
    for module in (
        table1,
        table2,
        figure_pretest,
        figure_lambda,
        figure_estimators,
        table_models,
        figure_lr_lambda,
        table_variance,
        figure_time,
        regime_map,
        participation,
    )
}
"""Every recipe by name."""


def trials_of(recipe: Recipe, scale: Scale, store: Records) -> list[Trial]:
    """Return the trials of a recipe, with those that follow from what is recorded."""
    trials = recipe.trials(scale)
    if recipe.following is not None:
        trials += recipe.following(scale, _recorded(recipe, trials, store))
    return list({trial.key: trial for trial in trials}.values())


def records_of(recipe: Recipe, scale: Scale, store: Records) -> dict[str, TrialRecord]:
    """Return the records of a recipe's trials by the trials' names; trials without a record are left out."""
    return _recorded(recipe, trials_of(recipe, scale, store), store)


def _recorded(recipe: Recipe, trials: list[Trial], store: Records) -> dict[str, TrialRecord]:
    records = {trial.name: store.get(recipe.name, trial) for trial in trials}
    return {name: record for name, record in records.items() if record is not None}
