"""The report: the summary, the page, the pictures, and the errors for bad folders."""

import json
import re
import struct
import tomllib
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
from matplotlib.colors import to_hex

import fedagrac as fg
from fedagrac.cli.app import main
from fedagrac.data.describe import MOST_SHOWN, describe
from fedagrac.report import find_runs, read_run, render_page, summarise, write_report
from fedagrac.report.charts import charts_of, curve, series_of
from fedagrac.report.pictures import plot_chart, plot_curves, plot_label_counts, plot_steps, save
from fedagrac.report.style import LOOKS, OTHER, SHADE
from run_folders import record, run_small, small_experiment, write_run


@pytest.fixture(autouse=True)
def in_an_empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("NO_COLOR", "1")


@pytest.fixture
def without_pictures(monkeypatch):
    """Skip drawing, which takes most of the time, in tests of something else."""
    monkeypatch.setattr("fedagrac.report.folder.save", lambda figure, stem: stem)


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """The folder of a small experiment that the command ran; tests do not change it."""
    return run_small(tmp_path_factory.mktemp("small"), SMALL)


def command(*arguments, capsys):
    """Run the entry point; return (exit code, stdout, stderr)."""
    with pytest.raises(SystemExit) as stop:
        main(list(arguments))
    captured = capsys.readouterr()
    return stop.value.code or 0, captured.out, captured.err


SMALL = small_experiment(3, 5, {"kind": "extreme", "slow": 2, "fast": 9}, ("scaffold", "fedavg"))


class Page(HTMLParser):
    """The tags, texts and scripts of a page."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.texts, self.scripts, self._inside = [], [], [], ""
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))
        self._inside = tag

    def handle_endtag(self, tag):
        self._inside = ""

    def handle_data(self, data):
        (self.scripts if self._inside == "script" else self.texts).append(data)

    @property
    def figures(self):
        return {figure["id"]: figure for figure in json.loads(self.scripts[0])}

    def lines(self, figure):
        return {trace["name"]: trace for trace in self.figures[figure]["data"] if "legendgroup" in trace}


# the summary


def test_the_summary_by_hand(tmp_path):
    """Fourteen rounds, the even ones evaluated: the last ten rounds hold five accuracies."""
    accuracies = [None, 0.10, None, 0.20, None, 0.60, None, 0.30, None, 0.80, None, 0.70, None, 0.75]
    records = [record(i, a, train_loss=15.0 - i) for i, a in enumerate(accuracies, start=1)]
    (row,) = summarise([read_run(write_run(tmp_path / "a", records, target=0.6))])
    assert row["best_accuracy"] == 0.80
    assert row["accuracy"] == 0.75
    assert row["final_accuracy"] == pytest.approx((0.60 + 0.30 + 0.80 + 0.70 + 0.75) / 5)
    assert row["rounds_to_target"] == 6
    assert row["bytes_to_target"] == 6000
    assert row["bytes"] == 14_000
    assert row["best_train_loss"] == 1.0
    assert row["final_train_loss"] == pytest.approx(np.mean(range(1, 11)))
    assert row["test_loss"] is row["best_test_loss"] is None


def test_a_target_that_is_not_reached_and_none_at_all(tmp_path):
    records = [record(1, 0.5), record(2, 0.6)]
    never = read_run(write_run(tmp_path / "never", records, target=0.9))
    none = read_run(write_run(tmp_path / "none", records))
    stopped = read_run(write_run(tmp_path / "stopped", records, stop={"accuracy": 0.55}))
    rows = summarise([never, none, stopped])
    assert [row["rounds_to_target"] for row in rows] == [None, None, 2]
    assert [row["bytes_to_target"] for row in rows] == [None, None, 2000]
    assert "rounds to 90%" in render_page([never])
    assert "rounds to" not in render_page([none])
    assert "rounds to target" in render_page([never, stopped])  # two different targets


# the pictures' data


def test_one_colour_per_algorithm_on_the_page_and_in_the_pictures(tmp_path):
    assert set(LOOKS) == set(fg.algorithms.REGISTRY)
    runs = [
        read_run(write_run(tmp_path / name, [record(1, 0.5, 1.0), record(2, 0.6, 0.9)], name, label=f"my {name}"))
        for name in (*LOOKS, "another")
    ]
    wanted = {f"my {name}": look.colour for name, look in (*LOOKS.items(), ("another", OTHER))}
    page = Page(render_page(runs))
    for chart in charts_of(runs):
        assert {name: line["line"]["color"] for name, line in page.lines(chart.key).items()} == wanted
        for figure in (plot_chart(chart, runs), plot_curves(runs)):
            drawn = [to_hex(line.get_color()) for line in figure.axes[0].get_lines()][: len(runs)]
            assert drawn == list(wanted.values())
            legend = figure.legends[0]
            assert [text.get_text() for text in legend.get_texts()] == list(wanted)
            assert [to_hex(line.get_color()) for line in legend.get_lines()] == list(wanted.values())
    swatches = [attributes["stroke"] for tag, attributes in page.tags if tag == "line"]
    assert swatches == list(wanted.values())


def luminance(colour):
    """Relative luminance, as the web's contrast rules define it."""
    parts = np.array([int(colour[i : i + 2], 16) for i in (1, 3, 5)]) / 255
    linear = np.where(parts <= 0.04045, parts / 12.92, ((parts + 0.055) / 1.055) ** 2.4)
    return float(linear @ [0.2126, 0.7152, 0.0722])


def test_every_colour_is_readable_on_white_and_on_the_dark_page():
    colours = [look.colour for look in (*LOOKS.values(), OTHER)] + [SHADE]
    assert len(set(colours)) == len(colours)
    css = (Path(fg.__file__).parent / "report" / "template" / "page.css").read_text()
    for card in re.findall(r"--card: (#\w{6}); --ink", css):
        for colour in colours:
            low, high = sorted([luminance(colour), luminance(card)])
            assert (high + 0.05) / (low + 0.05) >= 3, (colour, card)


def test_two_runs_of_one_algorithm_share_the_colour_and_differ_in_the_dashes(tmp_path):
    runs = [
        read_run(write_run(tmp_path / label, [record(1, 0.5), record(2, 0.6)], "fedagrac", label=label, lr=lr))
        for label, lr in (("small", 0.1), ("large", 0.5))
    ]
    small, large = series_of(runs)
    assert small.look.colour == large.look.colour
    assert small.look.pattern != large.look.pattern


def test_runs_that_differ_by_their_seed_are_one_line_with_a_band(tmp_path):
    values = {0: (0.2, 0.5), 1: (0.4, 0.9), 2: (0.3, 0.7)}
    runs = [
        read_run(write_run(tmp_path / f"s{seed}" / "fedavg", [record(1, a), record(2, b)], seed=seed))
        for seed, (a, b) in values.items()
    ]
    other = read_run(write_run(tmp_path / "s3" / "fedavg", [record(1, 0.1)], seed=3, rounds=1))
    seeds, alone = series_of([*runs, other])
    assert (len(seeds.runs), len(alone.runs)) == (3, 1)
    points = curve(seeds, charts_of(runs)[0])
    assert points.rounds == [1, 2]
    assert points.y == pytest.approx([30, 70])
    assert points.low == pytest.approx([20, 50])
    assert points.high == pytest.approx([40, 90])
    assert [row["run"] for row in summarise([*runs, other])] == [
        "fedavg, s0, seed 0", "fedavg, s0, seed 1", "fedavg, s0, seed 2", "fedavg, s3",
    ]  # fmt: skip
    band, line = Page(render_page(runs)).figures["accuracy-rounds"]["data"]
    assert band["x"] == [1, 2, 2, 1]
    assert band["y"] == pytest.approx([40, 90, 50, 20])
    assert band["legendgroup"] == line["legendgroup"]
    assert line["name"] == "fedavg (3 seeds)"


def test_fedlin_is_one_line_although_the_seed_decides_its_step_size(tmp_path):
    runs = [
        read_run(
            write_run(tmp_path / f"{s}", [record(1, 0.5)], "fedlin", lr=0.1 * (7 + s), seed=s, shared=1, **lr)
        )
        for s in (0, 1)
        for lr in ({},)
    ]
    assert len(series_of(runs)) == 2  # step sizes of their own
    for run in runs:
        run.experiment["lr"] = 0.1
    assert len(series_of(runs)) == 1  # a shared one, times Kbar
    assert "times the shared 0.1" in render_page(runs)


def test_results_of_the_clients_own_models_say_so(tmp_path):
    own, one = (read_run(write_run(tmp_path / name, [record(1, 0.5)], name)) for name in ("ditto", "fedavg"))
    said = "test results are those of the clients&#39; own models"
    assert said in render_page([own])
    assert said not in render_page([one])
    around = write_run(tmp_path / "around", [record(1, 0.5)], "fedadam", inner={"name": "ditto"})
    assert said in render_page([read_run(around)])


def test_the_same_label_in_two_experiments_is_told_apart(tmp_path):
    runs = [
        read_run(write_run(tmp_path / name / "fedavg", [record(1, 0.5)], rounds=i))
        for i, name in enumerate(("one", "two"))
    ]
    assert [line.label for line in series_of(runs)] == ["fedavg, one", "fedavg, two"]


def test_without_accuracy_the_losses_are_drawn_against_everything(tmp_path):
    tested = read_run(write_run(tmp_path / "tested", [record(1, None, 3.0, 2.0), record(2, None, 0.5, 1.0)]))
    assert [chart.key for chart in charts_of([tested])] == ["loss-rounds", "loss-time", "loss-bytes", "train-loss"]
    untested = read_run(write_run(tmp_path / "untested", [record(1, train_loss=2.0), record(2, train_loss=1.0)]))
    charts = charts_of([untested])
    assert [chart.key for chart in charts] == ["train-loss-rounds", "train-loss-time", "train-loss-bytes"]
    assert [chart.log for chart in charts] == [False] * 3
    assert charts_of([tested])[0].log
    page = Page(render_page([untested]))
    assert page.lines("train-loss-bytes")["fedavg"]["x"] == [0.001, 0.002]
    assert "best accuracy (%)" not in page.texts
    assert "best train loss" in page.texts
    assert write_report([untested], tmp_path / "untested").exists()


def test_a_diverged_run_keeps_its_rounds(tmp_path):
    fine = write_run(tmp_path / "fedavg", [record(1, 0.5), record(2, 0.6)])
    records = [record(1, 0.4, train_loss=1e30), record(2, None, train_loss=None)]
    gone = write_run(tmp_path / "fedprox", records, "fedprox", "diverged", "round 2: no longer finite")
    alone = write_run(tmp_path / "fednova", [record(1, train_loss=None)], "fednova", "diverged", "round 1: so")
    page = Page(render_page(find_runs([fine, gone, alone])))
    assert page.lines("accuracy-rounds")["fedprox (diverged)"]["y"] == [40]
    assert "fedprox diverged: round 2: no longer finite" in page.texts
    assert Page(render_page([read_run(alone)])).figures == {}  # only the table
    assert write_report([read_run(alone)], alone).exists()
    assert write_report(find_runs([fine, gone, alone]), tmp_path).exists()


def test_an_interrupted_run_is_shown_up_to_its_last_whole_line(tmp_path):
    folder = write_run(tmp_path / "run", [record(1, 0.5), record(2, 0.6)], status=None)
    with (folder / "history.jsonl").open("a") as file:
        file.write('{"round": 3, "test_acc')
    run = read_run(folder)
    assert (len(run.history), run.status) == (2, "unfinished")
    assert "unfinished" in Page(render_page([run])).texts
    (folder / "history.jsonl").write_text("")
    empty = read_run(folder)
    assert "No round is complete yet." in render_page([empty])
    assert write_report([empty], tmp_path / "out").exists()


def test_long_histories_are_thinned_on_the_page_and_keep_their_ends(tmp_path):
    run = read_run(write_run(tmp_path / "run", [record(i, 0.5) for i in range(1, 5001)]))
    line = Page(render_page([run])).lines("accuracy-rounds")["fedavg"]
    assert len(line["x"]) <= 2001
    assert (line["x"][0], line["x"][-1]) == (1, 5000)


# hostile text

HOSTILE = "</script><script>document.title = 'taken'</script><img src=x onerror=alert(1)>"


def test_text_from_files_is_text_on_the_page(tmp_path):
    settings = {"label": HOSTILE, "name": HOSTILE, "data": {"name": HOSTILE}, "<b>key</b>": HOSTILE}
    records = [record(1, 0.5), record(2, 0.6)]
    folder = write_run(tmp_path / "run", records, HOSTILE, "diverged", HOSTILE, **settings)
    (folder / "environment.json").write_text(json.dumps({"gpu": HOSTILE, "<i>": HOSTILE}))
    facts = describe(fg.Federation.from_arrays([([[0.0]], [0])], name=HOSTILE), np.array([1]))
    (folder / "federation.json").write_text(json.dumps(vars(facts)))
    page = Page(render_page([read_run(folder)]))
    tags = [tag for tag, _ in page.tags]
    assert tags.count("script") == 3  # the figures, the library, our own
    assert "img" not in tags
    assert "b" not in tags
    assert "i" not in tags
    assert sum(HOSTILE in text for text in page.texts) >= 6
    label = f"{HOSTILE} (diverged)"
    short = f"{label[:22]}…{label[-21:]}"  # what fits a legend
    assert list(page.lines("accuracy-rounds")) == [short.replace("<", "&lt;").replace(">", "&gt;")]
    assert write_report([read_run(folder)], folder).exists()


@pytest.mark.parametrize("label", ["$\\frac", "_hidden", "a\nb", "{x} %s %{y}", "100 % & more", "[red]"])
def test_labels_with_characters_that_are_special_to_the_drawing_library(label, tmp_path, capsys, without_pictures):
    folder = write_run(tmp_path / "run", [record(1, 0.5), record(2, 0.6)], label=label)
    code, out, err = command("report", str(folder), capsys=capsys)
    assert code == 0, err
    figure = plot_curves([read_run(folder)])
    assert [text.get_text() for text in figure.legends[0].get_texts()] == [label.replace("\n", "\\n")]
    assert save(figure, tmp_path / "curves").read_bytes()[:4] == b"\x89PNG"
    if "\n" not in label:
        assert label in out


# the page by itself


def test_the_page_is_one_file_that_makes_no_requests(tmp_path):
    run = read_run(write_run(tmp_path / "run", [record(1, 0.5), record(2, 0.6)]))
    text = render_page([run])
    page = Page(text)
    addresses = [a[key] for _, a in page.tags for key in ("src", "href") if key in a]
    assert all(address.startswith(("#", "data:")) for address in addresses)
    (policy,) = [a["content"] for tag, a in page.tags if a.get("http-equiv") == "Content-Security-Policy"]
    assert policy.startswith("default-src 'none'")
    assert "url(" not in text.split("<style>")[1].split("</style>")[0]
    assert text.count("plotly.js v") == 1  # the library is included once
    assert text == render_page([run])  # the page does not depend on the time


def test_settings_environment_and_citations_are_on_the_page(tmp_path):
    a = write_run(tmp_path / "a", [record(1, 0.5)], "scaffold", lr=0.25, data={"name": "a9a"}, rounds=7)
    b = write_run(tmp_path / "b", [record(1, 0.5)], "fedlin", lr=0.5, data={"name": "a9a"}, rounds=7)
    page = Page(render_page(find_runs([a, b])))
    assert {"rounds", "7", "data.name", "a9a", "lr", "0.25", "0.5", "torch", "2.13.0"} <= set(page.texts)
    text = "".join(page.texts)
    for key in ("wu2023fedagrac", "karimireddy2020scaffold", "mitra2021fedlin", "becker1996adult"):
        assert text.count(key) == 1
    assert "mcmahan2017fedavg" not in text


def test_the_paper_of_an_algorithm_inside_another_is_cited(tmp_path):
    inside = {"name": "fednova", "inner": {"name": "unknown"}}
    text = render_page([read_run(write_run(tmp_path, [record(1, 0.5)], "fedadam", inner=inside))])
    assert all(text.count(key) == 1 for key in ("reddi2021fedopt", "wang2020fednova"))


# the federation


def test_the_federation_is_described_by_counts(small):
    fed = fg.Federation.load("digits", clients=5, partition=fg.Shards(3), seed=0)
    description = json.loads((small / "federation.json").read_text())
    assert description["steps"] == [2, 2, 2, 2, 9]
    assert description["steps_mean"] == pytest.approx(float(fed.weights @ [2, 2, 2, 2, 9]))
    assert description["sizes"] == fed.sizes.tolist()
    for client, row in enumerate(description["labels"]):
        labels = fed.targets[fed.samples_of(client)].numpy()
        assert row == [int((labels == c).sum()) for c in range(10)]
    page = Page((small / "report.html").read_text())
    assert np.array_equal(np.array(page.figures["labels-0"]["data"][0]["z"]).T, description["labels"])
    assert page.figures["steps-0"]["data"][0]["y"] == [2, 2, 2, 2, 9]


def test_many_clients_are_described_in_a_small_file(tmp_path):
    fed = fg.Federation.load("digits", clients=30_000, partition=fg.Resample(30), seed=0)
    facts = describe(fed, fg.Extreme(1, 77).counts(0, 30_000, 0))
    assert len(json.dumps(vars(facts))) < 6000
    assert facts.shown[0] == 0
    assert facts.shown[-1] == 29_999
    assert len(set(facts.shown)) == MOST_SHOWN
    assert facts.steps_range == [1, 77]
    assert [sum(row) for row in facts.labels] == facts.sizes == [30] * MOST_SHOWN
    image = plot_label_counts(facts).axes[0].get_images()[0]
    assert image.get_array().shape == (10, MOST_SHOWN)
    assert [bar.get_height() for bar in plot_steps(facts).axes[0].patches] == facts.steps


def test_a_federation_without_labels_has_a_picture_of_its_steps_only(tmp_path):
    fed = fg.Federation.from_arrays([([[0.0], [1.0]], [0.5, 1.5]), ([[2.0]], [1.0])])
    facts = describe(fed, np.array([3, 4]))
    assert facts.labels is None
    folder = write_run(tmp_path / "run", [record(1, test_loss=0.5)])
    (folder / "federation.json").write_text(json.dumps(vars(facts)))
    run = read_run(folder)
    assert run.federation == facts
    assert "labels-0" not in Page(render_page([run])).figures
    write_report([run], folder)
    assert sorted(p.name for p in (folder / "figures").glob("*.pdf")) == [
        "loss-bytes.pdf", "loss-rounds.pdf", "loss-time.pdf", "steps.pdf", "train-loss.pdf",
    ]  # fmt: skip


# the command


def test_run_writes_a_report_and_report_writes_the_same_again(small, capsys, monkeypatch):
    pictures = {str(p.relative_to(small)): p.read_bytes() for p in small.rglob("*.pdf")}
    assert set(pictures) == {
        "curves.pdf", "costs.pdf", "figures/accuracy-rounds.pdf", "figures/accuracy-time.pdf",
        "figures/accuracy-bytes.pdf", "figures/test-loss.pdf", "figures/train-loss.pdf", "figures/labels.pdf",
        "figures/steps.pdf",
    }  # fmt: skip
    assert {str(p.relative_to(small).with_suffix(".pdf")) for p in small.rglob("*.png")} == set(pictures)
    monkeypatch.setattr(fg.Federation, "load", None)  # the files in the folder are enough
    code, out, err = command("report", str(small), "--out", "again", "--json", capsys=capsys)
    assert code == 0, err
    assert Path("again/report.html").read_bytes() == (small / "report.html").read_bytes()
    assert all(Path("again", name).read_bytes() == content for name, content in pictures.items())
    printed = json.loads(out)
    assert printed["report"] == "again/report.html"
    assert printed["target"] == 0.2
    assert printed["runs"] == json.loads((small / "summary.json").read_text())
    assert [row["algorithm"] for row in printed["runs"]] == ["scaffold", "fedavg"]  # the file's order


def test_one_folder_gets_its_own_report(tmp_path, capsys, without_pictures):
    write_run(tmp_path / "mine" / "fedavg", [record(1, 0.5)])
    code, out, _ = command("report", "mine/", capsys=capsys)
    assert code == 0
    assert "mine/report.html" in out
    assert Path("mine/report.html").exists()
    command("report", "mine/fedavg", capsys=capsys)
    assert Path("mine/fedavg/report.html").exists()


def test_pictures_are_fit_for_print(tmp_path):
    write_report([read_run(write_run(tmp_path / "run", [record(1, 0.5), record(2, 0.6)]))], tmp_path / "out")
    for png in (tmp_path / "out").rglob("*.png"):
        content = png.read_bytes()
        per_metre = struct.unpack(">I", content[content.index(b"pHYs") + 4 :][:4])[0]
        assert round(per_metre * 0.0254) == 200
        pdf = png.with_suffix(".pdf").read_bytes()
        assert b"/TrueType" in pdf or b"/CIDFontType2" in pdf  # fonttype 42: text stays text
        assert b"/Type3" not in pdf


def test_several_folders_make_one_page_elsewhere(tmp_path, capsys, without_pictures):
    for seed in (0, 1):
        write_run(tmp_path / f"s{seed}" / "fedavg", [record(1, 0.5)], seed=seed)
    before = sorted(tmp_path.rglob("*"))
    code, out, err = command("report", "s0", "s1/fedavg", "s0/", "--json", capsys=capsys)
    assert code == 0, err
    printed = json.loads(out)
    assert [row["folder"] for row in printed["runs"]] == ["s0/fedavg", "s1/fedavg"]  # each once
    page = Path(printed["report"])
    assert page.parent.parent == Path("reports")
    assert page.exists()
    assert [p for p in sorted(tmp_path.rglob("*")) if "reports" not in p.parts] == before
    code, out, _ = command("report", "s0", "s1", "--out", "both", capsys=capsys)
    assert "both/report.html" in out


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: None, "experiment.toml, environment.json, history.jsonl and status.json"),
        (lambda: Path("nonsense").mkdir(), "this folder contains no run folders"),
        (lambda: Path("nonsense").write_text(""), "this is not a folder"),
        (lambda: broken("experiment.toml", "name = "), "a readable experiment.toml"),
        (lambda: broken("experiment.toml", 'name = "x"'), "algorithm"),
        (lambda: broken("experiment.toml", 'name = "x"\nalgorithm = []'), "algorithm"),
        (lambda: broken("experiment.toml", 'name = "x"\nalgorithm = [{name = 3}]'), "algorithm.0.name = 3"),
        (lambda: broken("experiment.toml", None), "a readable experiment.toml"),
        (lambda: broken("history.jsonl", "{}\n"), "line 1: round"),
        (lambda: broken("history.jsonl", "[1\n"), "a readable history.jsonl"),
        (lambda: broken("history.jsonl", json.dumps(record(1, round="1")) + "\n"), "line 1: round"),
        (lambda: broken("history.jsonl", json.dumps(record(1, "high")) + "\n"), "line 1: test_accuracy"),
        (lambda: broken("history.jsonl", json.dumps(record(1, 93.0)) + "\n"), "less than or equal to 1"),
        (
            lambda: broken("history.jsonl", json.dumps(record(1, train_loss=float("inf"))) + "\n"),
            "line 1: train_loss",
        ),
        (lambda: broken("history.jsonl", json.dumps(record(1, bytes_total=10**400)) + "\n"), "history.jsonl"),
        (lambda: broken("history.jsonl", "[" * 100_000 + "\n"), "history.jsonl"),
        (lambda: broken("status.json", "{}"), "status"),
        (lambda: broken("environment.json", "[]"), "dictionary"),
        (lambda: broken("federation.json", '{"name": "x"}'), "clients"),
        (lambda: broken("federation.json", "\xff"), "federation.json"),
    ],
)
def test_a_bad_run_folder_is_reported_in_one_line(make, message, capsys):
    make()
    code, out, err = command("report", "nonsense", capsys=capsys)
    assert code == 2
    assert out == ""
    assert err.count("\n") == 1
    assert err.startswith("error ")
    assert message in err
    assert not list(Path().rglob("report.html"))


def broken(name, content):
    folder = write_run(Path("nonsense"), [record(1, 0.5)])
    (folder / name).unlink(missing_ok=True)
    if content is not None:
        (folder / name).write_text(content, encoding="latin-1")


def test_a_file_where_the_report_should_go(tmp_path, capsys):
    write_run(tmp_path / "run", [record(1, 0.5)])
    Path("taken").write_text("mine")
    code, _, err = command("report", "run", "--out", "taken", capsys=capsys)
    assert code == 2
    assert "this is a file" in err
    assert Path("taken").read_text() == "mine"


def test_a_full_disk_is_named_and_leaves_no_half_page(tmp_path, capsys, monkeypatch, without_pictures):
    if not Path("/dev/full").exists():
        pytest.skip("needs /dev/full")
    write_run(tmp_path / "run", [record(1, 0.5)])
    real = Path.open

    def full(self, *arguments, **options):
        return real(Path("/dev/full") if "report.html" in self.name else self, *arguments, **options)

    monkeypatch.setattr(Path, "open", full)
    code, _, err = command("report", "run", capsys=capsys)
    assert code == 1
    assert "report.html: No space left on device" in " ".join(err.split())
    assert not Path("run/report.html").exists()


def test_the_labels_in_the_experiment_file_are_those_of_the_folders(without_pictures):
    labelled = [{"name": "scaffold"}, {"name": "fedavg", "label": "plain / averaging"}]
    run_small(Path(), {**SMALL, "algorithm": labelled})
    labels = [entry["label"] for entry in tomllib.loads(Path("mine/experiment.toml").read_text())["algorithm"]]
    assert [run.label for run in find_runs(["mine"])] == labels == ["scaffold", "plain / averaging"]
