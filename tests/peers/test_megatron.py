"""Megatron-Core's own models give the same numbers with Postlude's head in place of their output layer."""

from __future__ import annotations

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
    VOCABULARY,
    Inputs,
    errors_of,
    gpt_model,
    megatron,
    report,
    seeded,
    transformer_config,
    with_gradients,
)

pytestmark = pytest.mark.peers
# bfloat16 has 8 bits: Megatron rounds its logits to them (ours are not rounded), and every layer rounds its gradients.
# Two right gradients differ by some units of the last bit.
TOLERANCES = {torch.float32: TOLERANCE, torch.bfloat16: 8 * 2**-8}


def of_logits(logits: Tensor, labels: Tensor) -> dict[str, Tensor]:
    """[b, s, vocabulary] -> the log-prob of the labels and the entropy, [b, s]."""
    logprobs = logits.float().log_softmax(-1)
    chosen = logprobs.gather(-1, labels[..., None])[..., 0]
    return {"logprob": chosen, "entropy": -(logprobs.exp() * logprobs).sum(-1)}


def compare_on_one_rank(_: Any, kind: str, tied: bool, dtype: torch.dtype) -> dict[str, dict[str, float]]:
    """Returns the errors of each way to run the head: differences of log-probs, entropy and gradients from Megatron's.

    Those "of the head" are differences from a float32 head on Megatron's own hidden states.
    """
    inputs, hidden, results = Inputs(), [], {}
    with megatron(), mock.patch("megatron.core.models.hybrid.hybrid_block.TENorm", torch_norm()):
        model = {"GPTModel": gpt_model, "HybridModel": hybrid_model}[kind](tied=tied, dtype=dtype)
        loss = model(*inputs.model, labels=inputs.labels).detach()
        capture = model.output_layer.register_forward_pre_hook(lambda _, args: hidden.append(args[0].detach().float()))
        theirs = with_gradients(model, inputs, of_logits(model(*inputs.model), inputs.labels))
        capture.remove()
        weight = (model.embedding.word_embeddings if tied else model.output_layer).weight.detach().float()
        head = of_logits((hidden[0] @ weight.t()).transpose(0, 1), inputs.labels)
        processor, layer = LogprobsProcessor(entropy=True), model.output_layer
        parameters = dict(model.named_parameters())
        with logprobs_output_layer(model, processor, inputs.labels):
            assert dict(model.named_parameters()) == parameters
            logprob, entropy = model(*inputs.model).unbind(-1)
        assert model.output_layer is layer
        results["output_layer"] = with_gradients(model, inputs, {"logprob": logprob, "entropy": entropy})
        if kind == "GPTModel":
            stats = model(*inputs.model, labels=inputs.labels, output_processor=processor)
            scores = {"logprob": stats.logprob, "entropy": stats.entropy}
            results["output_processor"] = with_gradients(model, inputs, scores)
    return {
        way: errors_of(ours, theirs)
        | {"loss": difference(-ours["logprob"], loss)}
        | {f"{name} of the head": difference(ours[name], exact) for name, exact in head.items()}
        for way, ours in results.items()
    }


def torch_norm() -> Any:
    """For Transformer Engine's norm, which needs CUDA."""
    from megatron.core.transformer.torch_norm import WrappedTorchNorm

    return WrappedTorchNorm


def hybrid_model(*, tied: bool, dtype: torch.dtype, **config: Any) -> Any:
    """Attention and MLPs of Megatron's own modules: its Mamba layer needs kernels that run on CUDA alone."""
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_submodules
    from megatron.core.models.hybrid.hybrid_block import HybridStack, HybridStackSubmodules
    from megatron.core.models.hybrid.hybrid_model import HybridModel
    from megatron.core.transformer.spec_utils import ModuleSpec
    from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules

    parts = get_gpt_layer_local_submodules()
    attention = TransformerLayerSubmodules(
        input_layernorm=parts.input_layernorm, self_attention=parts.self_attention, self_attn_bda=parts.self_attn_bda
    )
    mlp = TransformerLayerSubmodules(pre_mlp_layernorm=parts.pre_mlp_layernorm, mlp=parts.mlp, mlp_bda=parts.mlp_bda)
    layers = HybridStackSubmodules(
        attention_layer=ModuleSpec(module=TransformerLayer, submodules=attention),
        mlp_layer=ModuleSpec(module=TransformerLayer, submodules=mlp),
    )
    return seeded(
        HybridModel(
            transformer_config(dtype, num_layers=4, **config),
            ModuleSpec(module=HybridStack, submodules=layers),
            vocab_size=VOCABULARY,
            max_sequence_length=LENGTH,
            hybrid_layer_pattern="*-*-",
            position_embedding_type="rope",
            share_embeddings_and_output_weights=tied,
        ),
        dtype,
    )


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("kind", ["GPTModel", "HybridModel"])
def test_a_model_on_one_rank(ranks: Ranks, kind: str, tied: bool, dtype: torch.dtype) -> None:
    for way, errors in ranks(1, compare_on_one_rank, kind, tied, dtype)[0].items():
        report("megatron-core", f"{kind}, {dtype}, {'tied' if tied else 'untied'}, by {way}", errors)
        assert max(errors.values()) <= TOLERANCES[dtype]
        assert max(errors["logprob of the head"], errors["entropy of the head"]) <= TOLERANCE  # not rounded


def pipeline_step(way: str, inputs: Inputs) -> Any:
    """Returns a forward step for Megatron's schedules, whose loss is the weighted sum of the labels' log-probs."""

    def forward_step(microbatches: Any, model: Any) -> tuple[Tensor, Any]:
        batch = next(microbatches)
        if way == "labels":
            output = model(*batch.model, labels=batch.labels)  # -logprob [b, s]
        elif way == "output_processor":
            processor = LogprobsProcessor(returns="tensor")
            output = model(*batch.model, labels=batch.labels, output_processor=processor)  # [1, b, s]
        else:
            with logprobs_output_layer(model, LogprobsProcessor(), batch.labels):
                output = model(*batch.model)  # [b, s, 1]
        sign = -1 if way == "labels" else 1

        def loss_of(results: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
            loss = (sign * results.reshape(batch.labels.shape) * inputs.upstream[0]).sum()
            return loss, {"loss": loss.detach()}

        return output, loss_of

    return forward_step


def compare_in_a_pipeline(_: Any, dtype: torch.dtype) -> dict[str, dict[str, float]]:
    microbatches, results = [Inputs(seed) for seed in range(4)], {}
    with megatron(pp=2):
        from megatron.core.pipeline_parallel import get_forward_backward_func

        model = gpt_model(dtype=dtype, pipeline_model_parallel_size=2)
        for way in ("labels", "output_processor", "output_layer"):
            model.zero_grad()
            losses = get_forward_backward_func()(
                forward_step_func=pipeline_step(way, microbatches[0]),
                data_iterator=iter(microbatches),
                model=[model],
                num_microbatches=len(microbatches),
                seq_length=LENGTH,
                micro_batch_size=BATCH,
                forward_only=False,
            )
            assert len(losses) == len(microbatches) * model.post_process
            gradients = {f"gradient of {name}": each.grad.clone() for name, each in model.named_parameters()}
            results[way] = gradients | {f"loss {index}": each["loss"] for index, each in enumerate(losses)}
    theirs = results.pop("labels")
    return {way: errors_of(ours, theirs) for way, ours in results.items()}


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
def test_a_pipeline_in_megatrons_1f1b_schedule(ranks: Ranks, dtype: torch.dtype) -> None:
    for stage, ways in enumerate(ranks(2, compare_in_a_pipeline, dtype)):
        for way, errors in ways.items():
            report("megatron-core", f"GPTModel, pp=2, 1F1B, stage {stage}, {dtype}, by {way}", errors)
            assert max(errors.values()) <= TOLERANCES[dtype]
