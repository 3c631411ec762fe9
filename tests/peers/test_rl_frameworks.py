"""The processors of examples/peers give the numbers of verl, SkyRL and NeMo RL, in Megatron's own GPTModel."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib.machinery import PathFinder
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from examples.peers.nemo_rl_output_processor import nemo_rl_output_processor
from examples.peers.skyrl_output_processor import skyrl_output_processor
from examples.peers.verl_output_processor import verl_output_processor
from torch import Tensor

from postlude.integrations.hf import logprobs
from tests.conftest import Ranks
from tests.equality import TOLERANCE
from tests.integrations.test_hf import model_of, tokens
from tests.peers.frameworks import (
    Inputs,
    errors_of,
    gpt_model,
    import_alone,
    megatron,
    report,
    with_gradients,
)

pytestmark = pytest.mark.peers
TEMPERATURE = 0.7
CHUNK = 3  # tokens; the last chunk is shorter
Results = dict[str, Tensor]


def of_verl(model: Any, inputs: Inputs) -> tuple[Results, Results]:
    """verl's path over vocabulary-parallel logits: its fused kernel runs on CUDA alone."""
    from verl.utils.megatron.tensor_parallel import vocab_parallel_entropy, vocab_parallel_log_probs_from_logits

    with torch.compiler.set_stance("force_eager"):
        logits = model(*inputs.model) / TEMPERATURE  # [b, s, vocabulary / tp]
        theirs = {
            "logprob": vocab_parallel_log_probs_from_logits(logits.clone(), inputs.labels),
            "entropy": vocab_parallel_entropy(logits.clone()),
        }
        expected = with_gradients(model, inputs, theirs)
    output = model(
        *inputs.model,
        labels=inputs.labels,
        output_processor=verl_output_processor,
        output_processor_context=SimpleNamespace(temperature=TEMPERATURE),
    )
    return with_gradients(model, inputs, {"logprob": output.log_probs, "entropy": output.entropy}), expected


def of_skyrl(model: Any, inputs: Inputs) -> tuple[Results, Results]:
    """Its fused head through its own processor, and its entropy, which has no gradient."""
    package = "skyrl.backends.skyrl_train.distributed.megatron"
    head, utils = import_alone(f"{package}.fused_lm_head"), import_alone(f"{package}.model_utils")
    context: dict[str, Any] = {}
    hidden = head.call_model_with_fused_lm_head(
        model,
        *inputs.model,
        output_processor=head.fused_lm_head_output_processor,
        output_processor_context=context,
    )
    weight, group, cp_group = context["lm_head_weight"], model.output_layer.tp_group, model.pg_collection.cp
    start = group.rank() * weight.shape[0]
    logprob = utils.from_parallel_hidden_to_logprobs(
        hidden,
        weight,
        inputs.tokens,
        start,
        start + weight.shape[0],
        group,
        cp_group=cp_group,
        chunk_size=CHUNK,
        temperature=TEMPERATURE,
    )
    with torch.no_grad():
        entropy = utils._fused_vocab_parallel_entropy_from_hidden(hidden, weight, group, CHUNK, TEMPERATURE)
    theirs = with_gradients(model, inputs, {"logprob": logprob, "entropy": entropy[:, :-1]})
    logprob, entropy = model(
        *inputs.model,
        output_processor=skyrl_output_processor,
        output_processor_context={"temperature": TEMPERATURE},
    )
    return with_gradients(model, inputs, {"logprob": logprob, "entropy": entropy.detach()}), theirs


def of_nemo_rl(model: Any, inputs: Inputs) -> tuple[Results, Results]:
    """Its forward in place of GPTModel's, which it puts into the class; here it is called as a function."""
    utils = import_alone("nemo_rl.distributed.model_utils")
    model._linear_ce_fusion_chunk_size = CHUNK
    logprob = utils._gpt_forward_with_linear_ce_fusion(
        model, *inputs.model, labels=inputs.tokens, return_logprobs_for_linear_ce_fusion=True
    )
    theirs = with_gradients(model, inputs, {"logprob": logprob})
    logprob = model(*inputs.model, labels=inputs.tokens, output_processor=nemo_rl_output_processor)
    return with_gradients(model, inputs, {"logprob": logprob}), theirs


FRAMEWORKS: dict[str, Callable[[Any, Inputs], tuple[Results, Results]]] = {
    "verl": of_verl,
    "skyrl": of_skyrl,
    "nemo-rl": of_nemo_rl,
}


@dataclass(frozen=True)
class Case:
    framework: str
    tied: bool = False
    tp: int = 1
    sequence_parallel: bool = False

    def __str__(self) -> str:
        kind = "tied" if self.tied else "untied"
        return f"{self.framework}, {kind}, tp={self.tp}{', sequence parallel' * self.sequence_parallel}"


CASES = [
    *(Case(framework, tied) for framework in FRAMEWORKS for tied in (True, False)),
    *(Case(framework, tp=2, sequence_parallel=True) for framework in FRAMEWORKS),
    *(Case(framework, tp=2) for framework in ("verl", "skyrl")),  # NeMo RL gathers hidden states that are whole
]


def compare(_: Any, case: Case) -> dict[str, float]:
    inputs = Inputs()
    with megatron(tp=case.tp):
        sizes = {"tensor_model_parallel_size": case.tp, "sequence_parallel": case.sequence_parallel}
        return errors_of(*FRAMEWORKS[case.framework](gpt_model(tied=case.tied, **sizes), inputs))


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_processor_gives_the_frameworks_numbers(ranks: Ranks, case: Case) -> None:
    if case.framework == "nemo-rl" and PathFinder.find_spec("nemo_rl") is None:
        pytest.skip("NeMo RL has no wheel, and its sources were not fetched")
    for rank, errors in enumerate(ranks(case.tp, compare, case)):
        report(case.framework, f"GPTModel of megatron-core, {case}, rank {rank}", errors)
        assert max(errors.values()) <= TOLERANCE


@pytest.mark.parametrize("family", ["llama", "qwen3", "qwen3_moe"])
def test_verls_forward_of_a_transformers_model(family: str) -> None:
    """verl puts it in the place of the model's forward; `logprobs` calls the base model and leaves that alone."""
    from verl.models.transformers.dense_common import forward_with_torch_backend

    model, ids = model_of(family, torch.float32), tokens()

    def gradients(rows: Results) -> Results:
        model.zero_grad()
        sum(row[:, : ids.shape[1] - 1].square().sum() for row in rows.values()).backward()
        found = {name: each.grad.clone() for name, each in model.named_parameters() if each.grad is not None}
        return rows | {f"gradient of {name}": gradient for name, gradient in found.items()}

    output = forward_with_torch_backend(model, ids, return_dict=True, temperature=TEMPERATURE)
    theirs = gradients({"logprob": output.log_probs[:, :-1], "entropy": output.entropy[:, :-1]})
    stats = logprobs(model, ids, temperature=TEMPERATURE, entropy=True)
    ours = gradients({"logprob": stats.logprob[:, 1:], "entropy": stats.entropy[:, 1:]})
    errors = errors_of(ours, theirs)
    report("verl", f"forward of a {family} of transformers", errors)
    assert max(errors.values()) <= TOLERANCE
