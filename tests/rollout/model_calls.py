"""A model call of an agent. Imports nothing heavy: the worker processes of agents and rewards import it."""

from __future__ import annotations

import http.client
import json
from typing import Any
from urllib.parse import urlsplit


def post(url: str, key: str, body: Any, path: str = "/v1/chat/completions") -> tuple[int, Any]:
    """Returns the status and the JSON of a reply."""
    connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=30)
    headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
    connection.request("POST", path, json.dumps(body), headers)
    reply = connection.getresponse()
    data = json.loads(reply.read())
    connection.close()
    return reply.status, data
