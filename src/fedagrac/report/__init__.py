"""Reports: tables and pictures out of run folders."""

from fedagrac.report.folder import write_report
from fedagrac.report.page import render_page
from fedagrac.report.runs import StoredRun, find_runs, read_run
from fedagrac.report.summary import common_target, summarise, summary_table

__all__ = [
    "StoredRun",
    "common_target",
    "find_runs",
    "read_run",
    "render_page",
    "summarise",
    "summary_table",
    "write_report",
]
