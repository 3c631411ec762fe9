"""A fake judge: an OpenAI-compatible server in a thread whose replies come from a function."""

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Answer = Callable[[dict[str, Any], int], "tuple[int, Any] | str"]
"""From the body of a request and its number: the text of the answer, or a status and a body."""


@dataclass
class JudgeServer:
    """Its address, and the requests it received."""

    url: str = ""
    bodies: list[dict[str, Any]] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    max_running: int = 0
    """The most requests that were there at once."""


@contextmanager
def judge_server(answer: Answer) -> Iterator[JudgeServer]:
    """Serves until the context ends."""
    server, lock, present = JudgeServer(), threading.Lock(), 0

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            nonlocal present
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            with lock:
                number = len(server.bodies)
                server.bodies.append(body)
                server.headers.append(dict(self.headers) | {"path": self.path})
                present += 1
                server.max_running = max(server.max_running, present)
            reply = answer(body, number)
            with lock:
                present -= 1
            if isinstance(reply, str):
                reply = 200, {"choices": [{"index": 0, "message": {"role": "assistant", "content": reply}}]}
            data = json.dumps(reply[1]).encode()
            self.send_response(reply[0])
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *_: Any) -> None:
            pass

    http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    http.daemon_threads = True
    server.url = f"http://127.0.0.1:{http.server_port}/v1"
    threading.Thread(target=http.serve_forever, daemon=True).start()
    try:
        yield server
    finally:
        http.shutdown()
        http.server_close()
