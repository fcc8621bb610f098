"""What an operator sees of a live run: clients in the history, JSON logs, metrics and the health probe."""

import json
import logging
import re
import socket
import threading
import time
import urllib.error
import urllib.request

import numpy as np
import pytest
import torch

import fedagrac as fg
from fedagrac.errors import FedagracError
from fedagrac.parsing import utc
from fedagrac.rounds.exchange import Contact
from fedagrac.rounds.record import EXAMPLE, RoundRecord
from fedagrac.storage.claims import is_claimed
from fedagrac.storage.status import read_status

pytest.importorskip("flwr", reason="the extra fedagrac[flower] is not installed")

from flwr.app import Array, Context, Error, Message, RecordDict

from fedagrac.flower import client_app
from fedagrac.flower import logs as logs_module
from fedagrac.flower.logs import json_log
from fedagrac.flower.metrics import Gauges, metrics_server
from fedagrac.flower.server import initial_model, run_federation
from fedagrac.flower.settings import Settings

FED = fg.Federation.load("digits", clients=3, partition=fg.Dirichlet(0.5), seed=0)
SIZE = 64 * 10 + 10
TIME = r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ"


@pytest.fixture(autouse=True)
def _a_task(monkeypatch):
    """Enter a Flower task, inside which messages must be made."""
    from flwr.supercore.task_identity import TaskIdentity

    for name, value in (("_run_id", 1), ("_node_id", 1), ("_task_id", 1)):
        monkeypatch.setattr(TaskIdentity, name, value)


def model(context):
    return fg.models.build("logistic", features=64, classes=10)


def data(context):
    samples = FED.samples_of(context.node_config["partition-id"])
    return FED.inputs[samples], FED.targets[samples]


class Grid:
    """Flower's Grid in memory with three nodes. `spoil(client, round, reply)` may change a reply or lose it."""

    def __init__(self, settings, spoil=lambda client, round, reply: reply):
        self.app, self.spoil, self.waiting, self.number = client_app(model, data), spoil, {}, 0
        self.contexts = {10 + i: Context(1, 0, {"partition-id": i}, RecordDict(), settings) for i in range(3)}

    def get_node_ids(self):
        return list(self.contexts)

    def push_messages(self, messages):
        for message in messages:
            self.number += 1
            message.metadata.__dict__["_message_id"] = f"m{self.number}"
            self.waiting[f"m{self.number}"] = message
            yield f"m{self.number}"

    def pull_messages(self, numbers):
        for number in [n for n in numbers if n in self.waiting]:
            message = self.waiting[number]
            node = message.metadata.dst_node_id
            if node not in self.contexts:
                continue
            reply = self.app(message, self.contexts[node])
            if message.metadata.message_type == "train.steps":
                reply = self.spoil(node - 10, int(message.metadata.group_id), reply)
            if reply is not None:
                del self.waiting[number]
                yield reply


def config(tmp_path, **changes):
    settings = {
        "clients": 3, "min_clients": 2, "rounds": 3, "batch_size": 10, "dtype": "float64", "round_seconds": 0.3,
        "wait_seconds": 5.0, "poll_seconds": 0.01, "out": str(tmp_path / "run"), "algorithm.name": "fedavg",
        "algorithm.lr": 0.1, "steps.kind": "explicit", "steps.table": "[[3, 5, 12]]",
    }  # fmt: skip
    return {**settings, **{key.replace("__", "."): value for key, value in changes.items()}}


def federation(tmp_path, spoil=None, callbacks=(), **changes):
    settings = config(tmp_path, **changes)
    grid = Grid(settings, *([spoil] if spoil else []))
    checked = Settings.of(settings)
    return run_federation(grid, checked, initial_model(checked, model, None), test=FED.test, callbacks=callbacks)


def fail(reply, reason):
    return Message(metadata=reply.metadata, error=Error(code=2, reason=reason))


def scaled(reply, factor):
    vectors = reply.content.array_records["vectors"]
    vectors["model"] = Array(vectors["model"].numpy() * factor)
    return reply


def test_the_history_says_of_every_client_how_long_it_took_and_what_it_cost(tmp_path):
    before = time.time()
    run = federation(tmp_path)
    stored = [json.loads(line) for line in (tmp_path / "run" / "history.jsonl").read_text().splitlines()]
    assert stored == [dict(record) for record in run.history]
    for record in stored:
        assert list(record["sent"]) == list(record["received"]) == list(record["seconds"]) == ["0", "1", "2"]
        # FedAvg: one vector down and one up, 8 bytes a number
        assert record["sent"] == record["received"] == dict.fromkeys("012", 8 * SIZE)
        assert sum(record["sent"].values()) == record["bytes_down"]
        assert all(0 <= seconds < 60 for seconds in record["seconds"].values())
        assert all(re.fullmatch(TIME, seen) for seen in record["seen"].values())
        assert record["reasons"] == {}
    assert utc(before) <= min(stored[0]["seen"].values()) <= max(stored[2]["seen"].values()) <= utc(time.time())


def test_bytes_of_the_clients_add_up_to_the_total_with_gradients_at_the_start(tmp_path):
    run = federation(tmp_path, algorithm__name="fedagrac", algorithm__init="full")
    sums = [sum(record[name].values()) for record in run.history for name in ("sent", "received")]
    assert sum(sums) == run.history[-1].bytes_total
    # round 1 also counts the greeting: x_1 down, the gradient up
    assert run.history[0]["sent"]["0"] - run.history[1]["sent"]["0"] == 8 * SIZE


REASONS = {
    "silent": (lambda reply: None, "no reply to train.steps within 0.3 s"),
    "error": (lambda reply: fail(reply, "out of memory\x1b[2J"), "out of memory\\x1b[2J"),
    "not finite": (lambda reply: scaled(reply, np.nan), "reply dropped, model holds NaN or infinity"),
    "too long": (lambda reply: scaled(reply, 1e6), r"its update is \S+ x the median"),
}


@pytest.mark.parametrize("fault", REASONS)
def test_the_reason_why_a_client_was_dropped_is_in_the_history(fault, tmp_path):
    change, reason = REASONS[fault]
    run = federation(
        tmp_path, lambda c, t, reply: change(reply) if (c, t) == (1, 2) else reply, guard__factor=10.0
    )
    assert [record["dropped"] for record in run.history] == [[], [1], []]
    assert [list(record["reasons"]) for record in run.history] == [[], ["1"], []]
    told = run.history[1]["reasons"]["1"]
    assert re.fullmatch(reason, told) if fault == "too long" else told == reason
    answered = fault in ("not finite", "too long")
    assert ("1" in run.history[1]["seconds"]) == ("1" in run.history[1]["seen"]) == answered
    assert run.history[1]["sent"]["1"] == 8 * SIZE


def test_a_client_whose_node_left_in_the_round_is_dropped_for_that(tmp_path, monkeypatch):
    monkeypatch.setattr("fedagrac.flower.link.LOOK_SECONDS", 0.05)
    settings = config(tmp_path, round_seconds=20.0)

    def leave(client, round, reply):
        if (client, round) == (1, 2):
            grid.contexts.pop(11, None)
            return None
        return reply

    grid = Grid(settings, leave)
    checked = Settings.of(settings)
    run = run_federation(grid, checked, initial_model(checked, model, None))
    assert run.history[1]["reasons"] == {"1": "its node left"}
    assert run.history[2]["reasons"] == {}  # it was not asked


def test_reasons_from_clients_are_bounded(tmp_path):
    run = federation(tmp_path, lambda c, t, reply: fail(reply, "x" * 100_000) if c == 1 else reply, rounds=1)
    assert run.history[0]["reasons"] == {"1": "x" * 300}


def test_simulations_write_the_fields_they_always_wrote():
    result = fg.simulate(model(None), FED, fg.algorithm("fedavg", lr=0.1), rounds=1, guard=fg.Guard(10.0))
    assert not {"seconds", "sent", "received", "seen", "reasons"} & set(result.history[0])


def test_numbers_do_not_change_with_logs_and_metrics(tmp_path):
    pytest.importorskip("prometheus_client", reason="prometheus-client is not installed")
    plain = federation(tmp_path / "a").state["x"]
    watched = federation(tmp_path / "b", log="json", metrics_port=free_port()).state["x"]
    assert torch.equal(plain, watched)


def lines_of(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_json_logs_hold_one_object_a_line_with_round_and_client(tmp_path, caplog):
    caplog.set_level(logging.INFO, logger="fedagrac")
    federation(tmp_path, lambda c, t, reply: None if (c, t) == (1, 2) else reply, log="json")
    lines = lines_of(tmp_path / "run" / "log.jsonl")
    assert all(list(line) == ["time", "level", "event", "round", "client", "message"] for line in lines)
    assert all(re.fullmatch(TIME, line["time"]) for line in lines)
    assert [(line["event"], line["round"]) for line in lines if line["event"] in ("round", "end")] == [
        ("round", 1), ("round", 2), ("round", 3), ("end", 3)
    ]  # fmt: skip
    (silent,) = [line for line in lines if line["event"] == "no_reply"]
    assert (silent["level"], silent["round"], silent["client"]) == ("warning", 2, 1)
    assert silent["message"] == "client 1: no reply to train.steps within 0.3 s"
    assert not any(isinstance(handler, logging.FileHandler) for handler in logging.getLogger("fedagrac").handlers)


def test_no_log_file_is_written_by_default(tmp_path):
    federation(tmp_path, rounds=1)
    assert not (tmp_path / "run" / "log.jsonl").exists()


def test_hostile_messages_stay_on_one_line_of_bounded_length(tmp_path):
    with json_log(tmp_path):
        logging.getLogger("fedagrac").warning("%s", 'client 3: a\n{"level": "info"}\x1b]0;x\x07' + 10_000 * "y")
    (line,) = lines_of(tmp_path / "log.jsonl")
    assert line["client"] == 3
    assert line["message"].startswith(r'client 3: a\n{"level": "info"}\x1b]0;x\x07yyy')
    assert len(line["message"]) == 2000


def test_log_files_are_rotated(tmp_path, monkeypatch):
    monkeypatch.setattr(logs_module, "LARGEST_LOG", 1000)
    with json_log(tmp_path):
        for number in range(100):
            logging.getLogger("fedagrac").warning("message %d", number)
    files = sorted(tmp_path.iterdir())
    assert [file.name for file in files] == ["log.jsonl", "log.jsonl.1", "log.jsonl.2"]
    assert all(file.stat().st_size <= 1000 and not file.stat().st_mode & 0o002 for file in files)
    assert lines_of(files[0])[-1]["message"] == "message 99"


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def get(port, path):
    """Return the status and the text of an answer."""
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=20) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def samples(text):
    """Return every sample of an exposition: (name, labels) -> value."""
    parser = pytest.importorskip("prometheus_client.parser", reason="prometheus-client is not installed")
    return {
        (sample.name, *sample.labels.values()): sample.value
        for family in parser.text_string_to_metric_families(text)
        for sample in family.samples
    }


class Ask(fg.Callback):
    """Ask the server in this process for its metrics after every round, as Prometheus would."""

    def __init__(self, port):
        self.port, self.answers = port, []

    def on_round(self, run, record):
        self.answers.append((get(self.port, "/metrics"), get(self.port, "/healthz")))


def test_metrics_are_those_of_the_rounds(tmp_path):
    pytest.importorskip("prometheus_client", reason="prometheus-client is not installed")
    port = free_port()
    ask = Ask(port)
    run = federation(
        tmp_path, lambda c, t, reply: None if (c, t) == (1, 2) else reply, [ask], metrics_port=port, rounds=4
    )
    # callbacks of the user come before the metrics are updated, so the answer after round 4 is that of round 3
    metrics = [samples(text) for (code, text), _ in ask.answers]
    assert [values["fedagrac_rounds_total",] for values in metrics] == [0, 1, 2, 3]
    last, record = metrics[3], run.history[2]
    assert last["fedagrac_rounds_planned",] == 4
    assert last["fedagrac_test_accuracy",] == record.test_accuracy
    assert last["fedagrac_test_loss",] == pytest.approx(record.test_loss, rel=1e-9)
    states = {name[1]: value for name, value in last.items() if name[0] == "fedagrac_run_status"}
    assert states == {
        "running": 1, "starting": 0, "finished": 0, "stopped": 0, "diverged": 0, "failed": 0
    }  # fmt: skip
    counts = ("connected", "asked", "used", "dropped")
    assert [[values.get(("fedagrac_clients", name)) for name in counts] for values in metrics] == [
        [3, None, None, None], [3, 3, 3, 0], [3, 3, 2, 1], [3, 3, 3, 0]
    ]  # fmt: skip
    for client in "012":
        assert last["fedagrac_client_sent_bytes_total", client] == 3 * 8 * SIZE
        assert last["fedagrac_client_received_bytes_total", client] == (2 if client == "1" else 3) * 8 * SIZE
        assert last["fedagrac_client_dropped_rounds_total", client] == (client == "1")
        assert last["fedagrac_client_weight", client] == pytest.approx(record["weights"][client])
        assert last["fedagrac_client_reply_seconds", client] == pytest.approx(record["seconds"][client], abs=1e-3)
        assert abs(time.time() - last["fedagrac_client_last_seen_timestamp_seconds", client]) < 300
    assert metrics[2]["fedagrac_client_weight", "1"] == 0
    healths = [(code, json.loads(text)) for _, (code, text) in ask.answers]
    assert [(code, health["status"], health["round"]) for code, health in healths] == [
        (200, "running", 0), (200, "running", 1), (200, "running", 2), (200, "running", 3)
    ]  # fmt: skip
    with pytest.raises(urllib.error.URLError):  # the port is closed with the run
        get(port, "/healthz")


def test_the_probe_fails_when_nothing_happens_for_too_long(tmp_path):
    pytest.importorskip("prometheus_client", reason="prometheus-client is not installed")
    gauges = Gauges(rounds=10, patience=0.2, connected=lambda: 0)
    with metrics_server(gauges, "127.0.0.1", 0) as port:
        gauges.begin(None)
        assert get(port, "/healthz")[0] == 200
        time.sleep(0.3)
        code, text = get(port, "/healthz")
        assert (code, json.loads(text)["status"]) == (503, "stalled")
        assert json.loads(text)["seconds_since_last_round"] >= 0.3
        gauges.begin(None)
        assert get(port, "/healthz")[0] == 200
        gauges.state = "failed"
        assert get(port, "/healthz")[0] == 503
        assert get(port, "/")[0] == 404


def test_patience_is_that_of_the_settings(tmp_path):
    """600 s x 3 attempts + 300 s = 2100 s."""
    gauges = Gauges(10, patience=600.0 * 3 + 300.0, connected=lambda: 0, state="running")
    assert gauges.health(gauges.progress + 2099)[0] == 200
    assert gauges.health(gauges.progress + 2101)[0] == 503


def test_only_a_thousand_clients_have_labels():
    pytest.importorskip("prometheus_client", reason="prometheus-client is not installed")
    weights = {str(i): 1 / 1500 for i in range(1500)}
    record = RoundRecord.of({**EXAMPLE, "asked": 1500, "weights": weights, "dropped": []})
    gauges = Gauges(10, 60.0, connected=lambda: 1500)
    gauges.take_in(record, {i: Contact(sent=8, seen=1.0) for i in range(1500)})
    with metrics_server(gauges, "127.0.0.1", 0) as port:
        _, text = get(port, "/metrics")
    labelled = [name for name in samples(text) if name[0] == "fedagrac_client_sent_bytes_total"]
    assert len(labelled) == 1000
    assert samples(text)["fedagrac_clients", "used"] == 1500
    assert "Clients 0 to 999 only." in text


def test_a_client_that_takes_no_part_in_a_round_has_weight_zero_and_keeps_its_totals():
    gauges = Gauges(10, 60.0, connected=lambda: 2)
    for weights in ({"0": 0.5, "1": 0.5}, {"0": 1.0}):
        contacts = {int(client): Contact(sent=8, seen=1.0) for client in weights}
        gauges.take_in(RoundRecord.of({**EXAMPLE, "asked": 2, "weights": weights}), contacts)
    assert [(totals.weight, totals.sent) for totals in gauges.clients.values()] == [(1.0, 16), (0.0, 8)]


def test_many_silent_connections_do_not_add_threads(tmp_path):
    pytest.importorskip("prometheus_client", reason="prometheus-client is not installed")
    with metrics_server(Gauges(1, 60.0, connected=lambda: 0), "127.0.0.1", 0) as port:
        before = threading.active_count()
        silent = [socket.create_connection(("127.0.0.1", port)) for _ in range(60)]
        time.sleep(0.5)
        assert threading.active_count() <= before + 16
        for connection in silent:
            connection.close()


def test_a_taken_port_is_named_at_the_start(tmp_path):
    pytest.importorskip("prometheus_client", reason="prometheus-client is not installed")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(fg.InputError, match=rf"metrics_port = {port}: expected a free port"):
            federation(tmp_path, metrics_port=port)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(("host", "warned"), [("127.0.0.1", False), ("localhost", False), ("0.0.0.0", True)])
def test_an_open_address_logs_a_warning(host, warned, caplog):
    pytest.importorskip("prometheus_client", reason="prometheus-client is not installed")
    with metrics_server(Gauges(1, 60.0, connected=lambda: 0), host, 0):
        pass
    assert ("without authentication" in caplog.text) == warned


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"log": "xml"}, "log = 'xml': expected 'text' or 'json'"),
        ({"metrics_port": 70_000}, "metrics_port = 70000: expected an integer of at most 65535"),
    ],
)
def test_wrong_settings_are_named(changes, message, tmp_path):
    with pytest.raises(fg.InputError, match=message):
        Settings.of(config(tmp_path, **changes))


def test_a_failed_run_says_why_until_it_resumes(tmp_path):
    bad = {"on": True}

    def silent(client, round, reply):
        return None if bad["on"] and round == 2 and client < 2 else reply

    with pytest.raises(FedagracError, match="usable replies"):
        federation(tmp_path, silent, attempts=1, log="json")
    status = read_status(tmp_path / "run")
    assert (status.state, status.last.round) == ("failed", 1)
    assert status.reason.startswith("round 2: fewer than min_clients = 2 usable replies in attempts = 1")
    assert status.events[0] == (2, "client 0: no reply to train.steps within 0.3 s")
    assert lines_of(tmp_path / "run" / "log.jsonl")[-1]["event"] == "failed"
    bad["on"] = False
    federation(tmp_path, silent)
    status = read_status(tmp_path / "run")
    assert (status.state, status.reason, status.last.round) == ("finished", "all 3 rounds done", 3)


def test_a_refused_attempt_leaves_the_status_of_the_folder(tmp_path):
    federation(tmp_path, rounds=1)
    with pytest.raises(fg.InputError, match="out"):
        federation(tmp_path, seed=5)
    assert read_status(tmp_path / "run").state == "finished"


class Look(fg.Callback):
    def __init__(self, folder):
        self.folder, self.seen = folder, []

    def on_round(self, run, record):
        self.seen.append((is_claimed(self.folder), read_status(self.folder)))


def test_the_status_is_read_while_the_server_runs(tmp_path):
    look = Look(tmp_path / "run")
    federation(tmp_path, lambda c, t, reply: None if (c, t) == (1, 2) else reply, [look])
    assert [(alive, status.state, status.last.round) for alive, status in look.seen] == [
        (True, "running", 1), (True, "running", 2), (True, "running", 3)
    ]  # fmt: skip
    first = look.seen[1][1].activities[0]
    assert (first.client, first.rounds, first.dropped) == (1, 1, 1)
    assert first.reason == "no reply to train.steps within 0.3 s"
    assert read_status(tmp_path / "run").state == "finished"
