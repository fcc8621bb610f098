"""The paper's tables and figures: settings as data, the paper's figures beside ours."""

from fedagrac.paper import (
    figure_estimators,
    figure_lambda,
    figure_lr_lambda,
    figure_pretest,
    figure_time,
    table1,
    table2,
    table_models,
    table_variance,
)
from fedagrac.paper.recipe import Recipe, Scale, Table, Verdict
from fedagrac.paper.records import Cell, Record, Records
from fedagrac.paper.runner import run_cells

__all__ = [
    "RECIPES",
    "Cell",
    "Recipe",
    "Record",
    "Records",
    "Scale",
    "Table",
    "Verdict",
    "records_of",
    "run_cells",
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
    )
}
"""Every recipe by name."""


def records_of(recipe: Recipe, scale: Scale, records: Records) -> dict[str, Record]:
    """Return the records of a recipe's cells that are there, by the cells' names."""
    found = {cell.name: records.get(recipe.name, cell) for cell in recipe.cells(scale)}
    return {name: record for name, record in found.items() if record is not None}
