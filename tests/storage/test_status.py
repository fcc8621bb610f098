"""The status of a live run, from run folders written by hand."""

import json
import os
import re
import time

import pytest

from command_line import command
from fedagrac.errors import InputError
from fedagrac.parsing import utc
from fedagrac.storage.activity import last_rounds
from fedagrac.storage.claims import claimed
from fedagrac.storage.status import read_status
from run_folders import record, write_run

SETTINGS = {"rounds": 5, "clients": 4, "round_seconds": 60.0, "wait_seconds": 30.0, "attempts": 2}


@pytest.fixture(autouse=True)
def _eighty_columns(monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("NO_COLOR", "1")


def live(number, used, dropped=None, seen="2026-01-05T12:00:00Z", accuracy=0.5, **more):
    """Return a round of a live fleet; a used client has (weight, steps, seconds), a dropped one a reason."""
    dropped = dropped or {}
    fields = {
        "asked": len(used) + len(dropped),
        "dropped": sorted(dropped),
        "weights": {str(i): weight for i, (weight, _, _) in used.items()},
        "steps": {str(i): steps for i, (_, steps, _) in used.items()},
        "seconds": {str(i): seconds for i, (_, _, seconds) in used.items()},
        "sent": {str(i): 2000 for i in (*used, *dropped)},
        "received": {str(i): 1000 for i in used},
        "seen": {str(i): seen for i in used},
        "reasons": {str(i): reason for i, reason in dropped.items()},
        "events": [f"client {i}: {reason}" for i, reason in dropped.items()],
    }
    return record(number, accuracy, 1.0, **{**fields, "clients": len(used), "wall_time": 10.0 * number, **more})


ROUNDS = [
    live(1, {0: (0.5, 4, 1.0), 1: (0.3, 6, 2.0), 2: (0.2, 2, 9.0)}),
    live(2, {0: (0.7, 4, 3.0), 1: (0.3, 8, 4.0)}, {2: "no reply to train.steps within 60 s"}),
    live(3, {0: (0.7, 4, 2.0), 2: (0.3, 4, 5.0)}, {1: "its node left"}, seen="2026-01-05T12:01:00Z"),
    live(4, {0: (1.0, 4, 2.0)}, {2: "its update is 37 x the median"}, seen="2026-01-05T12:02:00Z", accuracy=0.625),
]


def test_the_numbers_of_each_client_are_means_sums_and_last_values(tmp_path):
    status = read_status(write_run(tmp_path / "run", ROUNDS, status=None, **SETTINGS))
    rows = [activity.row() for activity in status.activities]
    assert [row["client"] for row in rows] == [2, 1, 0]  # dropped twice, once and never
    assert rows[0] == {
        "client": 2, "rounds": 2, "weight": pytest.approx(0.25), "steps": 3.0, "seconds": 7.0, "last_seconds": 5.0,
        "sent": 8000, "received": 2000, "seen": "2026-01-05T12:01:00Z", "dropped": 2,
        "reason": "its update is 37 x the median", "reason_round": 4,
    }  # fmt: skip
    assert (rows[1]["weight"], rows[1]["steps"], rows[1]["seconds"]) == (pytest.approx(0.3), 7.0, 3.0)
    assert (rows[1]["seen"], rows[1]["reason"], rows[1]["reason_round"]) == (
        "2026-01-05T12:00:00Z", "its node left", 3
    )  # fmt: skip
    assert (rows[2]["rounds"], rows[2]["dropped"], rows[2]["reason"]) == (4, 0, None)


def test_a_running_server_shows_its_round_and_when_it_will_end(tmp_path):
    """Rounds take 10 s and round 5 of 7 began 4 s ago: it ends in 6 s, and the last one 20 s later."""
    folder = write_run(tmp_path / "run", ROUNDS, status=None, **{**SETTINGS, "rounds": 7})
    with claimed(folder):
        began = max((folder / name).stat().st_mtime for name in ("history.jsonl", ".lock"))
        status = read_status(folder, now=began + 4)
    assert (status.state, status.reason, status.last.round, status.since) == ("running", "", 4, began)
    assert status.end - (began + 4) == pytest.approx(26)
    assert not status.stalled


def test_a_round_that_takes_longer_than_it_may_is_stalled(tmp_path):
    """60 s x 2 attempts + 30 s = 150 s."""
    folder = write_run(tmp_path / "run", ROUNDS, status=None, **SETTINGS)
    with claimed(folder):
        began = max((folder / name).stat().st_mtime for name in ("history.jsonl", ".lock"))
        assert [read_status(folder, now=began + s).stalled for s in (149, 151)] == [False, True]


def test_a_server_that_resumes_after_days_is_not_stalled(tmp_path):
    folder = write_run(tmp_path / "run", ROUNDS, status=None, **SETTINGS)
    with claimed(folder):
        pass
    for name in ("history.jsonl", ".lock"):
        os.utime(folder / name, (1.7e9, 1.7e9))
    with claimed(folder):
        status = read_status(folder)
    assert time.time() - status.since < 60
    assert not status.stalled


def test_a_server_that_waits_for_its_clients_is_starting(tmp_path, capsys):
    with claimed(tmp_path):
        assert read_status(tmp_path).state == "starting"
        code, out, _ = command("flower", "status", str(tmp_path), capsys=capsys)
    assert code == 0
    assert "starting" in out
    assert re.search(r"waiting for clients for \d+ s", out)


ENDS = {
    "finished": (0, "finished"),
    "stopped": (0, "stopped"),
    "diverged": (1, "diverged"),
    None: (1, "interrupted"),
}


@pytest.mark.parametrize("status", ENDS)
def test_the_exit_code_tells_a_good_run_from_a_bad_one(status, tmp_path, capsys):
    code, state = ENDS[status]
    folder = write_run(tmp_path / "run", ROUNDS, status=status, reason="so it is", **SETTINGS)
    found, out, _ = command("flower", "status", str(folder), capsys=capsys)
    assert found == code
    assert f": {state}: " in " ".join(out.split())


def test_a_failed_run_says_so(tmp_path, capsys):
    folder = write_run(tmp_path / "run", ROUNDS, status=None, **SETTINGS)
    (folder / "failure.json").write_text(json.dumps({"reason": "too few replies", "events": ["client 3: no"]}))
    code, out, _ = command("flower", "status", str(folder), capsys=capsys)
    assert code == 1
    assert "failed: too few replies" in " ".join(out.split())
    assert "round 5: client 3: no" in out


def test_the_status_of_an_earlier_end_does_not_count_for_a_run_that_went_on(tmp_path):
    folder = write_run(tmp_path / "run", ROUNDS, status=None, **SETTINGS)
    (folder / "status.json").write_text(json.dumps({"status": "finished", "reason": "all 2 rounds", "rounds": 2}))
    assert read_status(folder).state == "interrupted"


def test_the_page_for_a_terminal_has_eighty_columns(tmp_path, capsys):
    now = utc(time.time() - 600)
    used, dropped = dict.fromkeys(range(5, 1000), (1 / 995, 123_456, 1234.5)), dict.fromkeys(range(5), "no")
    sent, received = ({str(c): size for c in range(1000)} for size in (123_456_789, 10**9))
    rounds = [live(i, used, dropped, seen=now, sent=sent, received=received) for i in range(1, 4)]
    folder = write_run(tmp_path / "run", rounds, rounds=10_000, clients=1002)
    code, out, _ = command("flower", "status", str(folder), capsys=capsys)
    assert code == 0
    assert max(map(len, out.splitlines())) <= 80
    lines = out.splitlines()
    header = next(i for i, line in enumerate(lines) if line.split()[:2] == ["client", "rounds"])
    assert lines[header + 1].split() == ["0", "0", "-", "-", "-", "-", "370", "MB", "3", "GB", "3", "-"]
    assert lines[header + 6].split() == [
        "5", "3", "0.001005", "123456", "1234", "1234", "370", "MB", "3", "GB", "0", "10", "min", "ago"
    ]  # fmt: skip
    assert "and 980 more clients, which were dropped less often; --json lists all" in out
    assert "2 of 1,002 clients took no part in these rounds" in out
    assert "client 0 was last dropped in round 3: no" in out


def test_json_has_every_client_and_times_in_utc(tmp_path, capsys):
    folder = write_run(tmp_path / "run", ROUNDS, **SETTINGS)
    code, out, _ = command("flower", "status", str(folder), "--json", capsys=capsys)
    values = json.loads(out)
    assert code == 0
    assert (values["state"], values["reason"], values["rounds"]) == ("finished", "all rounds done", 5)
    assert values["last"] == {
        "round": 4, "test_accuracy": 0.625, "test_loss": 1.0, "train_loss": 1.0, "asked": 2, "clients": 1,
        "bytes_total": 4000, "wall_time": 40.0,
    }  # fmt: skip
    assert [row["client"] for row in values["activities"]] == [2, 1, 0]
    assert values["events"][-1] == {"round": 4, "event": "client 2: its update is 37 x the median"}


def test_a_long_history_is_read_from_its_end(tmp_path):
    path = write_run(tmp_path / "run", [live(i, {0: (1.0, 4, 1.0)}) for i in range(1, 2001)]) / "history.jsonl"
    length = len(path.read_bytes().splitlines()[-1]) + 1
    rounds, complete = last_rounds(path, most_bytes=10 * length + 5)
    assert [line.round for line in rounds] == list(range(1991, 2001))
    assert not complete
    last = path.read_bytes().splitlines()[-1]
    os.truncate(path, 200 * 10**9)  # a hole before the last line costs nothing
    with path.open("ab") as file:
        file.write(b"\n" + last.replace(b'"round": 2000', b'"round": 2001') + b"\n")
    rounds, _ = last_rounds(path, most_bytes=2 * length)
    assert [line.round for line in rounds] == [2001]


def test_a_line_that_is_being_written_is_left_out(tmp_path):
    folder = write_run(tmp_path / "run", ROUNDS, status=None, **SETTINGS)
    with (folder / "history.jsonl").open("a") as file:
        file.write('{"round": 5, "test_acc')
    assert read_status(folder).last.round == 4


def test_text_from_clients_is_escaped(tmp_path, capsys):
    evil = "\x1b]0;mine\x07 [red]x[/] \u202e" + 1000 * "y"
    folder = write_run(tmp_path / "run", [live(1, {0: (1.0, 4, 1.0)}, {1: evil})], reason=evil, **SETTINGS)
    code, out, _ = command("flower", "status", str(folder), capsys=capsys)
    assert code == 0
    assert "\x1b" not in out
    assert "\u202e" not in out
    assert r"\x1b]0;mine\x07 [red]x[/]" in out.replace("\n", "")
    assert len(out) < 5000


BAD_LINES = {
    "no JSON": b"{",
    "no round": b"{}",
    "a client that is a word": b'{"round": 1, "weights": {"a": 1.0}}',
    "a weight that is a text": b'{"round": 1, "weights": {"1": "x"}}',
    "an infinite weight": b'{"round": 1, "weights": {"1": 1e999}}',
    "a time that is no time": b'{"round": 1, "seen": {"1": "\\u001b[2J"}}',
    "rounds that go back": b'{"round": 2}\n{"round": 1}',
    "deep nesting": b'{"round": 1, "x": ' + b"[" * 100_000,
    "a huge number": b'{"round": 1, "asked": ' + b"9" * 5000 + b"}",
}


@pytest.mark.parametrize("fault", BAD_LINES)
def test_a_history_that_is_wrong_is_bad_input(fault, tmp_path, capsys):
    folder = write_run(tmp_path / "run", [], **SETTINGS)
    (folder / "history.jsonl").write_bytes(BAD_LINES[fault] + b"\n")
    code, _, err = command("flower", "status", str(folder), capsys=capsys)
    assert code == 2
    assert "history.jsonl" in err
    assert "\x1b" not in err


@pytest.mark.parametrize("name", ["experiment.toml", "status.json", "failure.json"])
@pytest.mark.parametrize("content", [b"\xff", b"[" * 100_000, b'{"a": 1', b"[]", b"rounds = 'x'"])
def test_other_files_that_are_wrong_are_bad_input(name, content, tmp_path, capsys):
    folder = write_run(tmp_path / "run", ROUNDS, **SETTINGS)
    (folder / name).write_bytes(content)
    code, _, err = command("flower", "status", str(folder), capsys=capsys)
    assert code == 2 or (name, content) == ("experiment.toml", b"[]")
    assert code == 0 or name in err


def test_a_folder_without_a_run_is_bad_input(tmp_path, capsys):
    for folder in (tmp_path, tmp_path / "missing"):
        code, _, err = command("flower", "status", str(folder), capsys=capsys)
        assert code == 2
        assert f"DIR = '{folder}'" in err.replace("\n", "")
    with pytest.raises(InputError, match="folder"):
        read_status(tmp_path)


def test_an_old_history_without_the_fields_still_reads(tmp_path):
    status = read_status(write_run(tmp_path / "run", [record(1, 0.5), record(2, 0.6)]))
    assert (status.state, status.last.round, status.activities, status.events) == ("finished", 2, [], [])
