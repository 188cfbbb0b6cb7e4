"""A local web server for tests. It serves a folder, fails when a test wants it to, and counts requests."""

from __future__ import annotations

import http.server
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any


class _Handler(http.server.SimpleHTTPRequestHandler):
    server: Server

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        with self.server.lock:
            self.server.asked[path] += 1
            self.server.authorizations.append(self.headers["Authorization"])
            failures = self.server.failures.get(path, [])
            status = failures.pop(0) if failures else 200
        if path in self.server.stalled:
            self.server.resume.wait(300)
        elif path in self.server.endless:
            self._send_endlessly()
        elif path in self.server.broken:
            self._send_part(path, Path(self.translate_path(path)).read_bytes())
        elif status == 200 and path not in self.server.halves:
            super().do_GET()
        elif status == 200:
            self._pause(path, Path(self.translate_path(path)).read_bytes())
        else:
            self.send_error(status)

    def end_headers(self) -> None:
        if tag := self.server.etags.get(self.path):
            self.send_header("ETag", tag)
        super().end_headers()

    def _send_endlessly(self) -> None:
        """Send a body without a Content-Length that does not end until `resume` is set."""
        self.send_response(200)
        self.end_headers()
        with suppress(ConnectionError):
            while not self.server.resume.is_set():
                self.server.sent += self.wfile.write(bytes(2**16))

    def _send_part(self, path: str, data: bytes) -> None:
        """Send a file from the requested offset to its end, or to the next offset that `broken` lists for this path."""
        wanted, tag = self.headers["Range"], self.server.tag
        start = int(wanted.removeprefix("bytes=").removesuffix("-")) if wanted else 0
        if wanted:
            self.send_response(206)
            self.send_header(
                "Content-Range",
                self.server.content_range or f"bytes {start}-{len(data) - 1}/{len(data)}",
            )
        else:
            self.send_response(200)
        if tag:
            self.send_header("ETag", tag)
        self.send_header("Content-Length", str(len(data) - start))
        self.end_headers()
        breaks = self.server.broken[path]
        stop = breaks.pop(0) if breaks else len(data)
        self.server.sent += max(
            0, stop - start
        )  # first, because the client may not wait for this thread
        self.wfile.write(data[start:stop])
        self.close_connection = True

    def _pause(self, path: str, data: bytes) -> None:
        """Send half of a file and wait. Then send the rest, unless the file is to remain incomplete."""
        self.send_response(200)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data[: len(data) // 2])
        self.server.resume.wait(300)
        if path not in self.server.halves:
            self.wfile.write(data[len(data) // 2 :])

    def log_message(self, format: str, *args: Any) -> None:
        pass


class Server(http.server.ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, folder: Path) -> None:
        super().__init__(("127.0.0.1", 0), partial(_Handler, directory=folder))
        self.url = f"http://127.0.0.1:{self.server_port}"
        self.lock = threading.Lock()
        self.asked: Counter[str] = Counter()
        self.authorizations: list[str | None] = []
        self.failures: dict[str, list[int]] = {}
        """Path -> HTTP statuses with which the next requests for it fail."""
        self.halves: set[str] = set()
        """Paths of which only half is sent until `resume` is set. The other half follows if the path has been removed
        from this set by then."""
        self.stalled: set[str] = set()
        """Paths whose requests are not answered."""
        self.endless: set[str] = set()
        """Paths for which the response does not end until `resume` is set."""
        self.broken: dict[str, list[int]] = {}
        """Path -> offsets in the file at which the next responses are cut. Range requests work only for these paths."""
        self.tag: str | None = '"one"'
        """ETag of the paths in `broken`."""
        self.etags: dict[str, str] = {}
        """Path -> ETag that is sent with the file. For the paths in `broken`, see `tag` instead."""
        self.content_range: str | None = None
        """Content-Range header for the paths in `broken`; None for the correct one."""
        self.sent = 0
        """Number of bytes sent for the paths in `endless` and `broken`."""
        self.resume = threading.Event()


@contextmanager
def serve(folder: Path) -> Iterator[Server]:
    with Server(folder) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        try:
            yield server
        finally:
            server.resume.set()
            server.shutdown()
            thread.join()
