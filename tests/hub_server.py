"""A local server with the Hugging Face Hub's API, for repositories given as dicts of files."""

import hashlib
import json
import re
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

API = re.compile(r"/api/(models|datasets)/([^/]+/[^/]+)/(revision|tree)/([^/?]+)")
FILE = re.compile(r"/(datasets/)?([^/]+/[^/]+)/resolve/([^/]+)/(.+)")


@dataclass
class Hub:
    """Repositories by kind and id: {("models", "org/name"): {"config.json": b"..."}}. All have the branch main."""

    repos: dict[tuple[str, str], dict[str, bytes]]
    url: str = ""
    requests: list[str] = field(default_factory=list)
    """Every request, as "METHOD path"."""
    gated: set[str] = field(default_factory=set)
    fails_for: str = ""
    """A file whose download is answered with an error of the server."""

    def commit(self, kind: str, name: str) -> str:
        files = self.repos[kind, name]
        return hashlib.sha1(json.dumps([kind, name, *sorted(files)]).encode()).hexdigest()

    def answer(self, path: str) -> tuple[int, dict[str, str], bytes]:
        """Returns the status, headers and body of a request."""
        if api := API.match(path):
            kind, name, route, revision = api.groups()
            refusal = self._refusal(kind, name, revision)
            if refusal is not None:
                return refusal
            files = self.repos[kind, name]
            entries = [
                {"type": "file", "path": file, "oid": _oid(data), "size": len(data)} for file, data in files.items()
            ]
            siblings = [{"rfilename": file} for file in files]
            info = {"id": name, "sha": self.commit(kind, name), "siblings": siblings}
            return 200, {"Content-Type": "application/json"}, json.dumps(entries if route == "tree" else info).encode()
        if file := FILE.match(path):
            kind, name = "datasets" if file[1] else "models", file[2]
            refusal = self._refusal(kind, name, file[3])
            data = self.repos.get((kind, name), {}).get(file[4])
            if refusal is not None or data is None:
                return refusal or (404, {"X-Error-Code": "EntryNotFound"}, b"")
            if file[4] == self.fails_for:
                return 403, {}, b""
            return 200, {"ETag": f'"{_oid(data)}"', "X-Repo-Commit": self.commit(kind, name)}, data
        return 404, {}, b""

    def _refusal(self, kind: str, name: str, revision: str) -> tuple[int, dict[str, str], bytes] | None:
        if (kind, name) not in self.repos:
            return 404, {"X-Error-Code": "RepoNotFound"}, b""
        if name in self.gated:
            return 403, {"X-Error-Code": "GatedRepo"}, b""
        if revision not in ("main", self.commit(kind, name)):
            return 404, {"X-Error-Code": "RevisionNotFound"}, b""
        return None


def _oid(data: bytes) -> str:
    return hashlib.sha1(data).hexdigest()


@contextmanager
def serve_hub(repos: Mapping[tuple[str, str], Mapping[str, bytes]]) -> Iterator[Hub]:
    """Runs the server in a thread."""
    hub = Hub({key: dict(files) for key, files in repos.items()})

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            hub.requests.append(f"{self.command} {self.path}")
            status, headers, body = hub.answer(self.path)
            self.send_response(status)
            for name, value in {**headers, "Content-Length": str(len(body))}.items():
                self.send_header(name, value)
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(body)

        do_HEAD = do_GET

        def log_message(self, *arguments: Any) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    hub.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def use_hub(monkeypatch: pytest.MonkeyPatch, url: str, cache: Path, *, offline: bool = False) -> None:
    """Sets the values of HF_ENDPOINT, HF_HUB_CACHE and HF_HUB_OFFLINE, which the library reads at import."""
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "ENDPOINT", url)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", url + "/{repo_id}/resolve/{revision}/{filename}")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", offline)
