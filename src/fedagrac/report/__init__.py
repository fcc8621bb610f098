"""Reports: tables and pictures made from run folders."""

from fedagrac.report.folder import write_report
from fedagrac.report.page import render_page
from fedagrac.report.summary import common_target, summarise, summary_table
from fedagrac.storage.runs import StoredRun, find_runs, read_run

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
