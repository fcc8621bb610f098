"""Prometheus metrics and a health probe over HTTP, for whoever watches a server.

A thread answers from numbers that the round loop leaves here after every round. It never calls back into the run,
and no request can end or hold up the run. There is no authentication.
"""

from __future__ import annotations

import contextlib
import http.server
import ipaddress
import json
import logging
import socket
import socketserver
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from fedagrac.errors import FedagracError, InputError
from fedagrac.rounds.exchange import Contact

if TYPE_CHECKING:
    from collections.abc import Mapping

    from fedagrac.rounds.record import RoundRecord

__all__ = ["ClientTotals", "Gauges", "metrics_server"]

log = logging.getLogger("fedagrac")

MOST_LABELLED = 1000
"""Only clients with a smaller number have metrics of their own, because every label costs Prometheus memory."""

STATES = ("starting", "running", "finished", "stopped", "diverged", "failed")

MEASURES = {
    "test_accuracy": "Last test accuracy, as a fraction.",
    "test_loss": "Last test loss.",
    "train_loss": "Training loss of the last round.",
}

MOST_REQUESTS = 16
"""How many requests are answered at a time. Further connections are closed."""

REQUEST_SECONDS = 5.0
"""How long a request may be silent."""


@dataclass
class ClientTotals:
    """The numbers of one client since the server started.

    The weight is that of the last round, 0 if the client does not count in it. The seconds are those of its last
    reply.
    """

    weight: float = 0.0
    seconds: float | None = None
    seen: float | None = None
    sent: int = 0
    received: int = 0
    dropped: int = 0


@dataclass(eq=False)
class Gauges:
    """The numbers that are served.

    Attributes:
        rounds: the number of rounds to do.
        patience: how many seconds may pass without a new round while the server is healthy.
        connected: returns the number of connected clients.
        state: one of `STATES`.
        record: the last round; None before the first.
        measures: the last accuracy and losses.
        round_seconds: the seconds of the last round.
        progress: when the server started or the last round ended, on the clock `time.monotonic`.
        progress_time: the same in seconds since 1970.
        clients: the numbers of each client below `MOST_LABELLED`.

    Examples:
        >>> gauges = Gauges(rounds=10, patience=60.0, connected=lambda: 3)
        >>> gauges.health()[0], gauges.health(time.monotonic() + 61)[1]["status"]
        (200, 'stalled')
    """

    rounds: int
    patience: float
    connected: Callable[[], int]
    state: str = "starting"
    record: RoundRecord | None = None
    measures: dict[str, float] = field(default_factory=dict)
    round_seconds: float | None = None
    progress: float = field(default_factory=time.monotonic)
    progress_time: float = field(default_factory=time.time)
    clients: dict[int, ClientTotals] = field(default_factory=dict)

    def begin(self, record: RoundRecord | None) -> None:
        """Note that rounds begin after a round; None at the start."""
        self.state, self.record = "running", record
        self.progress, self.progress_time = time.monotonic(), time.time()
        if record is not None:
            self._measure(record)

    def _measure(self, record: RoundRecord) -> None:
        """Keep the last value of each measure."""
        for name in MEASURES:
            value = record[name]
            if value is not None:
                self.measures[name] = value

    def take_in(self, record: RoundRecord, contacts: Mapping[int, Contact]) -> None:
        """Update the numbers after a round."""
        now = time.monotonic()
        self.round_seconds = now - self.progress
        self._measure(record)
        clients = dict(self.clients)  # the thread reads the old table meanwhile
        for client, contact in contacts.items():
            if client < MOST_LABELLED:
                totals = clients.setdefault(client, ClientTotals())
                totals.sent += contact.sent
                totals.received += contact.received
                totals.seconds = totals.seconds if contact.seconds is None else contact.seconds
                totals.seen = totals.seen if contact.seen is None else contact.seen
        for client in record.dropped or ():
            if client < MOST_LABELLED:
                clients.setdefault(client, ClientTotals()).dropped += 1
        for client, totals in clients.items():
            totals.weight = (record.weights or {}).get(str(client), 0.0)
        self.clients, self.record = clients, record
        self.progress, self.progress_time = now, time.time()

    def health(self, now: float | None = None) -> tuple[int, dict[str, Any]]:
        """Return the HTTP status of the health probe and its content."""
        idle = (time.monotonic() if now is None else now) - self.progress
        stalled = idle > self.patience and self.state in ("starting", "running")
        status = "stalled" if stalled else self.state
        code = 503 if status in ("stalled", "failed", "diverged") else 200
        done = 0 if self.record is None else self.record.round
        return code, {"status": status, "round": done, "seconds_since_last_round": round(idle, 3)}

    def collect(self) -> Iterator[Any]:
        """Yield the metrics in the classes of prometheus_client."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        record = self.record
        done = 0 if record is None else record.round
        yield CounterMetricFamily("fedagrac_rounds", "Rounds done.", value=done)
        values: dict[str, tuple[str, float | None]] = {
            "rounds_planned": ("Rounds to do.", self.rounds),
            "round_seconds": ("Seconds of the last round.", self.round_seconds),
            "last_round_timestamp_seconds": (
                "When the last round ended or the server started.",
                self.progress_time,
            ),
        }
        values |= {name: (text, self.measures.get(name)) for name, text in MEASURES.items()}
        for name, (text, value) in values.items():
            if value is not None:
                yield GaugeMetricFamily(f"fedagrac_{name}", text, value=value)
        states = GaugeMetricFamily("fedagrac_run_status", "1 for the state of the run.", labels=["status"])
        for state in STATES:
            states.add_metric([state], float(state == self.state))
        yield states
        counts = GaugeMetricFamily(
            "fedagrac_clients", "Clients connected, and of the last round.", labels=["state"]
        )
        counts.add_metric(["connected"], self.connected())
        if record is not None:
            used = len(record.weights or ())
            for state, number in (
                ("asked", record.asked or 0),
                ("used", used),
                ("dropped", len(record.dropped or ())),
            ):
                counts.add_metric([state], number)
        yield counts
        yield from _client_families(self.clients)


def _client_families(clients: Mapping[int, ClientTotals]) -> Iterator[Any]:
    """Yield the metrics of each client."""
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

    gauges = {
        "last_seen_timestamp_seconds": ("seen", "When its last readable message arrived."),
        "reply_seconds": ("seconds", "Seconds until its last reply."),
        "weight": ("weight", "Its weight in the last round."),
    }
    counters = {
        "sent_bytes": ("sent", "Bytes of vectors sent to it."),
        "received_bytes": ("received", "Bytes of vectors received from it."),
        "dropped_rounds": ("dropped", "Rounds in which it was asked but does not count."),
    }
    for kind, names in ((GaugeMetricFamily, gauges), (CounterMetricFamily, counters)):
        for name, (attribute, text) in names.items():
            scope = f"{text} Clients 0 to {MOST_LABELLED - 1} only."
            family = kind(f"fedagrac_client_{name}", scope, labels=["client"])
            for client, totals in clients.items():
                value = getattr(totals, attribute)
                if value is not None:
                    family.add_metric([str(client)], value)
            yield family


class _Server(socketserver.ThreadingTCPServer):
    """An HTTP server with a bounded number of threads."""

    allow_reuse_address = True
    daemon_threads = True
    block_on_close = False
    request_queue_size = 128

    def __init__(self, host: str, port: int, handler: type[http.server.BaseHTTPRequestHandler]) -> None:
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._free = threading.BoundedSemaphore(MOST_REQUESTS)
        super().__init__((host, port), handler)

    def process_request(self, request: Any, client_address: Any) -> None:
        """Answer in a thread, or close the connection if there are too many."""
        if not self._free.acquire(blocking=False):
            self.shutdown_request(request)
            return
        try:
            super().process_request(request, client_address)
        except RuntimeError:  # no thread could be started
            self._free.release()
            raise

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """Answer a request."""
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._free.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore a connection that broke."""


def _handler(gauges: Gauges) -> type[http.server.BaseHTTPRequestHandler]:
    """Return the class that answers requests."""
    from prometheus_client import CollectorRegistry
    from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest

    registry = CollectorRegistry(auto_describe=False)
    registry.register(gauges)  # type: ignore[arg-type, unused-ignore]  # it only needs collect()

    class Handler(http.server.BaseHTTPRequestHandler):
        timeout = REQUEST_SECONDS
        server_version, sys_version = "fedagrac", ""

        def do_GET(self) -> None:
            path = self.path.partition("?")[0]
            if path == "/metrics":
                self._answer(200, CONTENT_TYPE_LATEST, generate_latest(registry))
            elif path == "/healthz":
                code, content = gauges.health()
                self._answer(code, "application/json", json.dumps(content).encode() + b"\n")
            else:
                self._answer(404, "text/plain", b"/metrics or /healthz\n")

        def _answer(self, code: int, kind: str, body: bytes) -> None:
            self.send_response(code)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: Any) -> None:
            """Log nothing, because a request may hold anything."""

    return Handler


@contextlib.contextmanager
def metrics_server(gauges: Gauges, host: str, port: int) -> Iterator[int]:
    """Serve /metrics and /healthz inside the block. Yield the port, which the system chooses for port 0.

    Args:
        gauges: the numbers.
        host: an address of this machine.
        port: the port.
    """
    try:
        handler = _handler(gauges)
    except ImportError as error:
        raise FedagracError("metrics_port needs prometheus-client: pip install 'fedagrac[flower]'") from error
    try:
        server = _Server(host, port, handler)
    except OSError as error:
        accepted = (
            f"a free port at an address of this machine, metrics_host = {host!r} ({error.strerror or error})"
        )
        raise InputError("metrics_port", port, accepted) from None
    if not _is_loopback(host):
        log.warning("metrics are open to the network on port %d, without authentication", server.server_address[1])
    thread = threading.Thread(target=server.serve_forever, args=(0.1,), name="metrics", daemon=True)
    thread.start()
    try:
        yield int(server.server_address[1])
    finally:
        server.shutdown()
        server.server_close()


def _is_loopback(host: str) -> bool:
    """Return whether only this machine can reach an address."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
