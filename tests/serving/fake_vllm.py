"""FakeVLLM: a server with vLLM's API in a thread. Its completions are deterministic, and it can be made to fail."""

from __future__ import annotations

import json
import socket
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import urlsplit

OLD = "default"  # what vLLM calls the weights it was started with
AnswerFunction = Callable[[dict[str, Any]], tuple[list[int], list[float]]]


def deterministic_completion(body: dict[str, Any]) -> tuple[list[int], list[float]]:
    """Returns tokens and log-probs that depend on the request alone, not on the server."""
    params = body["sampling_params"]
    tokens = [(params["seed"] + sum(body["token_ids"]) + index) % 251 for index in range(params["max_tokens"])]
    return tokens, [-float(token) / 100 for token in tokens]


class Refusal(Exception):
    """An error reply with a status."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class FakeVLLM:
    """`calls` are the requested paths in order. `before` runs before a completion; bytes that it returns replace it."""

    def __init__(
        self, answer: AnswerFunction = deterministic_completion, port: int = 0, host: str = "127.0.0.1"
    ) -> None:
        self.answer, self.version, self.directory = answer, OLD, ""
        self.release = "0.33.0"
        self.before: Callable[[], bytes | None] = lambda: None
        self.read: Callable[[str], None] = lambda directory: None
        self.calls: list[str] = []
        self.answered = 0
        self.dead = False
        self.lock = threading.Lock()
        self.connections: set[socket.socket] = set()
        outer = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            timeout = 300
            wbufsize = 1 << 16  # an answer goes out in one piece

            def setup(self) -> None:
                super().setup()
                outer.connections.add(self.connection)

            def do_GET(self) -> None:
                outer.handle(self, None)

            def do_POST(self) -> None:
                text = self.rfile.read(int(self.headers["Content-Length"]))
                outer.handle(self, json.loads(text) if text else None)

            def log_message(self, *arguments: object) -> None:
                pass

        class Listener(ThreadingHTTPServer):
            allow_reuse_address = True
            daemon_threads = True

            def handle_error(self, *arguments: object) -> None:
                pass  # connections that were cut are the point

        self.server = Listener((host, port), Handler)
        self.port = self.server.server_port
        self.url = f"http://{host}:{self.port}"
        threading.Thread(target=self.server.serve_forever, args=(0.01,), daemon=True).start()

    def handle(self, handler: BaseHTTPRequestHandler, body: Any) -> None:
        path = urlsplit(handler.path).path
        with self.lock:
            self.calls.append(path)
        broken_reply = self.broken_reply(path, body)
        if self.dead:
            handler.close_connection = True
            return
        status = 400 if path == "/inference/v1/generate" and not body else 200
        try:
            answer = None if broken_reply else self.reply(path, body)
            payload = broken_reply or (answer.encode() if isinstance(answer, str) else json.dumps(answer).encode())
        except Refusal as refusal:
            status, payload = refusal.status, json.dumps({"error": str(refusal)}).encode()
        with suppress(OSError):
            handler.send_response(status)
            handler.send_header("Content-Length", str(len(payload)))
            handler.end_headers()
            handler.wfile.write(payload)

    def broken_reply(self, path: str, body: Any) -> bytes | None:
        return self.before() if path == "/inference/v1/generate" and body else None

    def reply(self, path: str, body: Any) -> Any:
        match path:
            case "/v1/models":
                return {"data": [{"id": "tiny", "owned_by": "vllm"}]}
            case "/version":
                return {"version": self.release}
            case "/weight_info" | "/update_weight_version" if self.release.startswith("0.26"):
                raise Refusal(404, "Not Found")
            case "/weight_info":
                return {"weight_version": self.version}
            case "/update_weight_version":
                self.version = body["new_version"]
            case "/collective_rpc" if body["method"].startswith("postlude"):
                self.version = body.get("kwargs", {}).get("version", self.version)
                return {"results": [{"weight_version": self.version}]}
            case "/collective_rpc":
                self.directory = body["kwargs"]["weights_path"]
                self.read(self.directory)
            case "/inference/v1/generate" | "/v1/completions" if body:
                return self.choice(body)
        return {"success": True}

    def choice(self, body: Any) -> Any:
        version = self.version
        if "prompt" in body:  # /v1/completions, as a request to /inference/v1/generate
            body = {"token_ids": body["prompt"], "sampling_params": body}
        tokens, logprobs = self.answer(body)
        with self.lock:
            self.answered += 1
        content = [{"logprob": logprob} for logprob in logprobs]
        logprob_fields = {"content": content, "token_logprobs": logprobs}
        versions = [{"version": version, "start": 0, "end": len(tokens)}]
        choice = {"index": 0, "token_ids": tokens, "logprobs": logprob_fields, "finish_reason": "length"}
        return {"choices": [choice | {"weight_versions": versions}]}

    def kill(self) -> None:
        """Closes the port and all connections, as SIGKILL does."""
        self.dead = True
        self.server.server_close()
        for connection in list(self.connections):
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
        threading.Thread(target=self.server.shutdown, daemon=True).start()

    def close(self) -> None:
        self.kill()


if __name__ == "__main__":  # python -m tests.serving.fake_vllm PORT [HOST]: a process of its own
    FakeVLLM(port=int(sys.argv[1]), host=(*sys.argv, "127.0.0.1")[2])
    threading.Event().wait()
