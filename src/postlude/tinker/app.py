"""The ASGI application of the Tinker API: keys, routes, bodies, replies."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import hmac
import logging
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from typing import Any, TypeVar
from urllib.parse import quote

from pydantic import BaseModel
from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect, Request
from starlette.responses import FileResponse, JSONResponse, Response
from starlette.routing import Route

from postlude.serving.request_body import parse
from postlude.tinker import bodies, wire
from postlude.tinker.errors import APIError
from postlude.tinker.futures import JSON, Future
from postlude.tinker.model_requests import ModelRequests
from postlude.tinker.paths import TinkerPath
from postlude.tinker.records import Records
from postlude.tinker.service import TinkerService
from postlude.tinker.training import Role

LOG = logging.getLogger("postlude")
API = "/api/v1"
PROTOBUF = "application/x-protobuf"
OPEN = f"{API}/healthz"  # needs no key
URL_SECONDS = 3600  # how long a link to a file works
HEAD_BYTES = 1024  # of a request that is too large, to find out which one it is
DRAIN_SECONDS = 10.0  # to read the rest of a request that is refused
Reply = Response | JSON | None
Handler = Callable[[Request, str], Awaitable[Reply]]
Schema = TypeVar("Schema", bound=BaseModel)


class Keys:
    """Which keys may use the server. Each is an owner of its own; without a list, every key may."""

    def __init__(self, keys: Sequence[str] | None) -> None:
        self._owners = {self._owner(key) for key in keys} if keys is not None else None

    def owner(self, headers: Headers) -> str:
        """Returns the owner of a request."""
        scheme, _, bearer = headers.get("authorization", "").partition(" ")
        key = headers.get("x-api-key") or (bearer.strip() if scheme.lower() == "bearer" else "")
        if not key:
            raise APIError(401, "the request has no key: set TINKER_API_KEY, or the header X-API-Key.")
        owner = self._owner(key)
        if self._owners is not None and owner not in self._owners:
            raise APIError(401, "the key is not one of this server's --key-file.")
        return owner

    @staticmethod
    def _owner(key: str) -> str:
        return hashlib.sha256(key.encode(errors="surrogateescape")).hexdigest()[:24]


def error_response(error: APIError) -> Response:
    """Returns the reply of a refused request."""
    headers = {"retry-after": f"{error.retry_after:g}"} if error.retry_after is not None else None
    return JSONResponse({"error": str(error)}, status_code=error.status, headers=headers)


class TinkerApp:
    """The routes of one service."""

    def __init__(self, service: TinkerService, keys: Keys, *, compress: bool = False) -> None:
        self.service, self._keys, self._compress = service, keys, compress
        self._models, self._records = ModelRequests(service), Records(service)
        self._secret = secrets.token_bytes(32)  # signs links to files
        self._versions: set[str] = set()

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
        run, checkpoint = "/training_runs/{run}", "/training_runs/{run}/checkpoints/{kind}/{name}"
        table: list[tuple[str, str, Handler]] = [  # in this order they are tried: the frequent ones first
            ("POST", "/retrieve_future", self._retrieve),
            ("POST", "/asample", self._asample),
            ("POST", "/forward_backward", self._forward_backward),
            ("POST", "/optim_step", self._optim_step),
            ("POST", "/session_heartbeat", self._heartbeat),
            ("POST", "/client/config", self._client_config),
            ("POST", "/client/dynamic_config", self._dynamic_config),
            ("GET", "/get_server_capabilities", self._capabilities),
            ("POST", "/create_session", self._create_session),
            ("POST", "/sessions/{session}/finish", self._finish),
            ("POST", "/telemetry", self._telemetry),
            ("POST", "/create_model", self._create_model),
            ("POST", "/get_info", self._get_info),
            ("POST", "/save_weights", self._save_weights),
            ("POST", "/save_weights_for_sampler", self._save_for_sampler),
            ("POST", "/save_weights_external", self._save_external),
            ("POST", "/load_weights", self._load_weights),
            ("POST", "/weights_info", self._weights_info),
            ("POST", "/create_sampling_session", self._create_sampling_session),
            ("POST", "/join_sampling_session", self._join),
            ("POST", "/cancel_future", self._cancel),
            ("GET", "/samplers/{sampler}", self._sampler),
            ("GET", "/training_runs", self._training_runs),
            ("GET", run, self._training_run),
            ("GET", f"{run}/checkpoints", self._checkpoints_of_run),
            ("GET", "/checkpoints", self._checkpoints),
            ("DELETE", checkpoint, self._delete),
            ("POST", f"{checkpoint}/publish", self._publish),
            ("DELETE", f"{checkpoint}/publish", self._unpublish),
            ("PUT", f"{checkpoint}/ttl", self._ttl),
            ("GET", f"{checkpoint}/external_weights_urls", self._urls),
            ("GET", "/sessions", self._sessions),
            ("GET", "/sessions/{session}", self._session),
        ]
        routes = [Route(API + path, self.endpoint(handler), methods=[method]) for method, path, handler in table]
        routes.append(Route(OPEN, self._health, methods=["GET"]))
        routes.append(Route(API + "/files/{run}/{name}/{file:path}", self._file, methods=["GET"]))
        routes.append(
            Route(API + "/{path:path}", self.endpoint(self._unknown), methods=["GET", "POST", "PUT", "DELETE"])
        )
        return routes

    def endpoint(
        self, handler: Handler, error_reply: Callable[[APIError], Response] = error_response
    ) -> Callable[[Request], Awaitable[Response]]:
        """Returns a handler with keys checked and errors turned into replies."""

        async def endpoint(request: Request) -> Response:
            try:
                owner = self._keys.owner(request.headers)
                self._log_version(request.headers)
                reply = await handler(request, owner)
            except APIError as error:
                return error_reply(error)
            except (ValueError, TypeError) as error:
                return error_reply(APIError(400, str(error)))
            except ClientDisconnect:
                return Response(status_code=400)
            except Exception as error:
                LOG.exception("%s %s failed", request.method, request.url.path)
                return error_reply(APIError(500, f"the request failed: {error!r}."))
            if reply is None:
                return Response(status_code=204)
            return reply if isinstance(reply, Response) else JSONResponse(reply)

        return endpoint

    def _log_version(self, headers: Headers) -> None:
        agent = headers.get("user-agent", "")[:80]
        if agent not in self._versions and len(self._versions) < 100:
            self._versions.add(agent)
            LOG.info("first request of %s", agent or "a client without a name")

    async def read(self, request: Request) -> bytes:
        """Returns the body of a request within the limit, decompressed."""
        limit = self.service.limits.body_bytes
        body = bytearray()
        stream = request.stream()
        async for chunk in stream:
            body += chunk
            if len(body) > limit:
                await self._refuse_large(request, bytes(body[:HEAD_BYTES]))
                with contextlib.suppress(TimeoutError):  # a client that still sends would not read the reply
                    async with asyncio.timeout(DRAIN_SECONDS):
                        async for _ in stream:
                            pass
                raise APIError(413, f"the request has more than {limit} bytes, which is the limit of this server.")
        encoding = request.headers.get("content-encoding", "identity").lower()
        if encoding == "zstd":
            try:
                return wire.decompress(bytes(body), limit)
            except APIError as error:
                if error.status == 413:
                    await self._refuse_large(request, wire.decompress_head(bytes(body), HEAD_BYTES))
                raise
        if encoding != "identity":
            raise APIError(415, f"Content-Encoding is {encoding[:40]!r}; send it plain or as zstd.")
        return bytes(body)

    async def _refuse_large(self, request: Request, head: bytes) -> None:
        """Lets a pass that is too large fail in its turn: the requests after it would wait for it."""
        named = wire.head_of_forward_backward(head) if request.url.path == f"{API}/forward_backward" else None
        model = self.service.training.models.get(named[0]) if named is not None else None
        if named is not None and model is not None and model.owner == self._keys.owner(request.headers):
            sentence = f"the pass has more than {self.service.limits.body_bytes} bytes, which is the server's limit."
            self.service.training.refuse(model, named[1], "forward_backward", sentence, "pass")

    async def _body(self, request: Request, schema: type[Schema]) -> Schema:
        return parse(schema, await self.read(request) or b"{}")

    # Configuration and sessions

    async def _health(self, _: Request) -> Response:
        return JSONResponse({"status": "ok"})

    async def _unknown(self, request: Request, _: str) -> Reply:
        raise APIError(404, f"{request.method} {request.url.path} is not supported by this server.")

    async def _client_config(self, request: Request, _: str) -> Reply:
        body = await self._body(request, bodies.ClientConfigBody)
        LOG.info("a client has tinker %s", body.sdk_version or "of unknown version")
        return {
            "proto_compress_fwdbwd": self._compress,
            "sample_join_sampling_session": True,
            "create_model_via_load_weights": True,
        }

    async def _dynamic_config(self, request: Request, _: str) -> Reply:
        await self.read(request)
        return {"sample_cancel_enabled": True}

    async def _capabilities(self, _: Request, __: str) -> Reply:
        return self._records.capabilities()

    async def _create_session(self, request: Request, owner: str) -> Reply:
        return await self.service.create_session(owner, await self._body(request, bodies.CreateSessionBody))

    async def _heartbeat(self, request: Request, owner: str) -> Reply:
        return self.service.heartbeat(owner, (await self._body(request, bodies.SessionBody)).session_id)

    async def _finish(self, request: Request, owner: str) -> Reply:
        body = await self._body(request, bodies.FinishBody)
        await self.service.finish_session(owner, request.path_params["session"], body.reason.type)
        return None

    async def _telemetry(self, request: Request, _: str) -> Reply:
        await self.read(request)
        return {"status": "accepted"}

    # Training

    async def _create_model(self, request: Request, owner: str) -> Reply:
        body = await self._body(request, bodies.CreateModelBody)
        return promise(await self._models.create_model(owner, body))

    async def _get_info(self, request: Request, owner: str) -> Reply:
        return self._models.get_info(owner, (await self._body(request, bodies.ModelBody)).model_id)

    async def _forward_backward(self, request: Request, owner: str) -> Reply:
        body = await self.read(request)
        kind = request.headers.get("content-type", "").partition(";")[0]
        if kind != PROTOBUF:
            raise APIError(415, f"forward_backward has the Content-Type {kind[:60]!r}; send {PROTOBUF}.")
        return promise(await self._models.forward_backward(owner, wire.parse_forward_backward(body), len(body)))

    async def _training_body(self, request: Request, owner: str, schema: type[Schema], kind: str) -> Schema:
        """Reads a training request. One that is wrong fails in its turn too: those after it would wait for it."""
        raw = await self.read(request)
        try:
            return parse(schema, raw)
        except ValueError as error:
            with contextlib.suppress(ValueError, APIError):
                which = parse(bodies.TrainingBody, raw)
                model = self.service.model(owner, which.model_id)
                role: Role = "step" if kind == "optim_step" else "other"
                self.service.training.refuse(model, which.seq_id, kind, str(error), role)
            raise

    async def _optim_step(self, request: Request, owner: str) -> Reply:
        body = await self._training_body(request, owner, bodies.OptimStepBody, "optim_step")
        return promise(await self._models.optim_step(owner, body))

    async def _save_weights(self, request: Request, owner: str) -> Reply:
        body = await self._training_body(request, owner, bodies.SaveBody, "save_weights")
        return promise(await self._models.save(owner, "weights", body))

    async def _save_for_sampler(self, request: Request, owner: str) -> Reply:
        body = await self._training_body(request, owner, bodies.SaveBody, "save_weights_for_sampler")
        if body.path is None and body.sampling_session_seq_id is not None:
            return promise(await self._models.snapshot(owner, body))
        return promise(await self._models.save(owner, "sampler_weights", body))

    async def _save_external(self, request: Request, owner: str) -> Reply:
        body = await self._training_body(request, owner, bodies.SaveBody, "save_weights_external")
        return promise(await self._models.save(owner, "external_weights", body))

    async def _load_weights(self, request: Request, owner: str) -> Reply:
        body = await self._training_body(request, owner, bodies.LoadBody, "load_weights")
        return promise(await self._models.load(owner, body))

    # Sampling

    async def _create_sampling_session(self, request: Request, owner: str) -> Reply:
        return await self.service.create_sampling_session(owner, await self._body(request, bodies.SamplingSessionBody))

    async def _join(self, request: Request, owner: str) -> Reply:
        sampler = self.service.sampler(owner, (await self._body(request, bodies.JoinBody)).sampling_session_id)
        sampler.clients += 1
        return {"type": "join_sampling_session", "client_counter": sampler.clients}

    async def _asample(self, request: Request, owner: str) -> Reply:
        return promise(self.service.sample(owner, await self._body(request, bodies.SampleBody)))

    # Results

    async def _retrieve(self, request: Request, owner: str) -> Reply:
        request_id = (await self._body(request, bodies.RequestBody)).request_id
        try:
            future = self.service.future(owner, request_id)
        except APIError as error:
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
            return JSONResponse(pending, status_code=408)
        future.fetched = time.monotonic()
        if future.failure is not None:
            return {"error": future.failure.sentence, "category": future.failure.category}
        if isinstance(future.result, bytes):
            return Response(future.result, media_type=PROTOBUF)
        return future.result

    async def _cancel(self, request: Request, owner: str) -> Reply:
        request_id = (await self._body(request, bodies.RequestBody)).request_id
        if self.service.future(owner, request_id).kind == "sample":
            self.service.samplers.cancel(request_id)
        return None

    # Records

    async def _weights_info(self, request: Request, owner: str) -> Reply:
        return self._records.weights_info(owner, (await self._body(request, bodies.PathBody)).tinker_path)

    async def _sampler(self, request: Request, owner: str) -> Reply:
        return self._records.sampler(owner, request.path_params["sampler"])

    async def _training_runs(self, request: Request, owner: str) -> Reply:
        return self._records.training_runs(owner, *_page(request))

    async def _training_run(self, request: Request, owner: str) -> Reply:
        return self._records.training_run(owner, request.path_params["run"])

    async def _checkpoints_of_run(self, request: Request, owner: str) -> Reply:
        return self._records.checkpoints_of_run(owner, request.path_params["run"])

    async def _checkpoints(self, request: Request, owner: str) -> Reply:
        return self._records.checkpoints(owner, *_page(request))

    async def _delete(self, request: Request, owner: str) -> Reply:
        await self._records.delete(owner, _path(request.path_params))
        return None

    async def _publish(self, request: Request, owner: str) -> Reply:
        await self._records.set_public(owner, _path(request.path_params), public=True)
        return None

    async def _unpublish(self, request: Request, owner: str) -> Reply:
        await self._records.set_public(owner, _path(request.path_params), public=False)
        return None

    async def _ttl(self, request: Request, owner: str) -> Reply:
        seconds = (await self._body(request, bodies.TTLBody)).ttl_seconds
        await self._records.set_ttl(owner, _path(request.path_params), seconds)
        return None

    async def _sessions(self, request: Request, owner: str) -> Reply:
        return self._records.sessions(owner, *_page(request))

    async def _session(self, request: Request, owner: str) -> Reply:
        return self._records.session(owner, request.path_params["session"])

    # Files of external weights, by links that work without a key for an hour

    async def _urls(self, request: Request, owner: str) -> Reply:
        path = _path(request.path_params)
        self.service.checkpoint(owner, path)
        if path.kind != "external_weights":
            raise APIError(400, f"{path} has no links: save it with save_weights_external.")
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
            right = hmac.compare_digest(self._signature(path, name, expires), query.get("signature", ""))
            file = self.service.state.files_of(path).get(name) if right and expires >= time.time() else None
        except ValueError:
            file = None
        if file is None:
            return error_response(APIError(403, "the link is wrong or has expired; ask for a new one."))
        return FileResponse(file)


def promise(future: Future) -> JSON:
    """Returns the reply to a request whose result is fetched later."""
    return {"request_id": future.request_id} | future.reply


def _page(request: Request) -> tuple[int, int]:
    query = request.query_params
    try:
        return int(query.get("limit", "20")), int(query.get("offset", "0"))
    except ValueError:
        raise APIError(400, "limit and offset are whole numbers.") from None


def _path(parameters: Mapping[str, Any]) -> TinkerPath:
    return TinkerPath(parameters["run"], parameters["kind"], parameters["name"])
