"""Megatron-Core's models give the same numbers with Postlude's head in place of their output layer."""

import inspect
import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from examples.peers.verl_mtp_processor import verl_mtp_processor
from examples.peers.verl_output_processor import verl_output_processor
from torch import Tensor

from postlude.integrations.megatron import LogprobsProcessor, OutputHook
from tests.conftest import Ranks
from tests.equality import TOLERANCE, difference
from tests.peers.frameworks import (
    BATCH,
    LENGTH,
    TOLERANCES,
    VOCABULARY,
    Inputs,
    errors_of,
    gpt_model,
    gradients_of,
    import_alone,
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


def with_processor(model: Any, inputs: Inputs) -> dict[str, Tensor]:
    stats = model(*inputs.model, labels=inputs.labels, output_processor=LogprobsProcessor(entropy=True))
    return {"logprob": stats.logprob, "entropy": stats.entropy}


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
        if pattern is None:
            results["output_processor"] = with_gradients(model, inputs, with_processor(model, inputs))
        OutputHook(model)
        results["OutputHook"] = with_gradients(model, inputs, with_processor(model, inputs))
        assert torch.equal(model(*inputs.model, labels=inputs.labels), loss)  # a call without a processor is unchanged
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
    """Two ranks, and how Megatron's scheduler runs microbatches of a GPTModel or HybridModel on them."""

    sizes: dict[str, int]
    config: dict[str, Any] = field(default_factory=dict)
    dtypes: tuple[torch.dtype, ...] = tuple(TOLERANCES)
    pattern: str | None = None  # of a HybridModel

    @property
    def has_plan(self) -> bool:
        return self.config.get("overlap_moe_expert_parallel_comm", False)

    def model(self, device: str, dtype: torch.dtype) -> Any:
        if self.pattern is None:
            return gpt_model(device, dtype=dtype, **self.config)
        return hybrid_model(device, self.pattern, tied=False, dtype=dtype, **self.config)


MOE = {
    "num_moe_experts": 4,
    "moe_router_topk": 2,
    "moe_router_load_balancing_type": "none",
    "moe_token_dispatcher_type": "alltoall",
    "add_bias_linear": False,
    "expert_model_parallel_size": 2,
}
SEQUENCE_PARALLEL = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
PIPELINE = {"pipeline_model_parallel_size": 2}
PLAN = {**MOE, "overlap_moe_expert_parallel_comm": True}
PLAN_DTYPES = (torch.bfloat16,)  # Megatron refuses others
LAYOUTS = {
    "tp=2": Layout({"tp": 2}, {"tensor_model_parallel_size": 2}),
    "tp=2, sequence parallel": Layout({"tp": 2}, SEQUENCE_PARALLEL),
    "pp=2, 1F1B": Layout({"pp": 2}, PIPELINE),
    "pp=2, 1F1B, MTP": Layout({"pp": 2}, {**PIPELINE, "mtp_num_layers": 2}),
    "ep=2": Layout({"ep": 2}, MOE),
    "ep=2, combined 1F1B": Layout({"ep": 2}, PLAN, PLAN_DTYPES),
    "ep=2, combined 1F1B, MTP": Layout({"ep": 2}, {**PLAN, "mtp_num_layers": 1}, PLAN_DTYPES),
    "HybridModel, tp=2, sequence parallel, MTP": Layout({"tp": 2}, SEQUENCE_PARALLEL, pattern="*-*-/*-"),
    "HybridModel, pp=2, 1F1B, MTP": Layout({"pp": 2}, PIPELINE, pattern="*-|*-/*-/*-"),
}


@dataclass(frozen=True)
class Way:
    """What a forward step passes to the model, and how it reads log-probs, and perhaps entropy, from the output."""

    rows: Callable[[Any, Inputs], Sequence[Tensor]]
    options: dict[str, Any] = field(default_factory=dict)


def rows_of_verl(logits: Tensor, batch: Inputs) -> list[Tensor]:
    utils = import_alone("verl.utils.megatron.tensor_parallel")
    with torch.compiler.set_stance("force_eager"):
        logits = logits.float() / CONTEXT.temperature
        logprob = utils.vocab_parallel_log_probs_from_logits(logits.clone(), batch.labels)
        return [logprob, utils.vocab_parallel_entropy(logits)]


def unbind(output: Tensor, _: Inputs) -> Sequence[Tensor]:
    return output.unbind()


CONTEXT = SimpleNamespace(temperature=0.7)
VERL = {"output_processor": verl_output_processor, "output_processor_context": CONTEXT}
WAYS = {
    "labels": Way(lambda losses, _: [-losses]),
    "output_processor": Way(unbind, {"output_processor": LogprobsProcessor(returns="tensor")}),
    "verl, logits": Way(rows_of_verl),
    "verl_output_processor": Way(unbind, VERL),
    "verl_mtp_processor": Way(unbind, {**VERL, "output_processor": verl_mtp_processor}),
}


def forward_step(way: Way) -> Any:
    """Returns a forward step for Megatron's schedules, whose loss is the weighted sum of the way's rows."""

    def step(microbatches: Any, model: Any, return_schedule_plan: bool = False) -> tuple[Any, Any]:
        batch = next(microbatches)
        call = model.build_schedule_plan if return_schedule_plan else model

        def loss_of(output: Any) -> tuple[Tensor, dict[str, Tensor]]:
            output, mtp_losses = output if isinstance(output, tuple) else (output, [])
            weights = batch.upstream * batch.loss_mask
            rows = [row * up for row, up in zip(way.rows(output, batch), weights, strict=False)]
            loss = torch.stack(rows).sum()
            mtp_loss = sum(model.config.mtp_loss_scaling_factor / len(mtp_losses) * each for each in mtp_losses)
            return loss + mtp_loss, {"loss": loss.detach()}

        return call(*batch.model, labels=batch.labels, loss_mask=batch.loss_mask, **way.options), loss_of

    return step


def compare_in_a_schedule(_: Any, device: str, layout: Layout, dtype: torch.dtype) -> dict[str, dict[str, float]]:
    """Returns errors relative to Megatron's own loss, and to verl's rows of logits, on a plain schedule."""
    microbatches = [Inputs(device, seed) for seed in range(4)]
    with megatron(device, **layout.sizes):
        from megatron.core.pipeline_parallel import get_forward_backward_func

        patch = import_alone("verl.models.mcore.mtp_patch")
        model = layout.model(device, dtype)
        is_gpt = layout.pattern is None

        def run(way: str) -> dict[str, Tensor]:
            model.zero_grad()
            losses = get_forward_backward_func()(
                forward_step_func=forward_step(WAYS[way]),
                data_iterator=iter(microbatches),
                model=[model],
                num_microbatches=len(microbatches),
                seq_length=LENGTH,
                micro_batch_size=BATCH,
                forward_only=False,
            )
            assert len(losses) == len(microbatches) * model.post_process
            return gradients_of(model) | {f"loss {index}": loss["loss"] for index, loss in enumerate(losses)}

        results = {}
        with mock.patch.object(model.config, "overlap_moe_expert_parallel_comm", new=False):
            megatrons = run("labels")
            if is_gpt:
                patch.patch_postprocess(model)
                verls = run("verl, logits")
                patch.unpatch_postprocess(model)
        if is_gpt:
            results |= {"output_processor": errors_of(run("output_processor"), megatrons)}
            results |= {"verl_output_processor": errors_of(run("verl_output_processor"), verls)}
        if layout.has_plan:
            results |= {"labels": errors_of(run("labels"), megatrons)}
        else:  # a schedule plan calls the model's layers, not the model, so that hooks on the model do not run
            OutputHook(model)
            results |= {"OutputHook": errors_of(run("output_processor"), megatrons)}
            if is_gpt and model.config.mtp_num_layers:
                results |= {"OutputHook, mtp": errors_of(run("verl_mtp_processor"), verls)}
    return results


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
            report("megatron-core", f"{name} on {device}, rank {rank}, {dtype}, by {way}", errors)
            assert max(errors.values()) <= TOLERANCES[dtype]


def gather_parameters_during_the_forward(_: Any, device: str, hooked: bool) -> tuple[float, bool]:
    """Returns the error of log-probs, and whether a weight is still being gathered when the model has returned.

    Megatron's DDP then shards parameters, and gathers each in a hook of the module that has it.
    """
    inputs = Inputs(device)
    with megatron(device):
        from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig

        model = gpt_model(device)
        if hooked:
            OutputHook(model)
        for parameter in model.parameters():
            dist.broadcast(parameter.data, 0)
        expected = -model(*inputs.model, labels=inputs.labels)
        config = DistributedDataParallelConfig(
            use_distributed_optimizer=True, overlap_grad_reduce=True, overlap_param_gather=True, bucket_size=1
        )
        wrapper = DistributedDataParallel(model.config, config, model)
        for bucket in [bucket for buffer in wrapper.buffers for bucket in buffer.buckets]:
            for rank, shard in enumerate(bucket.param_data.chunk(dist.get_world_size())):
                shard.mul_(rank == dist.get_rank())
        stats = wrapper(*inputs.model, labels=inputs.labels, output_processor=LogprobsProcessor())
        is_gathering = any(group.param_gather_handle is not None for group in wrapper.bucket_groups)
        return difference(stats.logprob, expected), is_gathering


@pytest.mark.parametrize("hooked", [False, True], ids=["output_processor", "OutputHook"])
def test_head_waits_for_a_weight_that_ddp_gathers(workers: Ranks, device: str, hooked: bool) -> None:
    for error, is_gathering in workers(2, gather_parameters_during_the_forward, device, hooked):
        assert error <= TOLERANCE
        assert not is_gathering


def test_hybrid_model_has_no_schedule_plan() -> None:
    """docs/cookbook.md says so: what the combined schedule calls of a model, and the layers it has functions for."""
    from megatron.core.models.common.fine_grained_callables import build_layer_callables
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.models.hybrid.hybrid_model import HybridModel

    called = {"build_schedule_plan", "_preprocess", "_postprocess"}
    assert called <= set(dir(GPTModel))
    assert not called & set(dir(HybridModel))
    assert "output_processor" not in inspect.signature(HybridModel.forward).parameters
    with pytest.raises(ValueError, match="Unsupported layer type"):
        build_layer_callables(torch.nn.Module())  # neither a TransformerLayer nor a MultiTokenPredictionLayer


def code_of(page: str, heading: str) -> str:
    """Returns the code blocks of a section of a page of docs/."""
    section = (Path(__file__).parents[2] / "docs" / page).read_text().split(f"\n## {heading}\n")[1].split("\n## ")[0]
    return "\n".join(re.findall(r"```py\n(.*?)```", section, re.DOTALL))


def run_documentation(_: Any, device: str, code: dict[str, str]) -> None:
    inputs = Inputs(device)
    tokens, position_ids, attention_mask = inputs.model
    arguments = {"tokens": tokens, "position_ids": position_ids, "labels": inputs.labels}
    with megatron(device):
        for model in (
            gpt_model(device, mtp_num_layers=1),
            hybrid_model(device, "*-/*-", tied=False, dtype=torch.float32),
        ):
            names: dict[str, Any] = {"model": model, "attention_mask": attention_mask, **arguments}
            exec(code["cookbook.md"], names)
            assert names["stats"].entropy.shape == inputs.labels.shape
            stats, (draft,) = model(*inputs.model, labels=inputs.labels, output_processor=names["policy_and_draft"])
            assert stats.logprob.shape == draft.top1.shape
        batch = arguments | {"loss_mask": inputs.loss_mask, "temperature": 0.7, "advantages": inputs.upstream[0]}
        names = {"tokenizer": range(VOCABULARY)}
        exec(code["linear_logprobs.md"], names)
        model = gpt_model(device)
        output, loss_of = names["forward_step"](
            iter([batch]), lambda *call, **options: model(call[0], call[1], attention_mask, **options)
        )
        loss_of(output)[0].backward()


def test_documentation_runs(workers: Ranks, device: str) -> None:
    pages = {"cookbook.md": "Megatron-Core", "linear_logprobs.md": "In Megatron-Core"}
    workers(1, run_documentation, device, {page: code_of(page, heading) for page, heading in pages.items()})
