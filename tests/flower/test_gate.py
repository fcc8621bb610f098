"""The gate passes requests of nodes on to the SuperLink, and nothing else."""

import asyncio

import pytest

pytest.importorskip("flwr", reason="the extra fedagrac[flower] is not installed")

import httpx

import fedagrac as fg
from fedagrac.flower.gate import Gate, run_gate
from fedagrac.flower.keys import write_keys

REFUSED = [
    "/v1/control/start-run", "/v1/control/register-node", "/v1/control/stop-run", "/v1/control/list-runs",
    "/v1/runtime/acquire-task", "/v1/runtime/pull-task-input", "/docs", "/openapi.json", "/health", "/", "",
    "/v1/fleet/../control/start-run", "/v1/fleet/%2e%2e/control/start-run", "/v1/fleet/..%2fcontrol/start-run",
    "//v1/control/start-run", "/v1/fleet//v1/control/start-run", "/V1/CONTROL/start-run", "/v1/fleet/",
    "/v1/fleet/pull-messages/", "/v1/fleet/pull-messages\n", "/v1/fleet/pull-messages;x", "http://x/v1/control/start-run",
]  # fmt: skip


async def question():
    yield b"who are "
    yield b"you"


def ask(path, body=(b"abc",), method="POST", query=b"", answer=None, most_bytes=1000):
    """Send one request to a gate. Return the status, the body, and what reached the SuperLink."""
    reached, sent = [], []
    pieces = [{"type": "http.request", "body": piece, "more_body": True} for piece in body]
    pieces.append({"type": "http.request", "body": b""})

    async def superlink(request):
        reached.append((request.method, str(request.url), await request.aread(), dict(request.headers)))
        return (answer or (lambda request: httpx.Response(401, content=question())))(request)

    async def receive():
        return pieces.pop(0)

    async def send(event):
        sent.append(event)

    async def go():
        scope = {
            "type": "http", "method": method, "raw_path": path.encode(), "query_string": query,
            "headers": [(b"host", b"gate"), (b"x-signature", b"s"), (b"connection", b"close")],
        }  # fmt: skip
        async with httpx.AsyncClient(
            base_url="https://superlink:1", transport=httpx.MockTransport(superlink)
        ) as client:
            await Gate(client, most_bytes)(scope, receive, send)

    asyncio.run(go())
    return sent[0]["status"], b"".join(event.get("body", b"") for event in sent[1:]), reached


@pytest.mark.parametrize("path", REFUSED)
def test_only_the_interface_for_nodes_is_reached(path):
    status, _, reached = ask(path)
    assert (status, reached) == (403, [])


def test_other_methods_and_queries_are_refused():
    for options in ({"method": "GET"}, {"method": "CONNECT"}, {"query": b"a=b"}):
        assert ask("/v1/fleet/pull-messages", **options)[::2] == (403, [])


def test_a_request_of_a_node_arrives_whole_and_so_does_the_response():
    status, text, reached = ask("/v1/fleet/pull-messages", body=(b"abc", b"def"))
    assert (status, text) == (401, b"who are you")
    (method, url, body, headers) = reached[0]
    assert (method, url, body) == ("POST", "https://superlink:1/v1/fleet/pull-messages", b"abcdef")
    assert headers["x-signature"] == "s"
    assert headers["host"] == "superlink:1"


def test_a_request_that_is_too_large_does_not_reach_the_superlink():
    assert ask("/v1/fleet/push-object", body=(b"x" * 600, b"x" * 400))[0] == 401
    assert ask("/v1/fleet/push-object", body=(b"x" * 600, b"x" * 401))[::2] == (413, [])


def test_a_superlink_that_does_not_answer_is_named():
    def fail(request):
        raise httpx.ConnectError("nobody")

    assert ask("/v1/fleet/pull-messages", answer=fail)[:2] == (502, b"the SuperLink does not answer")


def test_bad_options_are_named(tmp_path):
    keys = write_keys(tmp_path / "keys", nodes=0)
    for options, message in (
        ({"port": 0}, "port = 0"),
        ({"superlink": "http://127.0.0.1"}, "superlink = 'http://127.0.0.1': expected an address and a port"),
        ({"keys": tmp_path / "none"}, "expected a folder with ca.crt"),
    ):
        with pytest.raises(fg.InputError, match=message):
            run_gate(**{"host": "127.0.0.1", "port": 1, "keys": keys, **options})
