"""A local server for the page, which loads data on demand."""

from __future__ import annotations

import hmac
import json
import secrets
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Any, TypeAlias
from urllib.parse import urlsplit

from regard._utils.errors import rejected
from regard.inspect._view.page import PageData, document

if TYPE_CHECKING:
    from regard.inspect._capture.effect import HeadEffect

#: What a model answers without a head of a layer.
Without: TypeAlias = "Callable[[str, int], HeadEffect]"
HOST = "127.0.0.1"
#: Concurrent requests, and those that compute; seconds until an idle one times out; characters of a path.
_CONCURRENT, _COMPUTING, _TIMEOUT, _LONGEST = 8, 2, 20, 200
#: Seconds until a closed server gives up what it still computes.
_LAST = 10
#: Connections that wait for a request, each in its thread; and seconds that one may wait when others want its place.
_WAITING, _PATIENCE = 24, 0.25


class PageServer(ThreadingHTTPServer):
    """Serve one page at an address that cannot be guessed.

    Only this machine can reach it, through an address with a random token, and only pages of the same origin may
    request its data. It answers 8 requests at a time, computes for 2 of them, and rejects more with status 503. At most
    24 connections wait for a request; more close those that have waited longest.

    Parameters
    ----------
    data : PageData
    port : int
        0 picks a free one.
    without : callable, optional
        Returns a :class:`~regard.inspect.HeadEffect` for a layer's name and a head. ``without/LAYER/HEAD`` below the
        page's address is then its JSON, with the layer's number on the page; the page's description says so.

    Attributes
    ----------
    address : str
        The address of the page.

    Raises
    ------
    ValueError
        If the port is taken.
    """

    daemon_threads = True
    request_queue_size = 128

    def __init__(self, data: PageData, port: int = 0, without: Without | None = None) -> None:
        if without is not None:
            data.described["without"] = True
        self.data, self.without, self.token = data, without, secrets.token_urlsafe(24)
        self.page = document(data, served=True).encode()
        #: What the model answers without a head, as JSON, by the numbers of the layer and the head.
        self.effects: dict[tuple[int, int], bytes] = {}
        self.free = threading.BoundedSemaphore(_CONCURRENT)
        self.computing, self.running = threading.BoundedSemaphore(_COMPUTING), threading.BoundedSemaphore()
        #: The connections that wait for a request, longest first, with the time since when they wait.
        self._waiting: dict[Any, float] = {}
        self._changed = threading.Condition()
        try:
            super().__init__((HOST, port), _Handler)
        except (OSError, OverflowError) as error:
            raise rejected("view", "port", "be free", f"{port} ({error})") from None
        self.address = f"http://{HOST}:{self.server_port}/{self.token}/"

    def process_request(self, request: Any, client_address: Any) -> None:
        """Answer a connection in a thread of its own, once there is a place."""
        with self._changed:
            while len(self._waiting) >= _WAITING:
                oldest, since = next(iter(self._waiting.items()))
                left = since + _PATIENCE - time.monotonic()
                if left > 0:
                    self._changed.wait(left)
                else:
                    del self._waiting[oldest]
                    with suppress(OSError):  # it may be gone
                        oldest.shutdown(socket.SHUT_RDWR)
        self.wait(request)
        super().process_request(request, client_address)

    def wait(self, connection: Any) -> None:
        """Note that a connection waits for a request."""
        with self._changed:
            self._waiting[connection] = time.monotonic()

    def begin(self, connection: Any) -> None:
        """Note that a connection no longer waits: its request is there, or it is closed."""
        with self._changed:
            self._waiting.pop(connection, None)
            self._changed.notify()

    def shutdown_request(self, request: Any) -> None:
        self.begin(request)
        super().shutdown_request(request)

    def server_close(self) -> None:
        """Close, and give what is being computed time to end: torch aborts a process that ends in its midst."""
        super().server_close()
        end = time.monotonic() + _LAST
        for turn in (*[self.computing] * _COMPUTING, self.running):
            turn.acquire(timeout=max(end - time.monotonic(), 0))

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore clients that disconnect."""


class _Handler(BaseHTTPRequestHandler):
    """The answer to one request."""

    server: PageServer
    timeout = _TIMEOUT
    protocol_version = "HTTP/1.1"
    server_version, sys_version = "regard", ""

    def do_GET(self) -> None:
        self.server.begin(self.connection)
        if not self.server.free.acquire(blocking=False):
            self.refuse(HTTPStatus.SERVICE_UNAVAILABLE)
            return
        try:
            self.answer()
        finally:
            self.server.free.release()
            self.server.wait(self.connection)

    def answer(self) -> None:
        data, token, without = self.server.data, self.server.token, self.server.without
        if len(self.path) > _LONGEST:
            self.refuse(HTTPStatus.REQUEST_URI_TOO_LONG)
            return
        hosts = {f"{name}:{self.server.server_port}" for name in (HOST, "localhost")}
        given_hosts, origins = (self.headers.get_all(name, []) for name in ("Host", "Origin"))
        known = len(given_hosts) == 1 and given_hosts[0] in hosts and all(map(_is_origin(hosts), origins))
        _, _, rest = self.path.partition("/")
        given, slash, rest = rest.partition("/")
        if not known or not hmac.compare_digest(given.encode(), token.encode()):
            self.refuse(HTTPStatus.FORBIDDEN)
        elif not slash:
            self.send(b"", "text/plain", HTTPStatus.PERMANENT_REDIRECT, ("Location", f"/{token}/"))
        elif not rest:
            self.send(self.server.page, "text/html; charset=utf-8")
        elif without is not None and (place := _head(rest, data)) is not None:
            self.compute(partial(self.effect, without, place), "application/json", self.server.running)
        elif (block := _block(rest, data)) is None:
            self.refuse(HTTPStatus.NOT_FOUND)
        else:
            self.compute(block, "application/octet-stream", self.server.computing)

    def effect(self, without: Without, place: tuple[int, int]) -> bytes:
        """Return what the model answers without a head; it runs once for each head."""
        (layer, head), effects = place, self.server.effects
        if place not in effects:
            found = without(self.server.data.described["layers"][layer]["name"], head)
            effects[place] = json.dumps(found.as_dict()).encode()
        return effects[place]

    def compute(self, make: Callable[[], bytes], kind: str, turn: threading.BoundedSemaphore) -> None:
        """Send what is computed in its turn, or a sentence that says why it cannot be."""
        try:
            with turn:
                found = make()
        except (ValueError, TypeError, RuntimeError, MemoryError) as error:
            text = " ".join(str(error).split()) or "Out of memory."
            self.send(f"{text}\n".encode(), "text/plain; charset=utf-8", HTTPStatus.UNPROCESSABLE_ENTITY)
        else:
            self.send(found, kind)

    def send(self, body: bytes, kind: str, status: HTTPStatus = HTTPStatus.OK, *others: tuple[str, str]) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        for name, value in (
            ("Cache-Control", "no-store"),
            ("Referrer-Policy", "no-referrer"),
            ("X-Content-Type-Options", "nosniff"),
            ("Cross-Origin-Resource-Policy", "same-origin"),
            ("X-Frame-Options", "DENY"),
            *others,
        ):
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def refuse(self, status: HTTPStatus) -> None:
        self.close_connection = True
        self.send(f"{status.value} {status.phrase}\n".encode(), "text/plain; charset=utf-8", status)

    def log_message(self, *_: Any) -> None:
        """Log nothing."""


def _is_origin(hosts: set[str]) -> Callable[[str], bool]:
    """Return whether an origin is one of this server."""
    return lambda origin: urlsplit(origin).netloc in hosts


def _head(path: str, data: PageData) -> tuple[int, int] | None:
    """Return the layer and the head that a path names: ``without/LAYER/HEAD``."""
    name, *numbers = path.split("/")
    if name != "without" or len(numbers) != 2 or not all(map(_is_number, numbers)):
        return None
    layer, head = map(int, numbers)
    if not any((each["layer"], each["head"]) == (layer, head) for each in data.described["heads"]):
        return None
    # Pictures, rollouts and flows are of several layers or of none, and heads of recurrences cannot be removed.
    made = data.described["layers"][layer]["kind"] in ("picture", "rollout", "flow", "linear")
    return None if made else (layer, head)


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdecimal() and len(text) < 10


def _block(path: str, data: PageData) -> Callable[[], bytes] | None:
    name, _, number = path.partition("/")
    if name != "blocks" or not _is_number(number):
        return None
    return data.blocks[int(number)] if int(number) < len(data.blocks) else None
