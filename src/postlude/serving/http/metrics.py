"""Metrics of servers: numbers of requests and completions, the reply to a scrape, an application of that alone."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route, Router
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from postlude.generate.protocol import SamplingUsage
from postlude.prometheus import (
    CONTENT_TYPE,
    Gauge,
    Histogram,
    MetricCounter,
    MetricFamily,
    MetricReader,
    metric_name,
    render,
)
from postlude.serving.http.access import Keys
from postlude.serving.http.errors import HTTPError
from postlude.world.ports import is_loopback

METRICS = "/metrics"
SERVER = metric_name("server_")
OTHER, ABORTED = "other", "aborted"  # the route of requests that have none; the status of those without a reply


def metrics_reply(families: Iterable[MetricFamily]) -> Response:
    """Returns the reply to a scrape."""
    return Response(render(families), headers={"content-type": CONTENT_TYPE})


class RequestMetrics:
    """Counts the requests of a server by route, and the seconds until the end of their replies."""

    def __init__(self) -> None:
        self._requests = MetricCounter(
            f"{SERVER}requests_total", "Requests that have ended.", ["route", "method", "status"]
        )
        self._seconds = Histogram(f"{SERVER}request_seconds", "Seconds of a request to its reply's end.", ["route"])
        self._running = 0

    @property
    def readers(self) -> tuple[MetricReader, ...]:
        running = Gauge(f"{SERVER}requests_running", "Requests whose reply has not ended.", lambda: self._running)
        return self._requests, self._seconds, running

    def counting(self, app: Router | Starlette) -> ASGIApp:
        """Returns the application with its requests counted."""
        routes = dict(_endpoints(app.routes))

        async def counted(scope: Scope, receive: Receive, send: Send) -> None:
            if scope["type"] != "http":
                await app(scope, receive, send)
                return
            began, status = time.monotonic(), ABORTED

            async def send_and_see(message: Message) -> None:
                nonlocal status
                await send(message)
                if message["type"] == "http.response.start":
                    status = str(message["status"])

            self._running += 1
            try:
                await app(scope, receive, send_and_see)
            finally:
                self._running -= 1
                route = routes.get(scope.get("endpoint"), OTHER)
                method = scope["method"] if route != OTHER else OTHER
                self._requests.add(1, route, method, status)
                self._seconds.observe(time.monotonic() - began, route)

        return counted


def _endpoints(routes: Iterable[BaseRoute]) -> Iterator[tuple[object, str]]:
    """Yields the endpoint and the path of each route, but not of one that takes every path."""
    for route in routes:
        if isinstance(route, Route) and not route.path.endswith("/{path:path}"):
            yield route.endpoint, route.path


def metrics_app(families: Callable[[], Iterable[MetricFamily]], host: str) -> Router:
    """Returns an application that serves metrics at `host`. On loopback it refuses pages of other sites."""
    keys = Keys(None, host, "none") if is_loopback(host) else None

    async def scrape(request: Request) -> Response:
        try:
            if keys is not None:
                keys.owner(request.headers)
        except HTTPError as error:
            return Response(f"{error}\n", error.status, media_type="text/plain")
        return metrics_reply(families())

    return Router([Route(METRICS, scrape, methods=["GET"])])


class GenerationMetrics:
    """Counts completions. `usage` returns how busy the generator is."""

    def __init__(self, usage: Callable[[], SamplingUsage]) -> None:
        self._prompt_tokens = MetricCounter(f"{SERVER}prompt_tokens_total", "Tokens of the prompts of requests.")
        self._tokens = MetricCounter(f"{SERVER}generated_tokens_total", "Tokens of completions that have ended.")
        self._completions = MetricCounter(
            f"{SERVER}completions_total", "Completions that have ended: stop, length, cancelled or failed.", ["reason"]
        )
        self._queue = Histogram(f"{SERVER}queue_seconds", "Seconds that a completion waited before it ran.")
        self._first = Histogram(f"{SERVER}first_token_seconds", "Seconds until the first token of a completion.")
        self.readers: tuple[MetricReader, ...] = (
            self._prompt_tokens,
            self._tokens,
            self._completions,
            self._queue,
            self._first,
            Gauge(f"{SERVER}sequences_running", "Completions that get tokens.", lambda: usage().running),
            Gauge(f"{SERVER}sequences_waiting", "Completions that wait for room.", lambda: usage().waiting),
            Gauge(f"{SERVER}cache_used_tokens", "Tokens of the cache in use.", lambda: usage().used_tokens),
            Gauge(f"{SERVER}cache_tokens", "Tokens that the cache has room for.", lambda: usage().cache_tokens),
        )

    def begin(self, prompt_tokens: int) -> None:
        self._prompt_tokens.add(prompt_tokens)

    def end(
        self, reason: str, tokens: int = 0, queue_seconds: float | None = None, first_token_seconds: float | None = None
    ) -> None:
        """Counts a completion that ended for this reason, and its times if they are known."""
        self._completions.add(1, reason)
        self._tokens.add(tokens)
        if queue_seconds is not None:
            self._queue.observe(queue_seconds)
        if first_token_seconds is not None:
            self._first.observe(first_token_seconds)
