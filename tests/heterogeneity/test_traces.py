"""Step counts as an integer, lists, a function, a DataFrame or a CSV file."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

import fedagrac as fg
from fedagrac.heterogeneity.steps import step_schedule
from quadratics import K, half_square, quadratics

ROUNDS = 3
TABLE = np.array([[t + i + 1 for i in range(6)] for t in range(ROUNDS)])


def in_long_form(table, first=0):
    rows = [(t + first, i, k) for t, row in enumerate(table.tolist()) for i, k in enumerate(row)]
    return pd.DataFrame(rows, columns=["round", "client", "steps"])


def forms_of_the_table(folder):
    """Return the same counts in every form."""
    wide, long = pd.DataFrame(TABLE), in_long_form(TABLE, first=1).sample(frac=1, random_state=0)
    files = [folder / f"{name}.csv" for name in ("wide", "indexed", "numbered", "long", "shuffled", "windows")]
    wide.to_csv(files[0], index=False)
    wide.to_csv(files[1])  # its first column has no name
    wide.assign(round=range(1, ROUNDS + 1))[["round", *wide]][::-1].to_csv(files[2], index=False)
    long.to_csv(files[3], index=False)
    wide[[3, 1, 0, 2, 5, 4]].to_csv(files[4], index=False)  # clients are known by their numbers
    files[5].write_bytes(b"\xef\xbb\xbf" + files[0].read_bytes().replace(b"\n", b"\r\n") + b"\r\n")
    named = wide.rename(columns=lambda i: f"phone {i}")
    frames = [wide, long, named, pd.read_csv(files[0]), wide.astype("int32"), wide.set_index(wide.index + 7)]
    return [
        TABLE.tolist(),
        TABLE,
        tuple(map(tuple, TABLE)),
        list(TABLE),
        lambda round, num_clients: [round + i + 1 for i in range(num_clients)],
        lambda round, num_clients: TABLE[round],
        *frames,
        *files,
        str(files[0]),
    ]


def test_every_form_of_the_same_counts_is_the_same_run(tmp_path):
    q, expected = quadratics(), fg.Explicit(TABLE)
    x = q.simulate(fg.FedaGrac(lr=0.02), rounds=ROUNDS, steps=expected).vector
    for form in forms_of_the_table(tmp_path):
        schedule = step_schedule(form)
        assert [schedule.counts(t, 6, 0).tolist() for t in range(ROUNDS)] == TABLE.tolist(), form
    for form in (TABLE, forms_of_the_table(tmp_path)[4], tmp_path / "long.csv", in_long_form(TABLE)):
        again = fg.simulate(
            q.module(), q.federation(), fg.FedaGrac(lr=0.02), ROUNDS, steps=form, batch_size=None, device="cpu",
            loss=half_square,
        )  # fmt: skip
        assert again.vector.tolist() == x.tolist()


def test_an_integer_holds_for_all_clients_and_one_row_for_all_rounds():
    assert step_schedule(100) == fg.Constant(100)
    assert step_schedule(np.int64(7)) == fg.Constant(7)
    assert step_schedule(K) == fg.Explicit([K])
    assert step_schedule(np.array(K)) == fg.Explicit([K])
    schedule = fg.Linear(2, 3)
    assert step_schedule(schedule) is schedule


def test_a_trace_may_be_longer_than_the_run():
    q = quadratics()
    whole = fg.Setup(rounds=2, steps=TABLE)
    whole.schedule.check(6, 2)
    result = q.simulate(fg.FedAvg(lr=0.01), rounds=2, steps=fg.Explicit(TABLE))
    assert result.history.column("steps_mean") == TABLE[:2].mean(axis=1).tolist()
    with pytest.raises(fg.InputError, match="one for each of 4 rounds"):
        q.simulate(fg.FedAvg(lr=0.01), rounds=4, steps=fg.Explicit(TABLE))


@given(st.integers(1, 5), st.integers(1, 5), st.data())
def test_a_frame_and_its_long_form_hold_the_same_counts(rounds, clients, data):
    counts = st.lists(st.integers(1, 10_000_000), min_size=clients, max_size=clients)
    table = np.array(data.draw(st.lists(counts, min_size=rounds, max_size=rounds)))
    assert step_schedule(pd.DataFrame(table)) == fg.Explicit(table)
    for first in (0, 1):
        long = in_long_form(table, first).sample(frac=1, random_state=data.draw(st.integers(0, 99)))
        assert step_schedule(long[["steps", "round", "client"]]) == fg.Explicit(table)


BAD = [
    (True, "steps = True"),
    (0, "steps = 0: expected an integer of at least 1"),
    (-3, "steps = -3"),
    (10.0, "steps = 10.0: expected a StepSchedule"),
    (10**8, "at most 10000000"),
    (None, "steps = None"),
    ({"a": 1}, "a list with the steps of each client"),
    (fg.Linear, "steps = <class"),
    (b"12", "steps = b'12'"),
    ([], r"steps = \[\]"),
    ([2, 0], r"steps\[0\]\[1\] = 0"),
    ([2, 2.5], r"steps\[0\]\[1\] = 2.5"),
    ([[2, 3], 4], r"steps\[1\] = 4: expected a row"),
    (np.array([1.5, 2.0]), r"steps\[0\]\[0\] = 1.5"),
    (lambda round: [1], r"a function \(round, num_clients\) -> counts"),
    (pd.DataFrame({0: [1, 2], 1: [3, np.nan]}), "steps row 0, client 1 = 3.0: expected an integer"),
    (pd.DataFrame({0: [1, 0]}), "steps row 1, client 0 = 0"),
    (pd.DataFrame({0: [1], 2: [1]}), "steps columns = '0, 2': expected .*0 to 1"),
    (pd.DataFrame({"Unnamed: 0": [0], "0": [4], "1": [3]}), "steps columns"),
    (pd.DataFrame({"a": []}), "no rows"),
    (pd.DataFrame([[1, 2]], columns=["a", "a"]), "each name once"),
    (pd.DataFrame({"round": [0, 2], "a": [1, 1]}), "steps rounds = '0, 2'"),
    (pd.DataFrame({"round": [1, 1], "a": [1, 1]}), "steps rounds = '1, 1'"),
    (in_long_form(TABLE).iloc[1:], "no client 0 in round 0"),
    (in_long_form(TABLE)[lambda rows: rows["client"] != 2], "no client 2 in round 0"),
    (in_long_form(TABLE, first=2), "steps rounds = '2, 3, 4'"),
    (in_long_form(np.array([[1, 2]])).iloc[[0, 1, 0]], "client 0 in round 0 again"),
    ("missing.csv", "steps = 'missing.csv': expected a CSV file that exists"),
    (Path(__file__).parent, "a regular file"),
]


@pytest.mark.parametrize(("form", "message"), BAD)
def test_what_is_no_number_of_steps_is_refused_by_name(form, message):
    with pytest.raises(fg.InputError, match=message):
        fg.Setup(steps=form)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "a first line that names the columns"),
        (b"\n \n", "a first line that names the columns"),
        (b"a,b\n", "no rows"),
        (b"2,5\n3,4\n", "k.csv columns = '2, 5': expected the names of the clients"),
        (b"a,b\n1,2\n3\n", "k.csv line 3 = '1 values': expected 2"),
        (b"a,b\n1,2\n\n3,0\n", "k.csv line 4, client b = 0"),
        (b"a,b\n1,1.5\n", "k.csv line 2, client b = '1.5': expected an integer"),
        (b"a,b\n1,1_000\n", "client b = '1_000'"),
        (b"a,b\n1,99999999999999999999999\n", "client b = '9999"),
        (b"a,b\n1,20000000\n", r"steps\[0\]\[1\] = 20000000"),
        (b"a,b\n1,\xff\n", "can be read"),
        (b'a,b\n1,"2\n', "can be read"),
        (b"round,client,steps\n0,0,5\n0,1,x\n", "k.csv line 3, steps = 'x'"),
        (b"round,client,steps\n0,0,5\n0,9223372036854775807,5\n", "no client 1 in round 0"),
    ],
)
def test_a_csv_file_that_is_no_trace_is_refused_with_its_line(content, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("k.csv").write_bytes(content)
    with pytest.raises(fg.InputError, match=message):
        fg.Setup(steps="k.csv")


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda t, n: [1] * (n - 1), r"steps function <lambda> of round 1 = 'shape \(5,\)': .* each of 6 clients"),
        (lambda t, n: 5, "one number for each of 6 clients"),
        (lambda t, n: [1.0] * n, "integers"),
        (lambda t, n: [0] * n, "from 1 to 10000000"),
    ],
)
def test_the_counts_of_a_function_are_checked_before_round_1(function, message):
    with pytest.raises(fg.InputError, match=message):
        quadratics().simulate(fg.FedAvg(lr=0.01), rounds=2, steps=function)


def test_the_counts_of_a_function_are_checked_in_every_round():
    with pytest.raises(fg.InputError, match="of round 2"):
        quadratics().simulate(fg.FedAvg(lr=0.01), rounds=2, steps=lambda t, n: [1 - t] * n)


def test_a_function_that_answers_differently_each_time_is_refused():
    """A run asks for the counts of a round more than once, and every process asks for itself."""
    rng = np.random.default_rng(0)
    with pytest.raises(fg.InputError, match="the same counts whenever it is called"):
        quadratics().simulate(fg.FedAvg(lr=0.01), rounds=2, steps=lambda t, n: rng.integers(1, 1000, n))


def test_a_csv_file_is_read_without_pandas(tmp_path):
    (tmp_path / "k.csv").write_text("0,1\n3,4\n")
    code = "import sys, fedagrac as fg; print(fg.Setup(steps='k.csv').schedule, 'pandas' in sys.modules)"
    out = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "Explicit(table=((3, 4),)) False"
