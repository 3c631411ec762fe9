"""Drafts of vLLM are counted from its metrics, from one step to the next, also after a restart."""

from __future__ import annotations

from contextlib import closing
from typing import Any

import pytest

from postlude.serving.clients.client import GenerationClient
from postlude.serving.engine import ServerEngine
from tests.conftest import Ranks
from tests.serving.fake_vllm import FakeVLLM

METRICS = """# HELP vllm:spec_decode_num_drafts_total Number of spec decoding drafts.
# TYPE vllm:spec_decode_num_drafts_total counter
vllm:spec_decode_num_drafts_total{{engine="0",model_name="m"}} {0}
vllm:spec_decode_num_drafts_total{{engine="1",model_name="m"}} 2.0
vllm:spec_decode_num_drafts_created{{engine="0",model_name="m"}} 1.76e+09
vllm:spec_decode_num_draft_tokens_total{{engine="0",model_name="m"}} {1}
vllm:spec_decode_num_accepted_tokens_total{{engine="0",model_name="m"}} {2}
vllm:spec_decode_num_accepted_tokens_per_pos_total{{engine="0",position="0"}} 99.0
"""


class DraftingVLLM(FakeVLLM):
    counts: tuple[float, float, float] | None = None

    def reply(self, path: str, body: Any) -> Any:
        if path == "/metrics":
            return "# HELP python_info\n" if self.counts is None else METRICS.format(*self.counts)
        return super().reply(path, body)


def metrics_by_step(group: Any) -> tuple[list[dict[str, float]], int]:
    """Returns the metrics of drafts after each step, and how often those of a server that does not draft are read."""
    steps = []
    with closing(DraftingVLLM()) as server, closing(DraftingVLLM()) as plain:
        client = GenerationClient([server.url, plain.url], "tiny")
        with closing(ServerEngine(lambda: client)) as engine:
            client.connect()
            for counts in ((8.0, 40.0, 10.0), (18.0, 80.0, 30.0), (18.0, 80.0, 30.0), (3.0, 20.0, 5.0)):
                server.counts = counts
                metrics = engine.take_metrics()
                steps.append({name: value for name, value in metrics.items() if name.startswith("draft")})
            return steps, plain.calls.count("/metrics")


def test_metrics_are_of_the_drafts_since_the_last_step(ranks: Ranks) -> None:
    ((steps, reads),) = ranks(1, metrics_by_step)
    assert steps == [
        {"draft_acceptance": 0.25, "draft_length": pytest.approx(1 + 10 / 10)},
        {"draft_acceptance": 0.5, "draft_length": pytest.approx(1 + 20 / 10)},
        {},
        {"draft_acceptance": 0.25, "draft_length": pytest.approx(1 + 5 / 5)},
    ]
    assert reads == 1, "a server that does not draft is asked once"


def metrics_with_unreadable_counts(group: Any) -> dict[str, float]:
    with closing(DraftingVLLM()) as server:
        client = GenerationClient(server.url, "tiny")
        with closing(ServerEngine(lambda: client)) as engine:
            client.connect()
            server.counts = (float("nan"), float("inf"), 0.0)
            return engine.take_metrics()


def test_counts_that_cannot_be_read_are_left_out(ranks: Ranks) -> None:
    (metrics,) = ranks(1, metrics_with_unreadable_counts)
    assert metrics == {"servers/up": 1.0, "servers/failed": 0.0, "servers/retried": 0.0}
