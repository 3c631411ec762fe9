"""Log-probs from Megatron's GPTModel as verl, SkyRL and NeMo RL compute them, and with Postlude's processors."""

from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from examples.peers.nemo_rl_output_processor import nemo_rl_output_processor
from examples.peers.skyrl_output_processor import skyrl_output_processor
from examples.peers.verl_output_processor import verl_output_processor
from torch import Tensor

from tests.peers.frameworks import Inputs, import_alone

Results = dict[str, Tensor]
Call = Callable[[Any, Inputs, int], Results]
TEMPERATURE = 0.7


def verl_from_logits(model: Any, inputs: Inputs, chunk: int) -> Results:
    """verl without its fused kernel: from vocabulary-parallel logits."""
    utils = import_alone("verl.utils.megatron.tensor_parallel")
    with torch.compiler.set_stance("force_eager"):
        logits = model(*inputs.model) / TEMPERATURE  # [b, s, vocabulary / tp]
        logprob = utils.vocab_parallel_log_probs_from_logits(logits.clone(), inputs.labels)
        return {"logprob": logprob, "entropy": utils.vocab_parallel_entropy(logits)}


def verl_fused(model: Any, inputs: Inputs, chunk: int) -> Results:
    """verl's Triton kernel, called in the hook like its `fused_output_processor`, which takes batches of one row."""
    kernel = import_alone("verl.utils.kernel.linear_cross_entropy").linear_cross_entropy

    def processor(
        *, hidden_states: Tensor, output_layer: Any, output_weight: Any, labels: Tensor, **_: Any
    ) -> tuple[Tensor, ...]:
        from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region

        if output_layer.sequence_parallel:
            hidden_states = gather_from_sequence_parallel_region(hidden_states)
        weight = output_layer.weight if output_weight is None else output_weight
        rows = hidden_states.transpose(0, 1).contiguous()
        results = kernel(rows, weight, labels, TEMPERATURE, "none", output_layer.tp_group)
        return tuple(result.view(labels.shape) for result in results)

    logprob, entropy = model(*inputs.model, labels=inputs.labels, output_processor=processor)
    return {"logprob": logprob, "entropy": entropy}


def verl_postlude(model: Any, inputs: Inputs, chunk: int) -> Results:
    logprob, entropy = model(
        *inputs.model,
        labels=inputs.labels,
        output_processor=verl_output_processor,
        output_processor_context=SimpleNamespace(temperature=TEMPERATURE),
    ).unbind()
    return {"logprob": logprob, "entropy": entropy}


def skyrl_fused(model: Any, inputs: Inputs, chunk: int, backend: str = "torch", entropy: bool = True) -> Results:
    """SkyRL's fused head through its own processor, and its entropy, which has no gradient."""
    package = "skyrl.backends.skyrl_train.distributed.megatron"
    head, utils = import_alone(f"{package}.fused_lm_head"), import_alone(f"{package}.model_utils")
    context: dict[str, Any] = {}
    hidden = head.call_model_with_fused_lm_head(
        model,
        *inputs.model,
        output_processor=head.fused_lm_head_output_processor,
        output_processor_context=context,
    )
    weight, group = context["lm_head_weight"], model.output_layer.tp_group
    start = group.rank() * weight.shape[0]
    logprob = utils.from_parallel_hidden_to_logprobs(
        hidden,
        weight,
        inputs.tokens,
        start,
        start + weight.shape[0],
        group,
        cp_group=model.pg_collection.cp,
        chunk_size=chunk,
        temperature=TEMPERATURE,
        fused_backend=backend,
    )
    if not entropy:
        return {"logprob": logprob}
    with torch.no_grad():
        rows = utils._fused_vocab_parallel_entropy_from_hidden(hidden, weight, group, chunk, TEMPERATURE)
    return {"logprob": logprob, "entropy": rows[:, :-1]}


def skyrl_triton(model: Any, inputs: Inputs, chunk: int) -> Results:
    return skyrl_fused(model, inputs, chunk, "triton")


def skyrl_postlude(model: Any, inputs: Inputs, chunk: int) -> Results:
    logprob, entropy = model(
        *inputs.model,
        output_processor=skyrl_output_processor,
        output_processor_context={"temperature": TEMPERATURE},
    )
    return {"logprob": logprob, "entropy": entropy.detach()}


def nemo_rl_fused(model: Any, inputs: Inputs, chunk: int) -> Results:
    """NeMo RL's forward, which it assigns to the GPTModel class; here it is called as a function."""
    utils = import_alone("nemo_rl.distributed.model_utils")
    model._linear_ce_fusion_chunk_size = chunk
    logprob = utils._gpt_forward_with_linear_ce_fusion(
        model, *inputs.model, labels=inputs.tokens, return_logprobs_for_linear_ce_fusion=True
    )
    return {"logprob": logprob}


def nemo_rl_postlude(model: Any, inputs: Inputs, chunk: int) -> Results:
    return {"logprob": model(*inputs.model, labels=inputs.tokens, output_processor=nemo_rl_output_processor)}


@dataclass(frozen=True)
class Comparison:
    """A framework's function, and Postlude's processor for the same results."""

    framework: str
    peer: Call
    postlude: Call
    kernel: bool = False  # runs on CUDA alone, and multiplies fp32 in less than fp32


WAYS = {
    "verl, logits": Comparison("verl", verl_from_logits, verl_postlude),
    "verl, Triton kernel": Comparison("verl", verl_fused, verl_postlude, kernel=True),
    "SkyRL, torch": Comparison("skyrl", skyrl_fused, skyrl_postlude),
    "SkyRL, Triton kernel": Comparison("skyrl", skyrl_triton, skyrl_postlude, kernel=True),
    "NeMo RL": Comparison("nemo-rl", nemo_rl_fused, nemo_rl_postlude),
}
