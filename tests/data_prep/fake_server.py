"""An OpenAI-compatible server over real HTTP, in a thread: it answers by a fixed rule, and misbehaves as it is told."""

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Fault = Callable[["Handler"], None]
END = 1


def words_of(prompt: list[int], limit: int) -> list[int]:
    """What the fake model says: a function of the prompt alone, 3 to 9 tokens and the end token."""
    seed = sum(prompt) * 31 + len(prompt)
    return [*(2 + (seed * 7 + i * i) % 300 for i in range(3 + seed % 7)), END][:limit]


class Fake(ThreadingHTTPServer):
    """`faults(n, body)` says what is wrong with the n-th completion asked for, None = nothing."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server_address[1]}/v1"
        self.models: Any = {"data": [{"id": "tiny", "root": "tiny/root", "created": time.time()}]}
        self.faults: Callable[[int, dict[str, Any]], Fault | None] = lambda n, body: None
        self.change: Callable[[dict[str, Any]], dict[str, Any]] = lambda reply: reply
        self.closed = False  # asks everybody for a key that nobody has
        self.delay = 0.0
        self.asked: list[dict[str, Any]] = []
        self.headers_seen: list[dict[str, str]] = []
        self.times: list[float] = []
        self.in_flight = self.most_in_flight = 0
        self.lock = threading.Lock()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that hangs up is no news."""


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Fake
    body: dict[str, Any]

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def reply(self, status: int, body: bytes, headers: dict[str, str] | None = None, promised: int = 0) -> None:
        self.send_response(status)
        for key, value in {"Content-Length": str(promised or len(body)), **(headers or {})}.items():
            self.send_header(key, value)
        self.end_headers()
        self.wfile.write(body)
        if promised:
            self.close_connection = True

    def do_GET(self) -> None:
        if self.server.closed:
            self.reply(401, b'{"error": "Unauthorized"}')
            return
        fine = self.path == "/v1/models" and self.server.models is not None
        body = json.dumps(self.server.models).encode() if fine else b"<html>no such page</html>"
        self.reply(200 if fine else 404, body)

    def do_POST(self) -> None:
        server = self.server
        body = self.body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with server.lock:
            server.in_flight += 1
            server.most_in_flight = max(server.most_in_flight, server.in_flight)
            number = len(server.asked)
            server.asked.append(body)
            server.headers_seen.append(dict(self.headers))
            server.times.append(time.monotonic())
        try:
            time.sleep(server.delay)
            fault = server.faults(number, body)
            (fault or answer)(self)
        finally:
            with server.lock:
                server.in_flight -= 1


def answer(handler: Handler) -> None:
    body = handler.body
    ids = words_of(body["prompt"], body["max_tokens"])
    reason = "stop" if ids[-1] == END else "length"
    choice = {"index": 0, "text": "", "token_ids": ids, "finish_reason": reason}
    usage = {"prompt_tokens": len(body["prompt"]), "completion_tokens": len(ids)}
    reply = handler.server.change({"model": body["model"], "choices": [choice], "usage": usage})
    handler.reply(200, json.dumps(reply).encode())


def status(code: int, text: str = "go away", **headers: str) -> Fault:
    named = {key.replace("_", "-"): value for key, value in headers.items()}
    return lambda handler: handler.reply(code, text.encode(), named)


def garbage(handler: Handler) -> None:
    handler.reply(200, b"<html>502 from a proxy</html>")


def half_a_body(handler: Handler) -> None:
    handler.reply(200, b'{"choices": [{"token_', promised=400)


def hang_up(handler: Handler) -> None:
    handler.close_connection = True
    handler.connection.close()


def silence(handler: Handler) -> None:
    time.sleep(1.0)
    handler.close_connection = True


@contextmanager
def serving() -> Iterator[Fake]:
    server = Fake()
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
