"""Reports: tables and pictures out of run folders."""

from fedagrac.report.curves import plot_curves, save_curves
from fedagrac.report.runs import StoredRun, read_run
from fedagrac.report.summary import summarise, summary_table

__all__ = ["StoredRun", "plot_curves", "read_run", "save_curves", "summarise", "summary_table"]
