"""API_ROUTES: the routes of OpenAI's and Anthropic's APIs that every server of a model has.

Importing this is quick; `ModelRoutes`, which replies, needs seconds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from postlude.serving.http.errors import HTTPError
from postlude.serving.http.replies import ANTHROPIC, OPENAI, RESPONSES, ReplyFormat

PREFIX = "/v1"
MODELS = "/models"  # a list of `model_entry`; one is at MODELS/NAME


@dataclass(frozen=True)
class APIRoute:
    path: str
    """After the prefix."""
    method: str
    """The method of `ModelRoutes` that replies."""
    format: ReplyFormat = OPENAI


API_ROUTES = (  # in this order they are tried: the frequent ones first
    APIRoute("/chat/completions", "chat"),
    APIRoute("/responses", "responses", RESPONSES),
    APIRoute("/messages", "messages", ANTHROPIC),
    APIRoute("/messages/count_tokens", "count_tokens", ANTHROPIC),
    APIRoute("/completions", "completions"),
)


def format_of(path: str) -> ReplyFormat:
    """Returns the format of errors at a path, which may have no route."""
    return next((route.format for route in API_ROUTES if path.endswith(route.path)), OPENAI)


def model_entry(name: str, owner: str, **fields: Any) -> dict[str, Any]:
    """Returns what a client is told of a model, with the fields of both APIs."""
    anthropic = {"type": "model", "display_name": name, "created_at": "1970-01-01T00:00:00Z"}
    return {"id": name, "object": "model", "created": 0, "owned_by": owner, **anthropic, **fields}


def models_reply(models: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Returns the list of models, which is one page in Anthropic's API."""
    ids = [model["id"] for model in models] or [None]
    return {"object": "list", "data": list(models), "has_more": False, "first_id": ids[0], "last_id": ids[-1]}


def model_reply(models: Sequence[dict[str, Any]], name: str) -> dict[str, Any]:
    for model in models:
        if model["id"] == name:
            return model
    raise unknown_model(name, [model["id"] for model in models])


def unknown_model(name: str | None, known: Sequence[str]) -> HTTPError:
    """Returns the error for a model that is not served."""
    served = ", ".join(map(repr, known))
    return HTTPError(404, f"model is {name!r:.200}, but {served:.1000} is served here.", "model_not_found")
