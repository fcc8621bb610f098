"""The door for nodes: it passes the requests of SuperNodes on to a SuperLink, and no others.

A SuperLink serves three interfaces on one port. SuperNodes sign their requests to the Fleet API. The Control API,
which starts and stops runs and registers keys, and the Runtime API, which hands out tasks, ask for nothing in
Flower's open-source build. So the SuperLink listens on the loopback interface only, and nodes reach its Fleet API
through here.
"""

from __future__ import annotations

import asyncio
import re
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, MutableMapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedagrac.errors import InputError, count
from fedagrac.flower.extra import require_flower

if TYPE_CHECKING:
    import httpx

__all__ = ["Gate", "run_gate"]

FLEET = re.compile(rb"/v1/fleet/[a-z-]+")
"""The paths of the Fleet API, as they are on the wire."""

MOST_BYTES = 2**25
"""The largest request in bytes. Flower sends vectors in pieces of 5 MiB, and announces them in up to 16 MB."""

SECONDS = 60.0
"""How long the SuperLink may take for an answer."""

BODY_SECONDS = 120.0
"""How long a request may take until it is complete."""

MOST_REQUESTS = 512
"""How many requests are served at a time. More are answered with 503."""

HOP_BY_HOP = frozenset(b"connection keep-alive transfer-encoding te trailer upgrade host expect".split())
"""Headers of one connection, which are not passed on."""

Event = MutableMapping[str, Any]


class TooLargeError(Exception):
    """A request that is larger, or takes longer, than the gate passes on."""


class Gate:
    """An ASGI application that passes requests to the Fleet API on and answers 403 to all others.

    Attributes:
        client: the connections to the SuperLink, with its address as `base_url`.
        most_bytes: the largest request that is passed on.
    """

    def __init__(self, client: httpx.AsyncClient, most_bytes: int = MOST_BYTES) -> None:
        self.client, self.most_bytes = client, most_bytes

    async def __call__(
        self,
        scope: Event,
        receive: Callable[[], Awaitable[Event]],
        send: Callable[[Event], Awaitable[None]],
    ) -> None:
        """Answer one request."""
        if scope["type"] != "http":  # a WebSocket, or the start and the end of the server
            await _refuse_event(scope, receive, send)
            return
        path: bytes = scope.get("raw_path") or b""
        if scope["method"] != "POST" or not FLEET.fullmatch(path) or scope["query_string"]:
            await _answer(send, 403, b"only SuperNodes are served here")
            return
        await self._pass_on(path.decode(), scope["headers"], receive, send)

    async def _pass_on(
        self,
        path: str,
        headers: list[tuple[bytes, bytes]],
        receive: Callable[[], Awaitable[Event]],
        send: Callable[[Event], Awaitable[None]],
    ) -> None:
        """Send a request to the SuperLink and its response back, both in pieces."""
        import httpx

        kept = [(name, value) for name, value in headers if name.lower() not in HOP_BY_HOP]
        started = False
        try:
            async with self.client.stream("POST", path, headers=kept, content=self._body(receive)) as response:
                given = [(name, value) for name, value in response.headers.raw if name.lower() not in HOP_BY_HOP]
                await send({"type": "http.response.start", "status": response.status_code, "headers": given})
                started = True
                async for piece in response.aiter_raw():
                    await send({"type": "http.response.body", "body": piece, "more_body": True})
            await send({"type": "http.response.body", "body": b""})
        except TooLargeError:
            await _answer(send, 413, b"the request is too large or too slow")
        except httpx.HTTPError:
            if started:  # closing the connection tells the node that the response is not complete
                raise
            await _answer(send, 502, b"the SuperLink does not answer")

    async def _body(self, receive: Callable[[], Awaitable[Event]]) -> AsyncIterator[bytes]:
        """Yield the body of a request; raise TooLargeError if it is larger or takes longer than allowed."""
        received, end = 0, asyncio.get_running_loop().time() + BODY_SECONDS
        while True:
            try:
                event = await asyncio.wait_for(receive(), end - asyncio.get_running_loop().time())
            except TimeoutError as error:
                raise TooLargeError from error
            piece = event.get("body", b"")
            received += len(piece)
            if received > self.most_bytes or event["type"] == "http.disconnect":
                raise TooLargeError
            yield piece
            if not event.get("more_body", False):
                return


async def _answer(send: Callable[[Event], Awaitable[None]], status: int, text: bytes) -> None:
    """Send a short response."""
    headers = [(b"content-type", b"text/plain"), (b"content-length", str(len(text)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": text})


async def _refuse_event(
    scope: Event, receive: Callable[[], Awaitable[Event]], send: Callable[[Event], Awaitable[None]]
) -> None:
    """Close a WebSocket, or confirm the start and the end of the server."""
    if scope["type"] == "websocket":
        await send({"type": "websocket.close", "code": 1008})
        return
    while (await receive())["type"] != "lifespan.shutdown":
        await send({"type": "lifespan.startup.complete"})
    await send({"type": "lifespan.shutdown.complete"})


def run_gate(
    host: str,
    port: int,
    superlink: str = "127.0.0.1:8000",
    keys: str | Path = "keys",
    most_bytes: int = MOST_BYTES,
) -> None:
    """Serve the gate until the process is ended.

    Args:
        host: the address to listen on, such as 0.0.0.0.
        port: the port to listen on.
        superlink: the address and port of the SuperLink.
        keys: the folder with `ca.crt`, `server.crt` and `server.key`; both connections are encrypted.
        most_bytes: the largest request that is passed on.
    """
    require_flower()  # Flower depends on the libraries that are used here
    import httpx
    import uvicorn

    count("port", port, most=65_535)
    count("most_bytes", most_bytes)
    if not re.fullmatch(r"[A-Za-z0-9.:\[\]-]+:[0-9]+", superlink):
        raise InputError("superlink", superlink, "an address and a port, such as 127.0.0.1:8000")
    files = {name: Path(keys) / name for name in ("ca.crt", "server.crt", "server.key")}
    for path in files.values():
        if not path.is_file():
            raise InputError("keys", str(keys), f"a folder with {path.name}, as fedagrac flower keys writes it")
    trust = ssl.create_default_context(cafile=files["ca.crt"])
    limits = httpx.Limits(max_connections=MOST_REQUESTS)
    client = httpx.AsyncClient(base_url=f"https://{superlink}", verify=trust, timeout=SECONDS, limits=limits)
    uvicorn.run(
        Gate(client, most_bytes),
        host=host,
        port=port,
        ssl_certfile=files["server.crt"],
        ssl_keyfile=files["server.key"],
        log_level="warning",
        limit_concurrency=MOST_REQUESTS,
        server_header=False,
        timeout_keep_alive=30,
    )
