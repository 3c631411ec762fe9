"""Postlude's own server, `postlude serve`: the native generator behind HTTP.

    GET  /v1/models    as OpenAI's, owned by "postlude"
    POST /generate     {model, prompt, first_index, sampling} -> {tokens, logprobs, sampled_logprobs, finish_reason,
                       text, sampling_mask, versions: [[version, start, end]]}; `sampling` has the fields of
                       `SamplingParams`, `sampling_mask` the tokens that each token was sampled from, or is null
    GET  /weights      -> {version, checksum}, each null where there is none
    POST /weights      {directory, version} -> the same, after the weights are loaded
    POST /weights/pieces   a piece of new weights as bytes (`weights.delta`) -> the same, of the new ones after the last
    POST /weights/pieces/files   {directory, version, checksum, base} -> the same: it reads the pieces itself, of the
                       changes since the version `base` or, if it is null, of all weights; 404 without the directory
    POST /adapters     {name, directory, version} -> the same, after the adapter of peft's files is loaded or replaced;
                       requests whose model is `name` use it

Floats keep every bit. An invalid request gets status 400 and {"error": {"message": sentence}}. Types are strict: 1.0
is no token id, and "ab" is no list of stop strings.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any, get_type_hints

from pydantic import create_model

from postlude.generate.protocol import Completion, Request, VersionSpan
from postlude.generate.sampling_params import SamplingParams
from postlude.serving.clients.api import SendRequest, ServerAPI, make_completion
from postlude.serving.errors import InvalidResponse
from postlude.serving.request_body import Body, Tokens
from postlude.serving.weights.delta import WeightPieces

OWNER = "postlude"
GENERATE, WEIGHTS, PIECES, ADAPTERS = "/generate", "/weights", "/weights/pieces", "/adapters"
PIECE_FILES = f"{PIECES}/files"
_TYPES = get_type_hints(SamplingParams)
_FIELDS: dict[str, Any] = {field.name: (_TYPES[field.name], field.default) for field in fields(SamplingParams)}
_SamplingBody = create_model("_SamplingBody", __base__=Body, **_FIELDS)


class PostludeAPI(ServerAPI):
    name = "postlude"
    can_reload_weights = True
    reports_checksum = True
    has_logit_rules = True
    has_sampling_mask = True
    takes_pieces = True

    async def generate(self, send: SendRequest, model: str, request: Request) -> Completion:
        body = {
            "model": model,
            "prompt": list(request.prompt),
            "first_index": request.first_index,
            "sampling": asdict(request.sampling),
        }
        return read_completion(await send("POST", GENERATE, body))

    async def weights_version(self, send: SendRequest) -> str | None:
        """Returns the name of its weights; None where it was started without weights."""
        version = _field(await send("GET", WEIGHTS), "version")
        return None if version is None else str(version)

    async def weights_checksum(self, send: SendRequest) -> str | None:
        """Returns the checksum of the weights that it loaded last."""
        return str(_field(await send("GET", WEIGHTS), "checksum"))

    async def reload(self, send: SendRequest, directory: str, version: str) -> None:
        """Loads weights. Running completions continue: the new model prefills their tokens again."""
        await send("POST", WEIGHTS, {"directory": directory, "version": version})

    async def send_piece(self, send: SendRequest, piece: bytes) -> None:
        """Sends a piece. After the last one running completions continue: their tokens are prefilled again."""
        await send("POST", PIECES, piece)

    async def read_pieces(self, send: SendRequest, weights: WeightPieces) -> None:
        """Makes it read the changes since `base`, or all weights, from their directory."""
        body = PieceFilesBody(
            directory=str(weights.directory), version=weights.version, checksum=weights.checksum, base=weights.base
        )
        await send("POST", PIECE_FILES, dict(body))

    async def adapter_problem(self, send: SendRequest) -> str:
        """Returns "": every server loads adapters."""
        return ""

    async def load_adapter(self, send: SendRequest, name: str, directory: str, version: str) -> None:
        """Loads or replaces an adapter. Running completions continue: their tokens are prefilled again."""
        await send("POST", ADAPTERS, {"name": name, "directory": directory, "version": version})


class GenerateBody(Body):
    """The body of POST /generate. `sampling` has the fields, types and defaults of `SamplingParams`."""

    prompt: Tokens
    sampling: _SamplingBody
    first_index: int = 0
    model: str | None = None


class WeightsBody(Body):
    directory: str
    version: str


class PieceFilesBody(Body):
    """The body of POST /weights/pieces/files."""

    directory: str
    version: str
    checksum: str
    base: str | None = None

    def weights(self) -> WeightPieces:
        return WeightPieces(Path(self.directory), self.version, self.checksum, self.base)


class AdapterBody(Body):
    name: str
    directory: str
    version: str


def read_request(body: GenerateBody, adapter: str | None = None, client: tuple[str, ...] = ()) -> Request:
    """Returns the request in a body. Raises a ValueError where its values are invalid."""
    sampling = SamplingParams(**dict(body.sampling))
    return Request(body.prompt, sampling, first_index=body.first_index, adapter=adapter, client=client)


def write_completion(completion: Completion) -> dict[str, Any]:
    return {
        "tokens": completion.tokens,
        "logprobs": completion.logprobs,
        "sampled_logprobs": completion.sampled_logprobs,
        "finish_reason": completion.finish_reason,
        "text": completion.text,
        "reused_prompt_tokens": completion.reused_prompt_tokens,
        "drafted": completion.drafted,
        "accepted": completion.accepted,
        "top_logprobs": completion.top_logprobs,
        "sampling_mask": None
        if completion.sampling_mask is None
        else [list(mask) for mask in completion.sampling_mask],
        "versions": [list(span) for span in completion.versions],
    }


def read_completion(body: Any) -> Completion:
    """Returns the completion in a reply. Raises `InvalidResponse` if there is none."""
    try:
        completion = make_completion(body["tokens"], body["logprobs"], body["finish_reason"], body["text"])
        sampled = make_completion(body["tokens"], body["sampled_logprobs"], body["finish_reason"]).logprobs
        masks = body["sampling_mask"]
        return replace(
            completion,
            sampled_logprobs=sampled,
            sampling_mask=None if masks is None else [array("i", mask) for mask in masks],
            reused_prompt_tokens=int(body["reused_prompt_tokens"]),
            drafted=int(body["drafted"]),
            accepted=int(body["accepted"]),
            top_logprobs=tuple([(int(i), float(value)) for i, value in place] for place in body["top_logprobs"]),
            versions=tuple(VersionSpan(str(name), int(start), int(end)) for name, start, end in body["versions"]),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise InvalidResponse(f"gave a completion without token ids or log-probs at {GENERATE}: {error!r}") from error


def _field(reply: Any, name: str) -> Any:
    if not isinstance(reply, Mapping) or name not in reply:
        raise InvalidResponse(f"does not report the {name} of its weights at {WEIGHTS}")
    return reply[name]
