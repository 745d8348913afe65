"""One page over HTTP on this machine's own address, to be read and nothing else."""

from __future__ import annotations

import hashlib
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType

from fasttrain.errors import UserError

# What a browser on this machine, or at the other end of an ssh tunnel, calls it. Any other name means that a foreign
# page has its name point here, to read what is shown (DNS rebinding).
NAMES = frozenset(("127.0.0.1", "localhost", "[::1]"))
HEADERS = {
    "Content-Type": "text/html; charset=utf-8",
    "Cache-Control": "no-cache",
    "Content-Security-Policy": "frame-ancestors 'none'",  # the rest stands in the page; this only counts in a header
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


class Server:
    """Shows the last page that it was given. A context manager.

    Raises:
        UserError: the port can't be had.
    """

    def __init__(self, port: int) -> None:
        try:
            self._server = ThreadingHTTPServer(("127.0.0.1", port), _handler(self))
        except (OSError, OverflowError) as error:
            reason = getattr(error, "strerror", None) or error
            raise UserError(f"--port {port}: can't be had ({reason}); --port 0 takes any free one") from None
        self._thread = threading.Thread(target=self._server.serve_forever, name="page", daemon=True)
        self.page: tuple[bytes, str] = b"", ""  # the page and its ETag, exchanged at once

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self._server.server_port}/"

    def show(self, page: str) -> None:
        body = page.encode("utf-8", "backslashreplace")
        self.page = body, f'"{hashlib.sha256(body).hexdigest()[:16]}"'

    def __enter__(self) -> Server:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.shutdown()
        self._server.server_close()


def _handler(server: Server) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        timeout = 10  # seconds for a request; a connection left open holds a thread
        server_version, sys_version = "fasttrain", ""

        def do_GET(self) -> None:
            body, tag = server.page
            name = self.headers.get("Host", "").rsplit(":", 1) if self.headers.get("Host") else [""]
            host = name[0] if len(name) == 2 and name[1].isdigit() else ":".join(name)
            if host.lower() not in NAMES:
                self._refuse(403, "ask for 127.0.0.1 or localhost")
            elif self.path.split("?")[0] != "/":
                self._refuse(404, "there is one page: /")
            elif self.headers.get("If-None-Match") == tag:
                self._answer(304, b"", {"ETag": tag})
            else:
                self._answer(200, body, {**HEADERS, "ETag": tag})

        def refuse_writing(self) -> None:
            self._refuse(405, "this page can only be read")

        do_HEAD = do_GET
        do_POST = do_PUT = do_PATCH = do_DELETE = do_OPTIONS = refuse_writing

        def log_message(self, format: str, *args: object) -> None:
            return None

        def _refuse(self, status: int, why: str) -> None:
            self._answer(status, f"{why}\n".encode(), {**HEADERS, "Content-Type": "text/plain", "Allow": "GET, HEAD"})

        def _answer(self, status: int, body: bytes, headers: dict[str, str]) -> None:
            self.send_response(status)
            for key, value in headers.items():
                self.send_header(key, value)
            if status != 304:
                self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(body)

    return Handler
