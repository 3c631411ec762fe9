"""TinkerMetrics: what the server of the Tinker API does, for Prometheus."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from postlude.generate.protocol import SamplingUsage
from postlude.prometheus import Gauge, Histogram, MetricCounter, MetricFamily, metric_name
from postlude.serving.http.metrics import GenerationMetrics, RequestMetrics
from postlude.tinker.futures import Future

TINKER = metric_name("tinker_")


class TinkerMetrics:
    """Counts requests of HTTP, what they ask for, and what is sampled and trained."""

    def __init__(self, usage: Callable[[], SamplingUsage]) -> None:
        self.requests, self.generation = RequestMetrics(), GenerationMetrics(usage)
        self.trained_tokens = MetricCounter(f"{TINKER}pass_tokens_total", "Tokens of the passes that were sent.")
        self._operations = Histogram(
            f"{TINKER}operation_seconds", "Seconds from a request to its result.", ["kind", "outcome"]
        )
        self._gauges: list[Gauge] = []

    def end(self, future: Future) -> None:
        """Counts a request whose result can be fetched."""
        outcome = "done" if future.failure is None else f"{future.failure.category} error"
        self._operations.observe(future.finished - future.created, future.kind, outcome)

    def add_gauge(self, name: str, text: str, read: Callable[[], float]) -> None:
        self._gauges.append(Gauge(f"{TINKER}{name}", text, read))

    def families(self) -> Iterator[MetricFamily]:
        counted = (*self.requests.readers, *self.generation.readers, self.trained_tokens, self._operations)
        return (metric.family() for metric in (*counted, *self._gauges))
