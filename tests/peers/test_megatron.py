"""Megatron-Core's models give the same numbers with Postlude's head in place of their output layer."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from postlude.integrations.megatron import LogprobsProcessor, logprobs_output_layer
from tests.conftest import Ranks
from tests.equality import TOLERANCE, difference
from tests.peers.frameworks import (
    BATCH,
    LENGTH,
    TOLERANCES,
    Inputs,
    errors_of,
    gpt_model,
    gradients_of,
    megatron,
    report,
    with_gradients,
)
from tests.peers.hybrid import hybrid_model

pytestmark = pytest.mark.peers
MODELS = {"GPTModel": None, "HybridModel": "*-*-", "HybridModel with Mamba": "M*M-"}
"""By name, the layer pattern of a HybridModel."""


def logprobs_and_entropy(logits: Tensor, labels: Tensor) -> dict[str, Tensor]:
    """Returns log-prob of the labels and entropy, [b, s], of logits [b, s, vocabulary]."""
    logprobs = logits.float().log_softmax(-1)
    chosen = logprobs.gather(-1, labels[..., None])[..., 0]
    return {"logprob": chosen, "entropy": -(logprobs.exp() * logprobs).sum(-1)}


def compare_on_one_rank(
    _: Any, device: str, pattern: str | None, tied: bool, dtype: torch.dtype
) -> dict[str, dict[str, float]]:
    """Returns the errors of each way to run the head: log-probs, entropy and gradients compared with Megatron's.

    Those "of the head" are differences from a float32 head on Megatron's own hidden states.
    """
    inputs, hidden, results = Inputs(device), [], {}
    with megatron(device):
        model = (
            hybrid_model(device, pattern, tied=tied, dtype=dtype)
            if pattern
            else gpt_model(device, tied=tied, dtype=dtype)
        )
        loss = model(*inputs.model, labels=inputs.labels).detach()
        capture = model.output_layer.register_forward_pre_hook(lambda _, args: hidden.append(args[0].detach().float()))
        expected = with_gradients(model, inputs, logprobs_and_entropy(model(*inputs.model), inputs.labels))
        capture.remove()
        weight = (model.embedding.word_embeddings if tied else model.output_layer).weight.detach().float()
        head = logprobs_and_entropy((hidden[0] @ weight.t()).transpose(0, 1), inputs.labels)
        processor, layer = LogprobsProcessor(entropy=True), model.output_layer
        parameters = dict(model.named_parameters())
        with logprobs_output_layer(model, processor, inputs.labels):
            assert dict(model.named_parameters()) == parameters
            logprob, entropy = model(*inputs.model).unbind(-1)
        assert model.output_layer is layer
        results["output_layer"] = with_gradients(model, inputs, {"logprob": logprob, "entropy": entropy})
        if pattern is None:
            stats = model(*inputs.model, labels=inputs.labels, output_processor=processor)
            scores = {"logprob": stats.logprob, "entropy": stats.entropy}
            results["output_processor"] = with_gradients(model, inputs, scores)
    return {
        way: errors_of(actual, expected)
        | {"loss": difference(-actual["logprob"], loss)}
        | {f"{name} of the head": difference(actual[name], exact) for name, exact in head.items()}
        for way, actual in results.items()
    }


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("name", MODELS)
def test_one_rank_equals_megatron(workers: Ranks, device: str, name: str, tied: bool, dtype: torch.dtype) -> None:
    if "Mamba" in name and device == "cpu" and (os.environ.get("TRITON_INTERPRET") != "1" or dtype != torch.float32):
        pytest.skip("Mamba's kernels need CUDA, or for fp32 Triton's interpreter")
    by_way = workers(1, compare_on_one_rank, device, MODELS[name], tied, dtype)[0]
    for way, errors in by_way.items():
        report("megatron-core", f"{name} on {device}, {dtype}, {'tied' if tied else 'untied'}, by {way}", errors)
        assert max(errors.values()) <= TOLERANCES[dtype]
        assert max(errors["logprob of the head"], errors["entropy of the head"]) <= TOLERANCE  # not rounded


@dataclass(frozen=True)
class Layout:
    """Two ranks, and how Megatron's scheduler runs microbatches on them."""

    sizes: dict[str, int]
    config: dict[str, Any] = field(default_factory=dict)
    dtypes: tuple[torch.dtype, ...] = tuple(TOLERANCES)

    @property
    def has_plan(self) -> bool:
        return self.config.get("overlap_moe_expert_parallel_comm", False)


MOE = {
    "num_moe_experts": 4,
    "moe_router_topk": 2,
    "moe_router_load_balancing_type": "none",
    "moe_token_dispatcher_type": "alltoall",
    "add_bias_linear": False,
    "expert_model_parallel_size": 2,
}
LAYOUTS = {
    "tp=2": Layout({"tp": 2}, {"tensor_model_parallel_size": 2}),
    "tp=2, sequence parallel": Layout({"tp": 2}, {"tensor_model_parallel_size": 2, "sequence_parallel": True}),
    "pp=2, 1F1B": Layout({"pp": 2}, {"pipeline_model_parallel_size": 2}),
    "ep=2": Layout({"ep": 2}, MOE),
    "ep=2, combined 1F1B": Layout({"ep": 2}, {**MOE, "overlap_moe_expert_parallel_comm": True}, (torch.bfloat16,)),
}


def forward_step(way: str, inputs: Inputs) -> Any:
    """Returns a forward step for Megatron's schedules, whose loss is the weighted sum of the labels' log-probs."""

    def step(microbatches: Any, model: Any, return_schedule_plan: bool = False) -> tuple[Any, Any]:
        batch = next(microbatches)
        call = model.build_schedule_plan if return_schedule_plan else model
        if way == "labels":
            output = call(*batch.model, labels=batch.labels)  # -logprob [b, s]
        elif way == "output_processor":
            processor = LogprobsProcessor(returns="tensor")
            output = call(*batch.model, labels=batch.labels, output_processor=processor)  # [1, b, s]
        else:
            with logprobs_output_layer(model, LogprobsProcessor(), batch.labels):
                output = call(*batch.model)  # [b, s, 1]
        sign = -1 if way == "labels" else 1

        def loss_of(results: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
            loss = (sign * results.reshape(batch.labels.shape) * inputs.upstream[0]).sum()
            return loss, {"loss": loss.detach()}

        return output, loss_of

    return step


def compare_in_a_schedule(_: Any, device: str, layout: Layout, dtype: torch.dtype) -> dict[str, dict[str, float]]:
    """Returns the errors of each way relative to Megatron's own loss on a plain schedule."""
    microbatches = [Inputs(device, seed) for seed in range(4)]
    with megatron(device, **layout.sizes):
        from megatron.core.pipeline_parallel import get_forward_backward_func

        model = gpt_model(device, dtype=dtype, **layout.config)

        def run(way: str) -> dict[str, Tensor]:
            model.zero_grad()
            losses = get_forward_backward_func()(
                forward_step_func=forward_step(way, microbatches[0]),
                data_iterator=iter(microbatches),
                model=[model],
                num_microbatches=len(microbatches),
                seq_length=LENGTH,
                micro_batch_size=BATCH,
                forward_only=False,
            )
            assert len(losses) == len(microbatches) * model.post_process
            return gradients_of(model) | {f"loss {index}": loss["loss"] for index, loss in enumerate(losses)}

        with mock.patch.object(model.config, "overlap_moe_expert_parallel_comm", new=False):
            expected = run("labels")
        # A schedule plan runs the output layer after the forward step has returned, so no block can replace it.
        ways = ("labels", "output_processor") if layout.has_plan else ("output_processor", "output_layer")
        results = {way: run(way) for way in ways}
    return {way: errors_of(actual, expected) for way, actual in results.items()}


@pytest.mark.parametrize(
    ("name", "dtype"),
    [(name, dtype) for name, layout in LAYOUTS.items() for dtype in layout.dtypes],
    ids=str,
)
def test_two_ranks_in_megatron_schedules_equal_megatron(
    workers: Ranks, device: str, name: str, dtype: torch.dtype
) -> None:
    for rank, ways in enumerate(workers(2, compare_in_a_schedule, device, LAYOUTS[name], dtype)):
        for way, errors in ways.items():
            report("megatron-core", f"GPTModel on {device}, {name}, rank {rank}, {dtype}, by {way}", errors)
            assert max(errors.values()) <= TOLERANCES[dtype]
