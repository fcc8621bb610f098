"""The table of a live run's clients in the report."""

import re

import pytest

from fedagrac.errors import InputError
from fedagrac.report import find_runs, render_page
from fedagrac.report.fleet import fleet_tables
from run_folders import record, write_run


def live(number, used, dropped=None, **more):
    """Return a round in which every client did 4 steps in 2 s for 2 MB down and 1 MB up."""
    dropped = dropped or {}
    fields = {
        "asked": len(used) + len(dropped),
        "dropped": list(dropped),
        "weights": {str(i): weight for i, weight in used.items()},
        "steps": {str(i): 4 for i in used},
        "seconds": {str(i): float(number) for i in used},
        "sent": {str(i): 2_000_000 for i in (*used, *dropped)},
        "received": {str(i): 1_000_000 for i in used},
        "seen": {str(i): f"2026-01-05T12:0{number}:00Z" for i in used},
        "reasons": {str(i): reason for i, reason in dropped.items()},
        "events": [],
    }
    return record(number, 0.5, 1.0, **{**fields, **more})


ROUNDS = [live(1, {0: 0.5, 1: 0.5}), live(2, {0: 1.0}, {1: "its node left"}), live(3, {0: 0.75, 1: 0.25})]


def cells(page):
    """Return the texts of the table of the fleet."""
    section = re.search(r'<section id="fleet">(.*?)</section>', page, re.DOTALL)
    return [
        re.findall(r"<t[hd][^>]*>([^<]*)</t[hd]>", row)
        for row in re.findall(r"<tr>.*?</tr>", section[1], re.DOTALL)
    ]


def test_the_page_has_a_row_for_each_client_with_those_first_that_were_dropped(tmp_path):
    write_run(tmp_path / "run", ROUNDS)
    header, first, second = cells(render_page(find_runs([tmp_path / "run"])))
    assert header[0] == "client"
    assert first == [
        "1", "2", "0.375", "4.0", "2.0", "3.0", "6.00", "2.00", "2026-01-05 12:03:00", "1",
        "its node left (round 2)",
    ]  # fmt: skip
    assert second == ["0", "3", "0.75", "4.0", "2.0", "3.0", "6.00", "3.00", "2026-01-05 12:03:00", "0", ""]


def test_a_simulation_has_no_fleet(tmp_path):
    write_run(tmp_path / "run", [record(1, 0.5, 1.0, dropped=[1])])
    runs = find_runs([tmp_path / "run"])
    assert fleet_tables(runs) == []
    assert 'id="fleet"' not in render_page(runs)


def test_a_thousand_clients_stay_a_short_table(tmp_path):
    weights = dict.fromkeys(range(999), 1 / 999)
    write_run(tmp_path / "run", [live(1, weights, {999: "no"}), live(2, weights, {999: "no"})])
    runs = find_runs([tmp_path / "run"])
    page = render_page(runs)
    assert len(cells(page)) == 1 + 100
    assert cells(page)[1][0] == "999"
    assert "The table shows 100 of 1,000 clients." in page
    write_run(tmp_path / "few", [live(1, {0: 1.0})])
    assert len(page) - len(render_page(find_runs([tmp_path / "few"]))) < 50_000


def test_a_long_history_says_which_rounds_its_table_is_about(tmp_path):
    filler = 2_000_000 * "x"
    write_run(tmp_path / "run", [live(i, {0: 1.0}, events=[filler]) for i in range(1, 10)])
    page = render_page(find_runs([tmp_path / "run"]))
    assert "Means and sums are those of the last 8 rounds." in page  # 16.8 MB hold 8 lines of 2 MB
    assert cells(page)[1][1] == "8"


def test_text_from_clients_is_text_on_the_page(tmp_path):
    evil = "<script>alert(1)</script>\x1b[2J\u202e"
    write_run(tmp_path / "run", [live(1, {0: 1.0}, {1: evil})])
    page = render_page(find_runs([tmp_path / "run"]))
    assert "<script>alert" not in page
    assert r"&lt;script&gt;alert(1)&lt;/script&gt;\x1b[2J\u202e (round 1)" in page


@pytest.mark.parametrize(
    "fault", [{"weights": {"x": 1.0}}, {"seen": {"1": "<b>"}}, {"sent": {"1": -1}}, {"reasons": {"1": 3}}]
)
def test_wrong_fields_are_named(fault, tmp_path):
    write_run(tmp_path / "run", [live(1, {0: 1.0}, {1: "no"}, **fault)])
    with pytest.raises(InputError, match=rf"history.jsonl: {next(iter(fault))}"):
        render_page(find_runs([tmp_path / "run"]))
