"""The ASGI application of the Tinker API: keys, routes, bodies, replies."""

from __future__ import annotations

import contextlib
import hmac
import logging
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from inspect import isawaitable
from typing import TypeVar
from urllib.parse import quote

from pydantic import BaseModel
from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.responses import FileResponse, Response
from starlette.routing import Route

from postlude.serving.http.access import Keys
from postlude.serving.http.errors import HTTPError
from postlude.serving.http.metrics import METRICS, metrics_reply
from postlude.serving.http.replies import JSONReply, ReplyFormat
from postlude.serving.http.requests import IDENTITY, BodyTooLarge, content_coding, read_body
from postlude.serving.http.requests import JSON as JSON_TYPE
from postlude.serving.request_body import parse
from postlude.tinker import bodies, wire
from postlude.tinker.futures import JSON, Future, digest
from postlude.tinker.model_requests import ModelRequests
from postlude.tinker.paths import TinkerPath
from postlude.tinker.records import Records
from postlude.tinker.service import TinkerService
from postlude.tinker.training import OperationRole

LOG = logging.getLogger("postlude")
API = "/api/v1"
PROTOBUF, ZSTD = "application/x-protobuf", "zstd"
HEALTH = f"{API}/healthz"  # needs no key
URL_SECONDS = 3600  # how long a link to a file works
HEAD_BYTES = 1024  # of a request that is too large, to find out which one it is
HandlerReply = Response | JSON | Future | None
HandlerResult = HandlerReply | Awaitable[HandlerReply]
Handler = Callable[[Request, str], HandlerResult]
Schema = TypeVar("Schema", bound=BaseModel)
TINKER = ReplyFormat(lambda error: {"error": str(error)})


class TinkerApp:
    """The routes of one service."""

    def __init__(self, service: TinkerService, keys: Keys, *, compress: bool = False) -> None:
        self.service, self._keys, self._compress = service, keys, compress
        self._models, self._records = ModelRequests(service), Records(service)
        self._secret = secrets.token_bytes(32)  # signs links to files
        self._user_agents: set[str] = set()

    def build(self, extra_routes: Sequence[Route] = ()) -> Starlette:
        """Returns the application, with the service running while it is up. `extra_routes` are added to ours."""

        @contextlib.asynccontextmanager
        async def lifespan(_: Starlette) -> AsyncIterator[None]:
            await self.service.start()
            try:
                yield
            finally:
                await self.service.stop()

        return Starlette(routes=[*self._routes(), *extra_routes], lifespan=lifespan)

    def _routes(self) -> list[Route]:
        service, models, records = self.service, self._models, self._records
        body, training, checkpoint = self._with_body, self._training, "/training_runs/{run}/checkpoints/{kind}/{name}"
        table: dict[str, dict[str, Handler]] = {  # in this order they are tried: the frequent ones first
            "POST": {
                "/retrieve_future": body(bodies.RequestBody, self._retrieve),
                "/asample": body(bodies.SampleBody, service.sample),
                "/forward_backward": self._forward_backward,
                "/optim_step": training(bodies.OptimStepBody, models.optim_step),
                "/session_heartbeat": body(bodies.SessionBody, service.heartbeat),
                "/client/config": body(bodies.ClientConfigBody, self._client_config),
                "/client/dynamic_config": self._fixed({"sample_cancel_enabled": True}),
                "/create_session": body(bodies.CreateSessionBody, service.create_session),
                "/sessions/{session}/finish": self._finish,
                "/telemetry": self._fixed({"status": "accepted"}),
                "/create_model": body(bodies.CreateModelBody, models.create_model),
                "/get_info": body(bodies.ModelBody, models.get_info),
                "/save_weights": training(bodies.SaveBody, models.save_state),
                "/save_weights_for_sampler": training(bodies.SaveBody, models.save_for_sampler),
                "/save_weights_external": training(bodies.SaveBody, models.save_external),
                "/load_weights": training(bodies.LoadBody, models.load),
                "/weights_info": body(bodies.PathBody, records.weights_info),
                "/create_sampling_session": body(bodies.SamplingSessionBody, service.create_sampling_session),
                "/join_sampling_session": body(bodies.JoinBody, service.join_sampling_session),
                "/cancel_future": body(bodies.RequestBody, service.cancel),
                f"{checkpoint}/publish": lambda request, owner: records.set_public(owner, _path(request), public=True),
            },
            "GET": {
                "/get_server_capabilities": lambda _, __: records.capabilities(),
                "/samplers/{name}": _named(records.sampler),
                "/training_runs": _paged(records.training_runs),
                "/training_runs/{name}": _named(records.training_run),
                "/training_runs/{name}/checkpoints": _named(records.checkpoints_of_run),
                "/checkpoints": _paged(records.checkpoints),
                f"{checkpoint}/external_weights_urls": self._urls,
                "/sessions": _paged(records.sessions),
                "/sessions/{name}": _named(records.session),
            },
            "PUT": {f"{checkpoint}/ttl": self._ttl},
            "DELETE": {
                checkpoint: lambda request, owner: records.delete(owner, _path(request)),
                f"{checkpoint}/publish": lambda request, owner: records.set_public(owner, _path(request), public=False),
            },
        }
        routes = [
            Route(API + path, self.endpoint(handler), methods=[method])
            for method, handlers in table.items()
            for path, handler in handlers.items()
        ]
        routes.append(Route(HEALTH, self._health, methods=["GET"]))
        routes.append(Route(METRICS, self._metrics, methods=["GET"]))
        routes.append(Route(API + "/files/{run}/{name}/{file:path}", self._file, methods=["GET"]))
        routes.append(Route(API + "/{path:path}", self.endpoint(self.unknown), methods=list(table)))
        return routes

    def endpoint(self, handler: Handler, form: ReplyFormat = TINKER) -> Callable[[Request], Awaitable[Response]]:
        """Returns a handler with keys checked and errors turned into replies."""

        async def reply(request: Request) -> Response:
            owner = self._owner(request)
            self._log_user_agent(request.headers)
            try:
                result = handler(request, owner)
                if isawaitable(result):
                    result = await result
            except (ValueError, TypeError, OverflowError) as error:
                raise HTTPError(400, str(error)) from error
            if result is None:
                return Response(status_code=204)
            if isinstance(result, Future):  # its result is fetched later
                result = {"request_id": result.request_id} | result.reply
            return await form.reply(result)

        async def endpoint(request: Request) -> Response:
            return await form.respond(request, reply(request))

        return endpoint

    def _log_user_agent(self, headers: Headers) -> None:
        agent = headers.get("user-agent", "")[:80]
        if agent not in self._user_agents and len(self._user_agents) < 100:
            self._user_agents.add(agent)
            LOG.info("first request of %s", agent or "a client without a name")

    def _owner(self, request: Request) -> str:
        owner = self._keys.owner(request.headers)
        if owner is None:
            raise HTTPError(401, "the request has no key: set TINKER_API_KEY, or the header X-API-Key.")
        return owner

    async def read(self, request: Request) -> bytes:
        """Returns the body of a request within the limits, decompressed."""
        limits = self.service.limits
        kind = request.headers.get("content-type", "").partition(";")[0]
        limit = limits.body_bytes if kind == PROTOBUF else min(limits.json_bytes, limits.body_bytes)
        try:
            types, codings = (JSON_TYPE, PROTOBUF), (IDENTITY, ZSTD)
            body = await read_body(request, limit, limits.body_seconds, types, HEAD_BYTES, codings)
        except BodyTooLarge as error:
            await self._refuse_large(request, error.head)
            raise
        if content_coding(request) != ZSTD:
            return body
        try:
            return wire.decompress(body, limit)
        except HTTPError as error:
            if error.status == 413:
                await self._refuse_large(request, wire.decompress_head(body, HEAD_BYTES))
            raise

    async def _refuse_large(self, request: Request, head: bytes) -> None:
        """Lets a pass that is too large also fail in its turn, since later requests of its model wait for it."""
        named = wire.head_of_forward_backward(head) if request.url.path == f"{API}/forward_backward" else None
        model = self.service.training.models.get(named[0]) if named is not None else None
        if named is not None and model is not None and model.owner == self._owner(request):
            sentence = f"the pass has more than {self.service.limits.body_bytes} bytes, which is the server's limit."
            self.service.training.refuse(model, named[1], "forward_backward", digest(head), sentence, "pass")

    def _with_body(self, schema: type[Schema], action: Callable[[str, Schema], HandlerResult]) -> Handler:
        """Returns a handler that reads the body of a request and calls `action(owner, body)`."""

        async def handle(request: Request, owner: str) -> HandlerReply:
            reply = action(owner, parse(schema, await self.read(request) or b"{}"))
            return await reply if isawaitable(reply) else reply

        return handle

    def _training(self, schema: type[Schema], action: Callable[[str, Schema], Awaitable[Future]]) -> Handler:
        """Does the same for a training request. An invalid one also fails in its turn, since later ones wait for it."""

        async def handle(request: Request, owner: str) -> HandlerReply:
            raw, kind = await self.read(request), request.url.path.rpartition("/")[2]
            try:
                body = parse(schema, raw)
            except ValueError as error:
                with contextlib.suppress(ValueError, HTTPError):
                    which = parse(bodies.TrainingBody, raw)
                    model = self.service.model(owner, which.model_id)
                    role: OperationRole = "step" if kind == "optim_step" else "other"
                    self.service.training.refuse(model, which.seq_id, kind, digest(raw), str(error), role)
                raise
            return await action(owner, body)

        return handle

    def _fixed(self, reply: JSON) -> Handler:
        """Returns a handler that ignores the body and always gives this reply."""

        async def handle(request: Request, _: str) -> HandlerReply:
            await self.read(request)
            return reply

        return handle

    async def _health(self, _: Request) -> Response:
        return JSONReply({"status": "ok"})

    async def _metrics(self, request: Request) -> Response:
        try:
            self._keys.owner(request.headers)
        except HTTPError as error:
            return TINKER.error(error)
        return metrics_reply(self.service.metrics.families())

    async def unknown(self, request: Request, _: str) -> HandlerReply:
        raise HTTPError(404, f"{request.method} {request.url.path} is not supported by this server.")

    def _client_config(self, _: str, body: bodies.ClientConfigBody) -> HandlerReply:
        LOG.info("a client has tinker %s", body.sdk_version or "of unknown version")
        return {
            "proto_compress_fwdbwd": self._compress,
            "sample_join_sampling_session": True,
            "create_model_via_load_weights": True,
        }

    async def _finish(self, request: Request, owner: str) -> HandlerReply:
        body = parse(bodies.FinishBody, await self.read(request) or b"{}")
        await self.service.finish_session(owner, request.path_params["session"], body.reason.type)
        return None

    async def _forward_backward(self, request: Request, owner: str) -> HandlerReply:
        body = await self.read(request)
        kind = request.headers.get("content-type", "").partition(";")[0]
        if kind != PROTOBUF:
            raise HTTPError(415, f"forward_backward has the Content-Type {kind[:60]!r}; send {PROTOBUF}.")
        return await self._models.forward_backward(owner, wire.parse_forward_backward(body), len(body))

    async def _retrieve(self, owner: str, body: bodies.RequestBody) -> HandlerReply:
        request_id = body.request_id
        try:
            future = self.service.future(owner, request_id)
        except HTTPError as error:
            if error.status != 410 or ":train:" not in request_id:
                raise
            return {"error": str(error), "category": "server"}  # the client shows it; of a 410 it shows nothing
        if not await self.service.futures.wait(future):
            state, reason = self.service.training.queue_state(request_id.rpartition(":request:")[0])
            pending = {
                "type": "try_again",
                "request_id": request_id,
                "queue_state": state,
                "queue_state_reason": reason,
            }
            return JSONReply(pending, status_code=408)
        future.fetched = time.monotonic()
        if future.failure is not None:
            return {"error": future.failure.sentence, "category": future.failure.category}
        if isinstance(future.result, bytes):
            return Response(future.result, media_type=PROTOBUF)
        return future.result

    async def _ttl(self, request: Request, owner: str) -> HandlerReply:
        body = parse(bodies.TTLBody, await self.read(request) or b"{}")
        await self._records.set_ttl(owner, _path(request), body.ttl_seconds)
        return None

    # Files of external weights, by links that work without a key for an hour

    async def _urls(self, request: Request, owner: str) -> HandlerReply:
        path = _path(request)
        self.service.checkpoint(owner, path)
        if path.kind != "external_weights":
            raise HTTPError(400, f"{path} has no links: save it with save_weights_external.")
        expires = int(time.time()) + URL_SECONDS
        server = f"{request.url.scheme}://{request.headers.get('host', '')}"
        base = f"{server}{API}/files/{quote(path.run_id)}/{quote(path.name)}"
        urls = {
            name: f"{base}/{quote(name)}?expires={expires}&signature={self._signature(path, name, expires)}"
            for name in self.service.state.files_of(path)
        }
        return {"urls": urls, "expires": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(expires))}

    def _signature(self, path: TinkerPath, name: str, expires: int) -> str:
        return hmac.new(self._secret, f"{path}/{name}?{expires}".encode(), "sha256").hexdigest()

    async def _file(self, request: Request) -> Response:
        parameters, query = request.path_params, request.query_params
        try:
            path, name = TinkerPath(parameters["run"], "external_weights", parameters["name"]), parameters["file"]
            expires = int(query.get("expires", "0"))
            right = hmac.compare_digest(
                self._signature(path, name, expires).encode(), query.get("signature", "").encode()
            )
            file = self.service.state.files_of(path).get(name) if right and expires >= time.time() else None
        except ValueError:
            file = None
        if file is None:
            return TINKER.error(HTTPError(403, "the link is wrong or has expired; ask for a new one."))
        return FileResponse(file)


def _named(read: Callable[[str, str], JSON]) -> Handler:
    """Returns a handler that calls `read(owner, name)` with the name in the path."""
    return lambda request, owner: read(owner, request.path_params["name"])


def _paged(read: Callable[[str, int, int], JSON]) -> Handler:
    """Returns a handler that calls `read(owner, limit, offset)` with those of the query."""

    def handle(request: Request, owner: str) -> JSON:
        query = request.query_params
        try:
            limit, offset = int(query.get("limit", "20")), int(query.get("offset", "0"))
        except ValueError:
            raise HTTPError(400, "limit and offset are whole numbers.") from None
        return read(owner, limit, offset)

    return handle


def _path(request: Request) -> TinkerPath:
    parameters = request.path_params
    return TinkerPath(parameters["run"], parameters["kind"], parameters["name"])
