"""Postlude's own server, `postlude serve`: the native generator on the other side of HTTP.

    GET  /v1/models    as others have it, owned by "postlude"
    POST /generate     {model, prompt, first, sampling} -> {tokens, logprobs, sampled_logprobs, finish_reason, text,
                       versions: [[version, start, end]]}; `sampling` has the fields of `SamplingParams`
    GET  /weights      -> {version, checksum}, each null where it has none
    POST /weights      {directory, version} -> the same, when all of them are read

Numbers are written so that they are read as they were. A mistake is status 400 and {"error": a sentence}. Values must
have the types they should have: 1.0 is no token id, and "ab" no list of stop strings.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, fields, replace
from typing import Any, get_type_hints

from pydantic import create_model

from postlude.generate.protocol import Completion, Request, VersionSpan
from postlude.generate.sampling_params import SamplingParams
from postlude.serving.clients.api import Ask, ServerAPI, completion
from postlude.serving.errors import InvalidResponse
from postlude.serving.request_body import Body, Tokens

OWNER = "postlude"
GENERATE, WEIGHTS = "/generate", "/weights"
_TYPES = get_type_hints(SamplingParams)
_FIELDS: dict[str, Any] = {field.name: (_TYPES[field.name], field.default) for field in fields(SamplingParams)}
_SamplingBody = create_model("_SamplingBody", __base__=Body, **_FIELDS)


class PostludeAPI(ServerAPI):
    """One `postlude serve`."""

    name = "postlude"
    reloads = True
    sums = True

    async def answer(self, ask: Ask, model: str, request: Request) -> Completion:
        """One answer."""
        return read_completion(await ask("POST", GENERATE, write_request(request, model)))

    async def version(self, ask: Ask) -> str | None:
        """What it calls its weights; None of one that was started without."""
        found = _field(await ask("GET", WEIGHTS), "version")
        return None if found is None else str(found)

    async def checksum(self, ask: Ask) -> str | None:
        """Of the weights that it was last given."""
        return str(_field(await ask("GET", WEIGHTS), "checksum"))

    async def reload(self, ask: Ask, directory: str, version: str) -> None:
        """Answers in flight are kept, and go on with the new weights: all before passes the model anew."""
        await ask("POST", WEIGHTS, {"directory": directory, "version": version})


def write_request(request: Request, model: str) -> dict[str, Any]:
    """A request for one answer, as JSON has it."""
    return {
        "model": model,
        "prompt": list(request.prompt),
        "first": request.first,
        "sampling": asdict(request.sampling),
    }


class GenerateBody(Body):
    """What is posted to GENERATE. `sampling` has the fields of `SamplingParams`, with their types and defaults."""

    prompt: Tokens
    sampling: _SamplingBody  # type: ignore[valid-type]
    first: int = 0
    model: str | None = None


class WeightsBody(Body):
    """What is posted to WEIGHTS."""

    directory: str
    version: str


def read_request(body: GenerateBody) -> Request:
    """The request that was written so; a sentence where the values make none."""
    return Request(body.prompt, SamplingParams(**dict(body.sampling)), first=body.first)


def write_completion(found: Completion) -> dict[str, Any]:
    """An answer, as JSON has it."""
    return {
        "tokens": found.tokens,
        "logprobs": found.logprobs,
        "sampled_logprobs": found.sampled_logprobs,
        "finish_reason": found.finish_reason,
        "text": found.text,
        "drafted": found.drafted,
        "accepted": found.accepted,
        "versions": [list(span) for span in found.versions],
    }


def read_completion(body: Any) -> Completion:
    """The answer that was written so; `InvalidResponse` of anything else."""
    try:
        found = completion(body["tokens"], body["logprobs"], body["finish_reason"], body["text"])
        sampled = completion(body["tokens"], body["sampled_logprobs"], body["finish_reason"]).logprobs
        return replace(
            found,
            sampled_logprobs=sampled,
            drafted=int(body["drafted"]),
            accepted=int(body["accepted"]),
            versions=tuple(VersionSpan(str(name), int(start), int(end)) for name, start, end in body["versions"]),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise InvalidResponse(f"gave an answer without token ids or log-probs at {GENERATE}: {error!r}") from error


def _field(found: Any, name: str) -> Any:
    if not isinstance(found, Mapping) or name not in found:
        raise InvalidResponse(f"does not tell the {name} of its weights at {WEIGHTS}")
    return found[name]
