"""Reports: tables and pictures out of run folders."""

from fedagrac.report.curves import plot_costs, plot_curves, save_costs, save_curves
from fedagrac.report.runs import StoredRun, read_run
from fedagrac.report.summary import summarise, summary_table

__all__ = [
    "StoredRun",
    "plot_costs",
    "plot_curves",
    "read_run",
    "save_costs",
    "save_curves",
    "summarise",
    "summary_table",
]
