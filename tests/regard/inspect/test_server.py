"""A page that is served answers those who know its address, and nobody else, whatever they ask."""

from __future__ import annotations

import http.client
import json
import socket
import threading
import urllib.request
from collections.abc import Iterator
from contextlib import closing
from typing import Any
from urllib.parse import urlsplit

import pytest
import torch
import torch.nn.functional as F
from pages import Page
from tiers import sized

from regard.inspect import HeadEffect, capture, head_effect
from regard.inspect._view.overview import Overview, overview
from regard.inspect._view.page import PageData, describe_page
from regard.inspect._view.server import HOST, PageServer

#: The heads without which a model ran.
runs: list[tuple[str, int]] = []


@pytest.fixture(scope="module")
def served() -> Iterator[PageServer]:
    query = torch.randn(1, 2, 300, 16, generator=torch.Generator().manual_seed(0))
    with capture() as record:
        F.scaled_dot_product_attention(query, query, query, is_causal=True)
    with PageServer(describe_page(record)) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def small_page() -> PageData:
    query = torch.zeros(1, 1, 2, 2)
    with capture() as record:
        F.scaled_dot_product_attention(query, query, query)
    return describe_page(record)


def asked(
    server: PageServer, path: str, method: str = "GET", **headers: str
) -> tuple[int, bytes, http.client.HTTPMessage]:
    with closing(http.client.HTTPConnection(HOST, server.server_port, timeout=30)) as connection:
        connection.request(method, path, headers=headers)
        answer = connection.getresponse()
        return answer.status, answer.read(), answer.headers


def token(server: PageServer) -> str:
    return urlsplit(server.address).path


def test_the_page_and_its_blocks(served: PageServer) -> None:
    status, body, headers = asked(served, token(served))
    assert status == 200 and headers["Content-Type"].startswith("text/html") and headers["X-Frame-Options"] == "DENY"
    page = Page(body.decode())
    assert page.described["blocks"] == "served" and set(page.scripts) == {"page", "code"}
    policy = next(value for name, value in page.attributes if name == "content" and value and "default-src" in value)
    assert "connect-src 'self'" in policy
    (first, _) = page.described["heads"]
    status, lse, _ = asked(served, f"{token(served)}blocks/{first['weights']['lse']}")
    assert status == 200 and len(lse) == 4 * 300


@pytest.mark.parametrize("path", ["/", "/blocks/0", "/wrong/", "/wrong/blocks/0", "//", "/%2e%2e/", "/%C3%A9/"])
def test_without_the_token(served: PageServer, path: str) -> None:
    status, body, _ = asked(served, path)
    assert status == 403 and b"<" not in body


@pytest.mark.parametrize(
    "rest",
    ["../", "..%2f..%2fetc/passwd", "blocks", "blocks/", "blocks/-1", "blocks/99999", "blocks/1e3", "blocks/%D9%A3",
     "blocks/0/0", "blocks/" + "9" * 100, "page.js", "?x=1"],
)  # fmt: skip
def test_outside(served: PageServer, rest: str) -> None:
    status, body, _ = asked(served, token(served) + rest)
    assert status == 404 and len(body) < 100


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"Origin": "http://evil.example"}, 403),
        ({"Origin": "null"}, 403),
        ({"Host": "evil.example"}, 403),
        ({"Host": f"{HOST}:1"}, 403),
    ],
)
def test_from_elsewhere(served: PageServer, headers: dict[str, str], status: int) -> None:
    assert asked(served, token(served), **headers)[0] == status


def test_from_its_own_origin(served: PageServer) -> None:
    port = served.server_port
    assert asked(served, token(served), Origin=f"http://{HOST}:{port}")[0] == 200
    assert asked(served, token(served), Host=f"localhost:{port}")[0] == 200


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "OPTIONS", "HEAD", "TRACE"])
def test_other_methods(served: PageServer, method: str) -> None:
    assert asked(served, token(served), method)[0] == 501


def test_a_long_path(served: PageServer) -> None:
    assert asked(served, token(served) + "a" * 3000)[0] == 414
    assert asked(served, "/" + "a" * 70_000)[0] == 414


def test_noise(served: PageServer) -> None:
    for noise in (
        b"\x00\xff" * 100 + b"\r\n\r\n",
        b"GET\r\n\r\n",
        b"GET / HTTP/9.9\r\n\r\n",
        "GET /é/ HTTP/1.1\r\n\r\n".encode(),
        b"\r\n",
        b"",
    ):
        with closing(socket.create_connection((HOST, served.server_port), timeout=10)) as connection:
            connection.sendall(noise)
    assert asked(served, token(served))[0] == 200


def sent(server: PageServer, *lines: str) -> bytes:
    """The first line of the answer to these lines."""
    with closing(socket.create_connection((HOST, server.server_port), timeout=30)) as connection:
        connection.sendall("".join(f"{line}\r\n" for line in (*lines, "")).encode())
        return connection.makefile("rb").readline()


def test_two_hosts_or_none_are_refused(served: PageServer) -> None:
    request, host = f"GET {token(served)} HTTP/1.1", f"Host: {HOST}:{served.server_port}"
    assert sent(served, request, host, "Connection: close").startswith(b"HTTP/1.1 200")
    for hosts in ([host, host], [host, "Host: evil.example"], ["Host: evil.example", host], []):
        assert sent(served, request, *hosts).startswith(b"HTTP/1.1 403")
    origin = f"Origin: http://{HOST}:{served.server_port}"
    assert sent(served, request, host, origin, "Origin: http://evil.example").startswith(b"HTTP/1.1 403")


def test_an_address_without_its_last_slash_leads_to_the_page(served: PageServer) -> None:
    path = token(served)
    status, body, headers = asked(served, path[:-1])
    assert (status, body, headers["Location"]) == (308, b"", path)
    assert asked(served, path[:-2])[0] == 403
    with urllib.request.urlopen(served.address[:-1], timeout=30) as answer:
        assert answer.status == 200 and answer.url == served.address


@pytest.mark.slow
@pytest.mark.parametrize("begun", [b"", b"GET / HTTP/1.1\r\nHost: "])
def test_half_open_connections_occupy_few_threads(served: PageServer, begun: bytes) -> None:
    before = threading.active_count()
    half = []
    for _ in range(sized(150, 60)):
        half.append(socket.create_connection((HOST, served.server_port), timeout=30))
        half[-1].sendall(begun)
    assert asked(served, token(served))[0] == 200
    assert threading.active_count() - before <= 24 + 8
    for connection in half:
        connection.close()
    assert asked(served, token(served))[0] == 200


def test_a_connection_serves_several_requests(served: PageServer) -> None:
    with closing(http.client.HTTPConnection(HOST, served.server_port, timeout=30)) as connection:
        for path in (token(served), f"{token(served)}blocks/0", token(served)):
            connection.request("GET", path)
            answer = connection.getresponse()
            assert answer.status == 200 and answer.read()


@pytest.mark.slow
def test_a_flood_is_answered(served: PageServer) -> None:
    """Silent connections and many requests at once: each gets an answer, and the server stays."""
    silent = [socket.create_connection((HOST, served.server_port), timeout=30) for _ in range(50)]
    found: list[int] = []
    path = f"{token(served)}blocks/0"
    threads = [threading.Thread(target=lambda: found.append(asked(served, path)[0])) for _ in range(60)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    for each in silent:
        each.close()
    assert len(found) == 60 and set(found) <= {200, 503} and 200 in found
    assert asked(served, token(served))[0] == 200


@pytest.fixture(scope="module")
def model() -> Iterator[PageServer]:
    torch.manual_seed(0)
    layer = torch.nn.TransformerEncoderLayer(8, 2, batch_first=True)
    model = torch.nn.Sequential(torch.nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)).eval()
    x = torch.randn(1, 5, 8)
    with capture(model) as record, torch.no_grad():
        model(x)

    def without(layer: str, head: int) -> HeadEffect:
        runs.append((layer, head))
        if head == 1:
            raise ValueError("no such head")
        return head_effect(model, lambda: model(x), layer, head)

    runs.clear()
    with PageServer(describe_page(record), without=without) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


class TestWithoutAHead:
    def test_the_answer(self, model: PageServer) -> None:
        page = Page(asked(model, token(model))[1].decode())
        assert page.described["without"] is True
        for _ in range(2):
            status, body, headers = asked(model, f"{token(model)}without/1/0")
            assert status == 200 and headers["Content-Type"] == "application/json"
            assert set(json.loads(body)) == {"layer", "head", "before", "after", "change", "text"}
        assert json.loads(body)["layer"] == page.described["layers"][1]["name"] == "0.layers.1.self_attn"
        assert runs == [("0.layers.1.self_attn", 0)], "it runs once"

    def test_what_is_refused(self, model: PageServer) -> None:
        for path in ("without/2/0", "without/0/9", "without/0", "without/0/0/0", "without/-1/0", "without/a/0"):
            assert asked(model, token(model) + path)[0] == 404
        assert asked(model, "/wrong/without/0/0")[0] == 403
        assert asked(model, f"{token(model)}without/0/0", Origin="http://evil.example")[0] == 403
        status, body, _ = asked(model, f"{token(model)}without/0/1")
        assert (status, body) == (422, b"no such head\n")

    def test_a_page_of_a_record_has_none(self, served: PageServer) -> None:
        assert asked(served, f"{token(served)}without/0/0")[0] == 404
        assert "without" not in Page(asked(served, token(served))[1].decode()).described


@pytest.fixture
def blocked() -> Iterator[tuple[PageServer, PageData, threading.Event]]:
    """A page with three more blocks: one that takes until an event, one that fails, and one of no memory."""
    data, go = small_page(), threading.Event()

    def slow() -> bytes:
        assert go.wait(30)
        return b"slow"

    def broken() -> bytes:
        raise RuntimeError("too large,\nsays torch")

    def full() -> bytes:
        raise MemoryError

    for make in (slow, broken, full):
        data.block(make)
    with PageServer(data) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield server, data, go
        go.set()
        server.shutdown()
        thread.join()


class TestBlocks:
    def test_one_that_takes_long_delays_no_other(self, blocked: tuple[PageServer, PageData, threading.Event]) -> None:
        server, data, go = blocked
        found: list[bytes] = []
        path = f"{token(server)}blocks/{len(data.blocks) - 3}"
        asking = threading.Thread(target=lambda: found.append(asked(server, path)[1]))
        asking.start()
        overview = data.described["layers"][0]["overview"]
        assert asked(server, f"{token(server)}blocks/{overview}")[0] == 200 and not found
        go.set()
        asking.join()
        assert found == [b"slow"]

    def test_a_client_that_leaves_stops_nothing(self, blocked: tuple[PageServer, PageData, threading.Event]) -> None:
        server, data, go = blocked
        for _ in range(2):
            with closing(socket.create_connection((HOST, server.server_port), timeout=10)) as connection:
                path = f"{token(server)}blocks/{len(data.blocks) - 3}"
                connection.sendall(f"GET {path} HTTP/1.1\r\nHost: {HOST}:{server.server_port}\r\n\r\n".encode())
        go.set()
        assert asked(server, f"{token(server)}blocks/{data.described['layers'][0]['overview']}")[0] == 200

    def test_one_that_fails_says_why(self, blocked: tuple[PageServer, PageData, threading.Event]) -> None:
        server, data, _ = blocked
        for place, text in ((-2, b"too large, says torch\n"), (-1, b"Out of memory.\n")):
            assert asked(server, f"{token(server)}blocks/{len(data.blocks) + place}")[:2] == (422, text)


def test_a_layer_is_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """However many threads ask for it at one time."""
    data = small_page()
    reads: list[int] = []

    def counted(*args: Any, **options: Any) -> Overview:
        reads.append(1)
        return overview(*args, **options)

    monkeypatch.setattr("regard.inspect._view.page.overview", counted)
    layer, head = data.described["layers"][0], data.described["heads"][0]
    blocks = [data.blocks[layer["overview"]], data.blocks[head["rows"]], data.blocks[head["weights"]["lse"]]] * 3
    threads = [threading.Thread(target=block) for block in blocks]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert reads == [1]


def test_the_port_is_taken(served: PageServer) -> None:
    for port in (served.server_port, 1 << 20):
        with pytest.raises(ValueError, match=f"view: port must be free, got {port} "):
            PageServer(small_page(), port)


def test_only_this_machine_reaches_it(served: PageServer) -> None:
    assert served.server_address[0] == "127.0.0.1"
    with PageServer(small_page()) as other:
        assert urlsplit(other.address).path != token(served) and len(token(served)) > 30
