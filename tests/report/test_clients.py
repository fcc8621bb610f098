"""The clients in a report: dots sorted by speed, group means, fine-tuning, and files that do not fit."""

import json

import numpy as np
import pytest
from matplotlib.colors import to_hex

from fedagrac.errors import InputError
from fedagrac.report import find_runs, read_run, render_page, write_report
from fedagrac.report.clients import MOST_DOTS, client_rows, strips_of
from fedagrac.report.pictures import plot_clients
from run_folders import record, write_run

COLUMNS = {
    "client": [0, 1, 2, 3],
    "name": ["ann", "bob", "eve", "<b>max</b>"],
    "samples": [4, 4, 10, 0],
    "steps": [30.0, 2.0, 9.0, 5.0],
    "accuracy": [0.75, 0.5, 0.9, None],
    "loss": [0.5, 2.0, 0.25, None],
}
TUNED = {"tuned_accuracy": [1.0, 0.75, 0.8, None], "tuned_loss": [0.1, 1.0, 0.5, None]}


def clients_run(folder, columns, algorithm="fedavg"):
    write_run(folder, [record(1, 0.5), record(2, 0.6)], algorithm)
    (folder / "per_client.json").write_text(json.dumps(columns))
    return read_run(folder)


def figures(page):
    return {f["id"]: f for f in json.loads(page.split('type="application/json">')[1].split("</script>")[0])}


def test_clients_are_sorted_by_their_steps_and_those_without_test_samples_are_left_out(tmp_path):
    (strip,) = strips_of([clients_run(tmp_path / "a", COLUMNS)])
    assert strip.names == ["bob", "eve", "ann"]
    assert strip.steps == [2.0, 9.0, 30.0]
    assert strip.before == pytest.approx([50, 90, 75])
    assert strip.after is None
    assert strip.groups == [(1, 1, 50.0), (2, 2, 90.0), (3, 3, 75.0)]
    assert strip.names[strip.worst] == "bob"


def test_the_page_has_a_dot_and_a_name_for_each_client_before_and_after_fine_tuning(tmp_path):
    plain = clients_run(tmp_path / "a", COLUMNS)
    tuned = clients_run(tmp_path / "b", {**COLUMNS, **TUNED}, "scaffold")
    page = render_page([plain, tuned])
    assert "An open diamond is the same client after fine-tuning" in page
    assert "An open diamond" not in render_page([plain])
    before, after = [trace for trace in figures(page)["clients-1"]["data"] if trace["mode"] == "markers"]
    assert before["y"] == pytest.approx([50, 90, 75])
    assert after["y"] == pytest.approx([75, 80, 100])
    assert [facts[0] for facts in before["customdata"]] == ["bob", "eve", "ann"]
    assert before["customdata"][2][1:] == ["30", 4]
    ranges = {tuple(figures(page)[key]["layout"]["yaxis"]["range"]) for key in ("clients-0", "clients-1")}
    assert len(ranges) == 1  # panels can be compared


def test_names_of_clients_are_text(tmp_path):
    columns = {**COLUMNS, "samples": [4, 4, 10, 2], "accuracy": [0.75, 0.5, 0.9, 0.1], "loss": [1.0] * 4}
    run = clients_run(tmp_path / "a", columns)
    page = render_page([run])
    assert "<b>max" not in page
    (dots,) = [trace for trace in figures(page)["clients-0"]["data"] if trace["mode"] == "markers"]
    assert dots["customdata"][1][0] == "&lt;b&gt;max&lt;/b&gt;"
    assert [text.get_text() for text in plot_clients([run]).axes[0].texts] == ["<b>max</b>"]  # the worst client


def test_the_table_of_clients_by_hand(tmp_path):
    rows = dict(client_rows([clients_run(tmp_path / "a", {**COLUMNS, **TUNED})]))
    spread = f"{100 * np.std([0.75, 0.5, 0.9]):.1f}"
    assert rows["fedavg"] == ["71.7", "50.0", spread, "50.0", "90.0", "75.0"]
    assert rows["fedavg, fine-tuned"][0] == "85.0"


def test_without_classes_the_losses_are_shown(tmp_path):
    run = clients_run(tmp_path / "a", {**COLUMNS, "accuracy": None})
    (strip,) = strips_of([run])
    assert (strip.field, strip.before, strip.names[strip.worst]) == ("loss", [2.0, 0.25, 0.5], "bob")
    assert figures(render_page([run]))["clients-0"]["layout"]["yaxis"]["title"]["text"] == "loss"


def test_the_picture_has_a_panel_of_its_colour_for_each_algorithm(tmp_path):
    runs = [
        clients_run(tmp_path / name, {**COLUMNS, **TUNED}, name) for name in ("fedavg", "scaffold", "fedagrac")
    ]
    panels = [axes for axes in plot_clients(runs).axes if axes.get_visible()]
    assert [axes.get_title() for axes in panels] == ["fedavg", "scaffold", "fedagrac"]
    for axes, strip in zip(panels, strips_of(runs), strict=True):
        dots = axes.collections[-1]
        assert dots.get_offsets().tolist() == [[i + 1, y] for i, y in enumerate(strip.before)]
        assert to_hex(dots.get_facecolor()[0]) == strip.look.colour


def test_many_clients_are_thinned_and_the_group_means_are_those_of_all(tmp_path):
    M = 4 * MOST_DOTS
    accuracy = np.linspace(0, 1, M)
    columns = {
        "client": list(range(M)), "name": [str(i) for i in range(M)], "samples": [1] * M,
        "steps": list(range(1, M + 1)), "accuracy": accuracy.tolist(), "loss": [1.0] * M,
    }  # fmt: skip
    run = clients_run(tmp_path / "a", columns)
    (strip,) = strips_of([run])
    assert len(strip.places) == MOST_DOTS
    assert (strip.places[0], strip.places[-1], strip.clients) == (1, M, M)
    first, last, mean = strip.groups[0]
    assert mean == pytest.approx(100 * accuracy[first - 1 : last].mean())
    assert "The figures show evenly spaced clients." in render_page([run])


def test_a_report_without_clients_has_no_such_section(tmp_path):
    run = read_run(write_run(tmp_path / "a", [record(1, 0.5)]))
    assert 'id="clients"' not in render_page([run])
    assert strips_of([run]) == []


def test_the_report_holds_the_picture_of_clients(tmp_path):
    clients_run(tmp_path / "a", COLUMNS)
    page = write_report(find_runs([tmp_path / "a"]), tmp_path / "out")
    assert 'id="clients-0"' in page.read_text()
    assert (page.parent / "figures" / "clients.png").read_bytes()[:4] == b"\x89PNG"


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"accuracy": [0.5]}, "as many values in every column"),
        ({"accuracy": [0.5, 2.0, 0.1, 0.2]}, "less than or equal to 1"),
        ({"name": [1, 2, 3, 4]}, "a valid string"),
        ({"steps": ["x"] * 4}, "a valid number"),
    ],
)
def test_a_table_that_does_not_fit_is_refused_by_name(wrong, message, tmp_path):
    with pytest.raises(InputError, match=message) as error:
        clients_run(tmp_path / "a", {**COLUMNS, **wrong})
    assert "per_client.json" in str(error.value)
