"""Serves the page of a run on this machine alone, to those who know a token.

    GET /?token=...               the page
    GET /body?token=...           what the page shows now, as HTML
    GET /figures.json?token=...   the same as JSON, for programs
    GET /style.css?token=...      what the page loads; script.js and watch.js too

Nothing else is there, and nothing is read from disk by a name that comes from outside. The server listens on the
loopback. Other users of the machine can reach that too, so all requests need the token, which is drawn anew each time.
A web page elsewhere that the same browser shows could have its own name lead to 127.0.0.1 (DNS rebinding), so the name
that a request gives must be one of this machine's loopback.
"""

from __future__ import annotations

import errno
import json
import secrets
import sys
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs

from gradwire.profiling.records import ProfileError
from gradwire.watch import page
from gradwire.watch.following import Follower
from gradwire.watch.view import RunView

ADDRESS = "127.0.0.1"

HOSTS = frozenset({"127.0.0.1", "localhost", "[::1]"})
"""Names that a request may call this machine by, with any port: a tunnel may have another one at its other end."""

PATIENCE_S = 10.0
"""A client that neither sends nor reads for so long is left."""

MOST_AT_ONCE = 32
"""Requests; others are turned away, so that clients who do nothing cannot use up the machine."""

HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "Cache-Control": "no-store",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "Cross-Origin-Resource-Policy": "same-origin",
}

HTML, JSON, PLAIN = "text/html; charset=utf-8", "application/json", "text/plain; charset=utf-8"


class RunServer(ThreadingHTTPServer):
    """Serves what a follower sees, until it is closed.

    Args:
        follower: of the run's folder.
        port: of this machine; 0 takes a free one.

    Attributes:
        token: that requests need.

    Raises:
        ProfileError: the port is in use, or may not be taken.

    Example:
        with RunServer(Follower(folder)) as server:
            print(server.url)
            server.serve_forever()
    """

    daemon_threads = True
    block_on_close = False
    request_queue_size = MOST_AT_ONCE  # with http.server's five, a browser beside slow clients waits for a second try
    allow_reuse_address = True  # a port whose last connections are only being wound up is free

    def __init__(self, follower: Follower, port: int = 0) -> None:
        self.follower, self.token = follower, secrets.token_urlsafe(24)
        self._free = threading.BoundedSemaphore(MOST_AT_ONCE)
        try:
            super().__init__((ADDRESS, port), _Handler)
        except (OSError, OverflowError) as error:
            raise ProfileError(_not_bound(port, error)) from error

    @property
    def url(self) -> str:
        """The address of the page, with the token."""
        return f"http://{ADDRESS}:{self.server_address[1]}/?token={self.token}"

    def process_request(self, request: Any, client_address: Any) -> None:
        """Serve a client in a thread of its own, if there are not too many."""
        if self._free.acquire(blocking=False):
            super().process_request(request, client_address)
        else:
            self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """Serve a client in its thread."""
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._free.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Print what went wrong, unless it is that a client has gone away."""
        if not isinstance(sys.exception(), OSError):
            super().handle_error(request, client_address)


def _not_bound(port: int, error: OSError | OverflowError) -> str:
    remedy = "give another one, or --serve alone for one that is free"
    if isinstance(error, OSError) and error.errno == errno.EADDRINUSE:
        return f"port {port} is in use: {remedy}"
    if isinstance(error, OSError) and error.errno == errno.EACCES:
        return f"port {port} may not be taken by this user: {remedy}"
    return f"port {port} cannot be taken ({error}): {remedy}"


class _Handler(BaseHTTPRequestHandler):
    """Answers one request."""

    timeout = PATIENCE_S
    server_version, sys_version = "gradwire", ""

    @property
    def _served(self) -> RunServer:
        assert isinstance(self.server, RunServer)
        return self.server

    def do_GET(self) -> None:
        """Answer."""
        self._answer(*self._found())

    def _found(self) -> tuple[int, str, str | bytes]:
        """The status, the type and the content of the answer: what is asked for, or why not."""
        path, _, query = self.path.partition("?")
        if not self._names_this_machine():
            return 403, PLAIN, f"open this page as http://{ADDRESS}:{self._served.server_address[1]}/\n"
        if not self._knows_token(query):
            return 403, PLAIN, "the token is missing or wrong: open the address that was printed\n"
        if path not in _ANSWERS:
            return 404, PLAIN, "there is nothing here\n"
        kind, make = _ANSWERS[path]
        if isinstance(make, str):
            return 200, kind, page.file_of_page(make)
        try:
            return 200, kind, make(self._served.follower.view(), self._served.token)
        except ProfileError as error:
            return 503, PLAIN, f"{error}\n"

    def _names_this_machine(self) -> bool:
        named = self.headers.get_all("Host", [])
        if len(named) != 1:
            return False
        host = named[0].strip().lower()
        return (host if host.endswith("]") else host.rpartition(":")[0] or host) in HOSTS

    def _knows_token(self, query: str) -> bool:
        try:
            given = parse_qs(query, max_num_fields=4).get("token", [""])
        except ValueError:
            return False
        # Bytes, as texts that are not ASCII are refused; the time that it takes tells nothing of the token.
        return len(given) == 1 and secrets.compare_digest(given[0].encode(), self._served.token.encode())

    def _answer(self, status: int, kind: str, content: str | bytes) -> None:
        raw = content.encode() if isinstance(content, str) else content
        self.send_response(status)
        for name, value in (HEADERS | {"Content-Type": kind, "Content-Length": str(len(raw))}).items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(raw)

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """Refuse what is no GET, or no request, without repeating any of it."""
        status = 405 if code == 501 else code  # http.server's word for a method that it has no function for
        self.close_connection = True
        self.send_response(status)
        for name, value in (HEADERS | {"Content-Type": PLAIN, "Allow": "GET", "Content-Length": "0"}).items():
            self.send_header(name, value)
        self.end_headers()

    def log_message(self, format: str, *args: Any) -> None:
        """Requests are not printed: they hold the token."""


def _figures(view: RunView, _: str) -> str:
    return json.dumps(view.to_builtins(), allow_nan=False)


def _body(view: RunView, _: str) -> str:
    return page.body(view)


_ANSWERS: dict[str, tuple[str, str | Callable[[RunView, str], str]]] = {
    "/": (HTML, page.page),
    "/body": (HTML, _body),
    "/figures.json": (JSON, _figures),
    "/style.css": ("text/css; charset=utf-8", "style.css"),
    "/script.js": ("text/javascript; charset=utf-8", "script.js"),
    "/watch.js": ("text/javascript; charset=utf-8", "watch.js"),
}
"""What there is: the type, and the name of a file of the page or what makes it of a view and the token."""
