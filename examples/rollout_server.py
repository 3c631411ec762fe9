"""A rollout server of your own: the class by which a run talks to it.

    postlude grpo demo --rollout http://gpu-7:8000 --rollout.api examples/rollout_server.py:MinimalAPI

The server of this example has four routes with JSON bodies:

    GET  /v1/models   -> {data: [{id}]}
    GET  /version     -> {version}, the name of its weights
    POST /generate    {prompt, sampling, first_index} -> {tokens, logprobs, finish_reason}
    POST /load        {directory, version}, reads new weights -> {version}
"""

from __future__ import annotations

from dataclasses import asdict

from postlude.generate.protocol import Completion, Request
from postlude.serving.clients.api import SendRequest, ServerAPI, make_completion
from postlude.serving.errors import InvalidResponse


class MinimalAPI(ServerAPI):
    name = "minimal"
    can_reload_weights = True  # it takes new weights while it runs, so a run can train with it

    async def generate(self, send: SendRequest, model: str, request: Request) -> Completion:
        body = {
            "prompt": list(request.prompt),
            "sampling": asdict(request.sampling),
            "first_index": request.first_index,
        }
        reply = await send("POST", "/generate", body)
        try:
            return make_completion(reply["tokens"], reply["logprobs"], reply["finish_reason"])
        except KeyError as error:
            raise InvalidResponse(f"gave no {error} at /generate") from error

    async def weights_version(self, send: SendRequest) -> str:
        return str((await send("GET", "/version"))["version"])

    async def reload(self, send: SendRequest, directory: str, version: str) -> None:
        await send("POST", "/load", {"directory": directory, "version": version})
