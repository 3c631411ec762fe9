"""Recorder: notes what a rank does while it runs. The default one does nothing; `Recording` makes spans.

On a GPU a moment is an event on the stream of the work, so that times are the device's, and none is read before the
end.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import TypeAlias

import torch
import torch.distributed as dist

from postlude.trace.spans import Span, SpanKind

Timestamp: TypeAlias = "float | torch.cuda.Event | torch.futures.Future[float]"


class OpenSpan:
    """A span that has started and runs while the rank does other work."""

    def end_with(self, work: dist.Work, group: dist.ProcessGroup) -> Callable[[], object]:
        """Ends the span when `work` ends. Returns a function that waits for that."""
        return work.wait


class Recorder:
    """Records what a rank does; this one ignores it."""

    def for_microbatch(self, microbatch: int) -> Recorder:
        """Returns a recorder of what is done for one microbatch."""
        return self

    def span(self, kind: SpanKind, name: str) -> AbstractContextManager[None]:
        """Records the block as a span."""
        return contextlib.nullcontext()

    def start(self, kind: SpanKind, name: str) -> OpenSpan:
        """Starts a span that the caller ends."""
        return OpenSpan()

    def add(self, span: Span) -> None:
        """Records a span that has ended, on the host's clock (`time.perf_counter`)."""


NO_RECORDER = Recorder()


@dataclass
class Record:
    """A span whose moments are not read yet. It ended at `end`, or at `latest` if that is earlier."""

    kind: SpanKind
    name: str
    microbatch: int | None
    start: Timestamp
    end: Timestamp | None = None
    latest: Timestamp | None = None


@dataclass
class OpenExchange(OpenSpan):
    """An exchange that is running, and the recording that it belongs to."""

    recording: Recording
    record: Record

    def end_with(self, work: dist.Work, group: dist.ProcessGroup) -> Callable[[], object]:
        """Ends the span: gloo's thread reads the clock; on a GPU a stream waits for the work and records an event.

        A busy machine may run that thread late, so a completed wait bounds the end. The rank does not compute while it
        launches the exchange.
        """
        device = self.recording.device
        if device.type == "cpu" or dist.get_backend(group) == "gloo":
            self.record.end = work.get_future().then(lambda _: time.perf_counter())
        else:
            with torch.cuda.stream(torch.cuda.Stream(device)):
                work.wait()
                self.record.end = now(device)
        launch = replace(self.record, kind="wait", name=f"to send {self.record.name}", end=now(device))
        self.recording.records.append(launch)

        def wait() -> None:
            with self.recording.span("wait", self.record.name):
                work.wait()
            self.record.latest = now(device)

        return wait


@dataclass
class Recording(Recorder):
    """Keeps what it records. Make it when the step begins, and call `spans` when the step has ended."""

    rank: int
    device: torch.device
    microbatch: int | None = None
    records: list[Record] = field(default_factory=list)
    zero: tuple[float, Timestamp] | None = None
    """One moment on the host's clock and on the device's."""

    def __post_init__(self) -> None:
        if self.zero is None:
            if self.device.type == "cuda":
                torch.cuda.synchronize(self.device)
            self.zero = time.perf_counter(), now(self.device)

    @property
    def began(self) -> float:
        """When it was made, on the host's clock."""
        assert self.zero is not None
        return self.zero[0]

    def for_microbatch(self, microbatch: int) -> Recording:
        return Recording(self.rank, self.device, microbatch, self.records, self.zero)

    @contextlib.contextmanager
    def span(self, kind: SpanKind, name: str) -> Iterator[None]:
        record = self._record(kind, name)
        yield
        record.end = now(self.device)

    def start(self, kind: SpanKind, name: str) -> OpenExchange:
        return OpenExchange(self, self._record(kind, name))

    def add(self, span: Span) -> None:
        self.records.append(Record(span.kind, span.name, span.microbatch, span.start, span.end))

    def spans(self) -> list[Span]:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        spans = []
        for record in self.records:
            if record.end is None:
                continue  # an exception interrupted it
            start, end = self._seconds(record.start), self._seconds(record.end)
            if record.latest is not None:
                end = min(end, self._seconds(record.latest))
            spans.append(Span(self.rank, record.kind, record.name, start, max(start, end), record.microbatch))
        return spans

    def _record(self, kind: SpanKind, name: str) -> Record:
        record = Record(kind, name, self.microbatch, now(self.device))
        self.records.append(record)
        return record

    def _seconds(self, moment: Timestamp) -> float:
        if isinstance(moment, float):
            return moment
        if not isinstance(moment, torch.cuda.Event):
            return moment.wait()
        assert self.zero is not None
        host, device = self.zero
        assert isinstance(device, torch.cuda.Event)
        return host + float(device.elapsed_time(moment)) / 1000.0


def now(device: torch.device) -> Timestamp:
    """Returns the present moment: on a GPU, when the current stream comes to this point."""
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record(torch.cuda.current_stream(device))
    return event
