"""Recorder: what a run tells of itself while it runs. By default nobody listens; `Recording` makes spans of it.

On a GPU a moment is an event on the stream that the work is on, so that times are the device's, and none of them is
read before the end.
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

Moment: TypeAlias = "float | torch.cuda.Event | torch.futures.Future[float]"


class OpenSpan:
    """Something that was begun and goes on beside what the rank does."""

    def until(self, work: dist.Work, group: dist.ProcessGroup) -> Callable[[], object]:
        """It ends when `work` does. Call what this returns to wait for that."""
        return work.wait


class Recorder:
    """Told of what a rank does, at the time; this one lets it pass."""

    def for_microbatch(self, microbatch: int) -> Recorder:
        """The same for what is done for one microbatch."""
        return self

    def span(self, kind: SpanKind, name: str) -> AbstractContextManager[None]:
        """What the rank does inside."""
        return contextlib.nullcontext()

    def start(self, kind: SpanKind, name: str) -> OpenSpan:
        """Something that goes on from now, until what the caller says."""
        return OpenSpan()


NO_RECORDER = Recorder()


@dataclass
class Record:
    """A span whose moments are not read yet: it ended at `end`, or if that is later at `latest`."""

    kind: SpanKind
    name: str
    microbatch: int | None
    start: Moment
    end: Moment | None = None
    latest: Moment | None = None


@dataclass
class Sent(OpenSpan):
    """An exchange under way, and the recording that is told of it."""

    recording: Recording
    record: Record

    def until(self, work: dist.Work, group: dist.ProcessGroup) -> Callable[[], object]:
        """Gloo's thread looks at the clock; on a GPU a stream of its own waits for the work, and then has an event.

        Where threads are kept from running, the look comes late; what was waited for had ended by then. While it is
        handed over, a rank does not compute, either.
        """
        device = self.recording.device
        if device.type == "cpu" or dist.get_backend(group) == "gloo":
            self.record.end = work.get_future().then(lambda _: time.perf_counter())
        else:
            with torch.cuda.stream(torch.cuda.Stream(device)):
                work.wait()
                self.record.end = moment(device)
        handed = replace(self.record, kind="wait", name=f"to send {self.record.name}", end=moment(device))
        self.recording.records.append(handed)

        def wait() -> None:
            with self.recording.span("wait", self.record.name):
                work.wait()
            self.record.latest = moment(device)

        return wait


@dataclass
class Recording(Recorder):
    """Keeps what it is told. Make it when the step begins that it records, and ask for `spans` when that has ended."""

    rank: int
    device: torch.device
    microbatch: int | None = None
    records: list[Record] = field(default_factory=list)
    zero: tuple[float, Moment] | None = None
    """One moment on the host's clock and on the device's."""

    def __post_init__(self) -> None:
        if self.zero is None:
            if self.device.type == "cuda":
                torch.cuda.synchronize(self.device)
            self.zero = time.perf_counter(), moment(self.device)

    @property
    def began(self) -> float:
        """When it was made, on the host's clock."""
        assert self.zero is not None
        return self.zero[0]

    def for_microbatch(self, microbatch: int) -> Recording:
        """The same for what is done for one microbatch."""
        return Recording(self.rank, self.device, microbatch, self.records, self.zero)

    @contextlib.contextmanager
    def span(self, kind: SpanKind, name: str) -> Iterator[None]:
        """What the rank does inside."""
        record = self._record(kind, name)
        yield
        record.end = moment(self.device)

    def start(self, kind: SpanKind, name: str) -> Sent:
        """Something that goes on from now, until what the caller says."""
        return Sent(self, self._record(kind, name))

    def spans(self) -> list[Span]:
        """What was recorded and has ended, on the host's clock."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        found = []
        for each in self.records:
            if each.end is None:
                continue  # an exception came in between
            start, end = self._seconds(each.start), self._seconds(each.end)
            if each.latest is not None:
                end = min(end, self._seconds(each.latest))
            found.append(Span(self.rank, each.kind, each.name, start, max(start, end), each.microbatch))
        return found

    def _record(self, kind: SpanKind, name: str) -> Record:
        record = Record(kind, name, self.microbatch, moment(self.device))
        self.records.append(record)
        return record

    def _seconds(self, at: Moment) -> float:
        if isinstance(at, float):
            return at
        if not isinstance(at, torch.cuda.Event):
            return at.wait()
        assert self.zero is not None
        host, device = self.zero
        assert isinstance(device, torch.cuda.Event)
        return host + float(device.elapsed_time(at)) / 1000.0


def moment(device: torch.device) -> Moment:
    """Now: on a GPU, when the current stream comes to this point."""
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record(torch.cuda.current_stream(device))
    return event
