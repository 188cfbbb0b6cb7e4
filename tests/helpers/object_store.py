"""Object stores on this host: rclone as the server, behind a proxy that can cut connections."""

import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from helpers.waiting import wait_for

KEY, SECRET = "test-access-key", "test-secret-key"


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


class Proxy:
    """Forwards connections to a port of this host, counts the bytes that the server sends, and may cut connections."""

    def __init__(self, port: int) -> None:
        self._target = port
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=512)
        self.port = int(self._listener.getsockname()[1])
        self.sent = 0
        self.cuts: list[int] = []
        """Byte counts at which responses are cut. Each is used once, by the next connection that would exceed it."""
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        self._listener.close()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                server = socket.create_connection(("127.0.0.1", self._target))
                for pair in ((client, server, False), (server, client, True)):
                    threading.Thread(target=self._copy, args=pair, daemon=True).start()

    def _copy(self, source: socket.socket, target: socket.socket, answers: bool) -> None:
        done = 0
        with suppress(OSError):
            while data := source.recv(2**16):
                if answers and self.cuts and done + len(data) > self.cuts[0]:
                    part = data[: self.cuts.pop(0) - done]
                    target.sendall(part)
                    self.sent += len(part)
                    # Close only this direction and wait, so that the client receives these bytes before the end.
                    target.shutdown(socket.SHUT_WR)
                    time.sleep(0.3)
                    break
                target.sendall(data)
                done += len(data)
                self.sent += len(data) * answers
        for end in (source, target):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
            end.close()


@contextmanager
def serve_rclone(kind: str, folder: Path, *options: str) -> Iterator[Proxy]:
    """Serve a folder with `rclone serve KIND`, behind a proxy. If the kind is s3, the sub-folders are buckets."""
    port = free_port()
    program = Path(sys.executable).parent / "rclone"
    command = [str(program), "serve", kind, *options, "--addr", f"127.0.0.1:{port}", str(folder)]
    with subprocess.Popen(command, stderr=subprocess.DEVNULL) as process:
        proxy = Proxy(port)
        try:
            wait_for(lambda: _answers(port))
            yield proxy
        finally:
            proxy.close()
            process.kill()


def _answers(port: int) -> bool:
    with suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
        return True
    return False
