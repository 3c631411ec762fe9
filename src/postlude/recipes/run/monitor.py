"""RunMonitor: shows where a run is while it runs, to other processes: files of `status/`, metrics port, traces."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import torch.distributed as dist

from postlude.json_log import print_line
from postlude.prometheus import Gauge, Histogram, MetricCounter, MetricFamily, MetricReader, MetricSample, metric_name
from postlude.recipes.config.settings import ObserveSettings
from postlude.recipes.report.metrics import EVAL, TIME, TOKENS, explain
from postlude.recipes.run.directory import RunDirectory
from postlude.recipes.run.progress import RunProgress, StepFilter, WarningCount
from postlude.recipes.run.run_traces import RunTraces, check_traces, open_processor
from postlude.recipes.run.status import StatusFile
from postlude.trace.recorder import NO_RECORDER, Recorder
from postlude.version import __version__
from postlude.world.agreement import on_rank0
from postlude.world.ports import check_address

LOG = logging.getLogger("postlude")
RUN = metric_name("run_")
STEP_SECONDS = (0.1, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1800.0, 3600.0)


class RunMetrics:
    """The metrics that were logged last, each under its name, and where the run is, under `postlude_run_`."""

    def __init__(self, name: str, progress: RunProgress, warnings: WarningCount) -> None:
        self._logged: dict[str, float] = {}
        self._clashes: set[str] = set()
        self._began = time.time()
        self._tokens = MetricCounter(f"{RUN}tokens_total", "Tokens that this process trained on.")
        self._seconds = MetricCounter(f"{RUN}seconds_total", "Seconds of the parts of steps of this process.", ["part"])
        self._steps = Histogram(f"{RUN}step_seconds", "Seconds of a step.", bounds=STEP_SECONDS)

        def info() -> Mapping[tuple[str, ...], float]:
            return {(name, progress.title, progress.phase, __version__): 1}

        def activity() -> Mapping[tuple[str, ...], float]:
            return {(progress.activity, progress.part): time.time() - progress.activity_began}

        def remaining() -> Mapping[tuple[str, ...], float]:
            seconds = progress.remaining_seconds
            return {} if seconds is None else {(): seconds}

        self._metrics: list[MetricReader] = [
            Gauge(f"{RUN}info", "What runs, in the labels.", info, ("run", "title", "phase", "version")),
            Gauge(f"{RUN}start_time_seconds", "When this process began the run, in Unix time.", lambda: self._began),
            Gauge(f"{RUN}step", "Finished steps.", lambda: progress.step),
            Gauge(f"{RUN}last_step", "The step after which the run ends.", lambda: progress.total),
            Gauge(f"{RUN}remaining_seconds", "Seconds until the end, if steps take as long as before.", remaining),
            Gauge(f"{RUN}activity_seconds", "Seconds since the activity began.", activity, ("activity", "part")),
            Gauge(f"{RUN}warnings_total", "Warnings of this process.", lambda: warnings.count, kind="counter"),
            self._tokens,
            self._seconds,
            self._steps,
        ]

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Takes the numbers of a step, not the lists. Those of an evaluation stay until the next one."""
        numbers = {name: float(value) for name, value in metrics.items() if isinstance(value, int | float)}
        parts = {name.removeprefix(TIME): value for name, value in numbers.items() if name.startswith(TIME)}
        for part, seconds in parts.items():
            self._seconds.add(seconds, part)
        if TOKENS in numbers:
            self._tokens.add(numbers[TOKENS])
            self._steps.observe(sum(parts.values()))
        evaluated = {name: value for name, value in self._logged.items() if name.startswith(EVAL)}
        self._logged = evaluated | numbers

    def families(self) -> Iterator[MetricFamily]:
        """Yields all metrics. Of two that have the same name in Prometheus, the second is left out."""
        names = set()
        for metric in self._metrics:
            family = metric.family()
            names.add(family.name)
            yield family
        for name, value in self._logged.items():
            translated, info = metric_name(name), explain(name)
            if translated not in names:
                names.add(translated)
                text = f"{name}: {info.meaning}" if info else name
                yield MetricFamily(translated, "gauge", text, [MetricSample(value)])
            elif name not in self._clashes:
                self._clashes.add(name)
                LOG.warning("the metrics port leaves out %s, as another metric is %s there too.", name, translated)


class RunMonitor:
    """Shows a run until `close`. Every rank has one. The metrics port is rank 0's, and open before a model is loaded.

    What fails later is a warning at most: it does not end the run.
    """

    def __init__(self, run: Path, settings: ObserveSettings, progress: RunProgress) -> None:
        self._progress, self._resources = progress, ExitStack()
        self._warnings = WarningCount()
        for log_filter in (self._warnings, StepFilter(progress)):
            LOG.addFilter(log_filter)
            self._resources.callback(LOG.removeFilter, log_filter)
        self._metrics = RunMetrics(str(run), progress, self._warnings)
        self.recorder: Recorder = NO_RECORDER
        """Gets what this rank does in a step."""
        self._listeners = [self._metrics.log]
        on_rank0(lambda: self._open_port(settings))
        if settings.traces:
            on_rank0(lambda: self._open_traces(run))

    def watch(self, directory: RunDirectory) -> None:
        """Begins to write this rank's file of `status/`, and to take what is logged."""
        rank, ranks = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        directory.listeners += self._listeners
        status = StatusFile(directory.path, self._progress, self._warnings, rank=rank, ranks=ranks)
        self._resources.enter_context(closing(status))

    def close(self) -> None:
        self._resources.close()

    def _open_port(self, settings: ObserveSettings) -> None:
        if settings.metrics_port is None:
            return
        from postlude.serving.http.metrics import metrics_app  # uvicorn takes long to import
        from postlude.serving.http.server import BackgroundServer

        check_port(settings)
        app = metrics_app(self._metrics.families, settings.metrics_host)
        server = BackgroundServer(app, settings.metrics_host, settings.metrics_port)
        self._resources.enter_context(closing(server))
        print_line(f"metrics at {server.address}/metrics")

    def _open_traces(self, run: Path) -> None:
        check_traces()
        self.recorder = traces = RunTraces(run, self._progress, open_processor())
        self._listeners.append(traces.end_step)
        self._resources.enter_context(closing(traces))


def check_port(settings: ObserveSettings) -> str:
    """Refuses a metrics port that is taken. Returns a line about it."""
    host, port = settings.metrics_host, settings.metrics_port or 0
    check_address(host, port, "observe.metrics_host or observe.metrics_port (0 takes a free one)")
    return f"metrics at {host}, {f'port {port}' if port else 'a free port'}"
