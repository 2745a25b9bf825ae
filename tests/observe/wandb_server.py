"""Small servers on loopback: one that a wandb run can talk to, and three that it cannot."""

import gzip
import json
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any


class _Handler(BaseHTTPRequestHandler):
    """As much of the protocol as a run needs: it is created, its history is streamed, its files are uploaded."""

    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def do_POST(self) -> None:
        body = self._body()
        server = self.server
        assert isinstance(server, Server)
        if server.stalled:
            time.sleep(30)  # a daemon thread: it ends with the test process
        if server.refuses:
            self._reply({"errors": [{"message": "invalid key"}]}, 401)
        elif self.path.endswith("/file_stream"):
            server.history += body.get("files", {}).get("wandb-history.jsonl", {}).get("content", [])
            self._reply({})
        elif body.get("operationName") == "UpsertBucket":
            project = {"id": "p", "name": "megazero", "entity": {"id": "e", "name": "me"}}
            bucket = {"id": "b", "name": body["variables"].get("name") or "run", "displayName": "d", "project": project}
            self._reply({"data": {"upsertBucket": {"bucket": bucket, "inserted": True}}})
        elif body.get("operationName") == "CreateRunFiles":
            files = [{"name": name, "uploadUrl": f"{server.url}/{name}"} for name in body["variables"]["files"]]
            self._reply({"data": {"createRunFiles": {"runID": "b", "uploadHeaders": [], "files": files}}})
        else:
            self._reply({"data": {}})

    def do_PUT(self) -> None:
        self._body()
        self._reply({})

    def _body(self) -> Any:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        if self.headers.get("Content-Encoding") == "gzip":
            body = gzip.decompress(body)
        is_json = "json" in self.headers.get("Content-Type", "")
        return json.loads(body) if is_json and body else {}

    def _reply(self, answer: Any, status: int = 200) -> None:
        body = json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


class Server(ThreadingHTTPServer):
    """`history` holds the rows it was sent, as JSON text."""

    daemon_threads = True
    request_queue_size = 32

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.url = f"http://127.0.0.1:{self.server_port}"
        self.history: list[str] = []
        self.stalled = False
        self.refuses = False
        Thread(target=self.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """The library drops its connections when it is done: no news."""

    def die(self) -> None:
        self.shutdown()
        self.server_close()


@contextmanager
def black_hole() -> Iterator[str]:
    """A port that accepts connections and never says a word."""
    with socket.create_server(("127.0.0.1", 0), backlog=64) as listener:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"


def closed_port() -> str:
    """A port of this machine where nobody listens."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return f"http://127.0.0.1:{listener.getsockname()[1]}"
