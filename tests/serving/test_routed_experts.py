"""The experts of tokens from vLLM: read, checked, and of the layers that have some."""

from __future__ import annotations

import base64
import io
from contextlib import closing
from typing import Any

import numpy as np
import pytest
import torch

from postlude.generate.protocol import Request
from postlude.generate.sampling_params import SamplingParams
from postlude.serving.clients.client import GenerationClient
from postlude.serving.clients.vllm import read_routed_experts, router_layers
from postlude.serving.engine import ServerEngine
from postlude.serving.errors import InvalidResponse
from tests.engine.training import build, config
from tests.serving.fake_vllm import FakeVLLM

LAYERS, TOP_K = 3, 2


def npy(array: np.ndarray) -> str:
    file = io.BytesIO()
    np.save(file, array)
    return base64.b64encode(file.getvalue()).decode()


def test_experts_are_those_of_every_token_but_the_last() -> None:
    experts = np.random.default_rng(0).integers(0, 200, (4, LAYERS, TOP_K), dtype=np.uint8)
    read = read_routed_experts(npy(experts), 5)
    assert read.dtype == torch.int16
    assert read[:4].tolist() == experts.tolist()
    assert read[4].unique().tolist() == [-1]


@pytest.mark.parametrize(
    ("encoded", "message"),
    [
        (npy(np.zeros((3, LAYERS, TOP_K), np.uint8)), "of 3 tokens, but 4 were inputs"),
        (npy(np.zeros((4, LAYERS), np.uint8)), "of shape"),
        (npy(np.zeros((4, LAYERS, TOP_K), np.float32)), "type float32"),
        (npy(np.array([[[None]]], object)), "not an array"),
        ("?", "not an array"),
        (7, "not an array"),
    ],
)
def test_other_replies_are_invalid(encoded: Any, message: str) -> None:
    with pytest.raises(InvalidResponse, match=message):
        read_routed_experts(encoded, 5)


class RoutingVLLM(FakeVLLM):
    """Reports the experts 100 · i + 10 · token + layer, for i below top-k; or nothing but zeros."""

    records = True

    def choice(self, body: Any) -> Any:
        reply = super().choice(body)
        (choice,) = reply["choices"]
        tokens = len(body["token_ids"]) + len(choice["token_ids"]) - 1
        experts = 10 * np.arange(tokens)[:, None, None] + np.arange(LAYERS)[None, :, None] + 100 * np.arange(TOP_K)
        choice["routed_experts"] = npy((experts * self.records).astype(np.uint16))
        return reply


def routings(group: Any, url: str) -> list[Any]:
    """Returns the layers with experts, and the routing of a completion with and without recording it."""
    engine = build("pp=1", config("tiny-moe", num_hidden_layers=2, num_experts=4, mlp_only_layers=[0]))
    found: list[Any] = [router_layers(engine.config)]
    for record in (True, False):
        rollout = ServerEngine(lambda: GenerationClient(url), engine=engine, record_routing=record)
        with closing(rollout):
            rollout.submit(Request((1, 2), SamplingParams(max_new_tokens=2)))
            (finished,) = rollout.poll(timeout=60)
            if finished.completion is None:
                found.append(str(finished.error))
            else:
                assert finished.completion.routing is not None
                found.append(finished.completion.routing.tolist())
    return found


def test_completions_have_the_experts_of_layers_with_experts(ranks: Any) -> None:
    with closing(RoutingVLLM()) as server:
        ((layers, recorded, whole),) = ranks(1, routings, server.url)
    assert layers == [1]
    assert recorded == [[[10 * token + 1, 10 * token + 101]] for token in range(3)] + [[[-1, -1]]]
    assert np.shape(whole) == (4, LAYERS, TOP_K)


def test_a_server_that_records_no_experts_is_refused(ranks: Any) -> None:
    """vLLM on a CPU reports zeros."""
    with closing(RoutingVLLM()) as server:
        server.records = False
        ((_, message, _),) = ranks(1, routings, server.url)
    assert message == (
        "a server reports an expert twice for one token: it does not record experts, as vLLM on a CPU does not. Set "
        "replay_routing to false."
    )
