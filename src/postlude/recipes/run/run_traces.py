"""RunTraces: sends what a run does to an OpenTelemetry collector, one trace a step.

It is a `Recorder`: what records spans knows nothing of OpenTelemetry. The standard variables OTEL_… say where to.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Mapping
from importlib import import_module
from importlib.metadata import entry_points
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from postlude.recipes.report.metrics import SHOWN
from postlude.recipes.run.progress import STEP, RunProgress
from postlude.trace.recorder import Recorder
from postlude.trace.spans import Span
from postlude.version import __version__

LOG = logging.getLogger("postlude")
LIBRARY = logging.getLogger("opentelemetry")
PART_OF = {"request": "rollout", "queue": "rollout", "sample": "rollout", "reward": "reward"}
"""The part of a step in whose span those of a kind are."""
CLOSE_SECONDS = 5.0  # for the last spans to be sent
INSTALL = "pip install 'postlude[traces]'"


class RunTraces(Recorder):
    """Makes a span of each step, with one of each part, and in them those of requests. Any thread may add spans.

    `processor` gets the spans. It never waits for a collector, and drops spans that it cannot keep.
    """

    def __init__(self, run: Path, progress: RunProgress, processor: Any) -> None:
        resources, trace = import_module("opentelemetry.sdk.resources"), import_module("opentelemetry.sdk.trace")
        ours = resources.Resource(
            {"service.name": "postlude", "service.version": __version__, "postlude.run": str(run)}
        )
        given = resources.OTELResourceDetector().detect()  # OTEL_SERVICE_NAME and OTEL_RESOURCE_ATTRIBUTES
        self._provider = trace.TracerProvider(resource=ours.merge(given), shutdown_on_exit=False)
        self._provider.add_span_processor(processor)
        self._tracer = self._provider.get_tracer("postlude", __version__)
        self._api = import_module("opentelemetry.trace")
        self._progress, self._lock = progress, threading.Lock()
        self._clock = time.time() - time.perf_counter()  # from the clock of spans to Unix time
        self._step: Any = None
        self._parts: dict[str, _OpenPart] = {}
        self._last_request: tuple[Any, Any] = (None, None)  # what was recorded, and what was sent
        self._warning = _FirstFailure()
        LIBRARY.addHandler(self._warning)
        self._propagate, LIBRARY.propagate = LIBRARY.propagate, False

    def add(self, span: Span) -> None:
        """Sends a span. Parts are sent with their step: one span for all the times that a part ran."""
        with self._lock:
            if span.kind == "part":
                part = self._part(span.name, span.start)
                part.end, part.seconds = max(part.end, span.end), part.seconds + span.end - span.start
                return
            name = PART_OF.get(span.kind)
            parent = self._part(name, span.start).span if name is not None else self._open_step(span.start)
            if span.parent is not None and span.parent is self._last_request[0]:
                parent = self._last_request[1]
            sent = self._start(span.name, span.start, parent, dict(span.attributes))
            sent.end(self._nanoseconds(span.end))
            if span.kind == "request":
                self._last_request = span, sent

    def end_step(self, step: int, metrics: Mapping[str, Any]) -> None:
        with self._lock:
            if self._step is None:
                return
            shown = {f"postlude.{name}": metrics[name] for name in SHOWN.values() if name in metrics}
            self._step.set_attributes({"postlude.step": step, "postlude.phase": self._progress.phase} | shown)
            self._end_spans()

    def close(self) -> None:
        with self._lock:
            if self._step is not None:
                status = self._api.Status(self._api.StatusCode.ERROR, self._progress.error or None)
                self._step.set_status(status)
                self._end_spans()
        sending = threading.Thread(target=self._shut_down, name="postlude traces", daemon=True)
        sending.start()
        sending.join(CLOSE_SECONDS)

    def _shut_down(self) -> None:
        self._provider.shutdown()
        LIBRARY.removeHandler(self._warning)
        LIBRARY.propagate = self._propagate

    def _end_spans(self) -> None:
        for part in self._parts.values():
            part.span.set_attribute("postlude.seconds", part.seconds)
            part.span.end(self._nanoseconds(part.end))
        self._step.end(self._nanoseconds(time.perf_counter()))
        self._step, self._last_request = None, (None, None)
        self._parts.clear()

    def _open_step(self, start: float) -> Any:
        if self._step is None:
            self._step = self._start("step", start, None, {})
        return self._step

    def _part(self, name: str, start: float) -> _OpenPart:
        if name not in self._parts:
            self._parts[name] = _OpenPart(self._start(name, start, self._open_step(start), {}), start)
        return self._parts[name]

    def _start(self, name: str, start: float, parent: Any, attributes: dict[str, Any]) -> Any:
        step = self._progress.step + (self._progress.activity == STEP)
        return self._tracer.start_span(
            name,
            context=None if parent is None else self._api.set_span_in_context(parent),
            start_time=self._nanoseconds(start),
            attributes={"postlude.step": step} | attributes,
        )

    def _nanoseconds(self, moment: float) -> int:
        return int((moment + self._clock) * 1e9)


class _OpenPart:
    """The span of a part of a step, the end of its last time, and its seconds."""

    def __init__(self, span: Any, start: float) -> None:
        self.span, self.end, self.seconds = span, start, 0.0


class _FirstFailure(logging.Handler):
    """Warns once of what the library logs about a collector that does not respond."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self._warned = False

    def emit(self, record: logging.LogRecord) -> None:
        if not self._warned:
            self._warned = True
            LOG.warning("traces cannot be sent: %s. The run continues.", record.getMessage().rstrip("."))


def open_processor() -> Any:
    """Returns the processor that sends spans from a thread of its own, as OTEL_… say."""
    export = import_module("opentelemetry.sdk.trace.export")
    make = _exporter_class()
    return export.BatchSpanProcessor(make())


def check_traces() -> str:
    """Refuses to trace without the packages. Returns a line about where traces go."""
    if find_spec("opentelemetry") is None or find_spec("opentelemetry.sdk") is None:
        raise ImportError(f"observe.traces needs the package opentelemetry-sdk. Run `{INSTALL}`, or leave it out.")
    _exporter_class()
    end = os.environ.get("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT") or os.environ.get("OTEL_EXPORTER_OTLP_ENDPOINT")
    return f"traces to {end or 'the exporter of OTEL_TRACES_EXPORTER, by default OTLP on this machine'}"


def _exporter_class() -> Callable[[], Any]:
    """Returns what makes the exporter that OTEL_TRACES_EXPORTER names: an entry point, as OpenTelemetry has them."""
    name = os.environ.get("OTEL_TRACES_EXPORTER", "").strip() or "otlp"
    protocol = os.environ.get("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL") or os.environ.get("OTEL_EXPORTER_OTLP_PROTOCOL")
    entry = f"otlp_proto_{'grpc' if protocol == 'grpc' else 'http'}" if name == "otlp" else name
    found = {point.name: point for point in entry_points(group="opentelemetry_traces_exporter")}
    if entry not in found:
        raise ImportError(
            f"OTEL_TRACES_EXPORTER is {name!r}, of which this Python has no exporter {entry!r}; it has "
            f"{', '.join(sorted(found)) or 'none'}. Run `{INSTALL}`, which has OTLP over HTTP, or set the variable."
        )
    make: Callable[[], Any] = found[entry].load()
    return make
