"""Benchmarks run and count what they claim. No test depends on a time."""

import json

import pytest

from fedagrac.cli.app import main
from fedagrac.experiments import bench


def test_one_workload_from_the_command_line(tmp_path, capsys):
    options = ["--engines", "serial,lanes", "--budget", "0.1", "--out", str(tmp_path), "--json"]
    with pytest.raises(SystemExit) as done:
        main(["bench", "lr-a9a", *options])
    assert done.value.code == 0
    printed = json.loads(capsys.readouterr().out)
    assert [row["engine"] for row in printed["rows"]] == ["serial", "lanes"]
    for row in printed["rows"]:
        assert row["us"] > 0
        assert row["plain_us"] > 0
        assert row["rounds"] >= 4
    assert json.loads((tmp_path / "bench.json").read_text())["rows"] == printed["rows"]


def test_the_pfl_workload_is_the_public_one():
    case = bench.CASES["pfl"]
    assert sum(p.numel() for p in case.model().parameters()) == 1_626_442
    assert (case.clients, case.cohort, case.samples, case.batch, case.lr, case.client_steps()) == (
        1000,
        50,
        50,
        10,
        0.1,
        250,
    )


def test_the_spread_of_steps():
    points = bench.SWEEPS["spread"][1]
    K = points["one 100 x faster"].steps.counts(0, 20, 0)
    assert K.max() == 100 * K.min()
    assert list(bench.SWEEPS["clients"][1])[0::6] == ["10", "10000"]


@pytest.mark.parametrize(
    "arguments",
    [
        ["lr"],
        ["--parts", "speed"],
        ["--engines", "lane"],
        ["--budget", "0"],
        ["--precision", "half"],
        ["--device", "tpu"],
    ],
)
def test_wrong_names_are_refused(arguments, capsys):
    with pytest.raises(SystemExit) as done:
        main(["bench", *arguments])
    assert done.value.code == 2
    assert "expected" in capsys.readouterr().err
