"""MTP depths of Megatron-Core's models, scored by processors, equal the formula, Megatron's loss and verl's patches."""

from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from examples.peers.verl_mtp_processor import verl_mtp_processor
from examples.peers.verl_output_processor import verl_output_processor
from torch import Tensor

from postlude.integrations.megatron import LogprobsProcessor, MegatronDepth, OutputHook
from tests.conftest import Ranks
from tests.equality import TOLERANCE
from tests.peers.frameworks import Inputs, errors_of, gpt_model, gradients_of, import_alone, megatron, report
from tests.peers.hybrid import hybrid_model

pytestmark = pytest.mark.peers
TEMPERATURE, WEIGHT = 0.7, 0.3
CONTEXT = SimpleNamespace(temperature=TEMPERATURE)
Results = dict[str, Tensor]
Way = Callable[[Any, Inputs], Results]


def call(model: Any, inputs: Inputs, **options: Any) -> Any:
    from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper

    MTPLossLoggingHelper.tracker.clear()  # it adds up
    return model(*inputs.model, labels=inputs.labels, loss_mask=inputs.loss_mask, **options)


def losses_of_megatron() -> Tensor:
    """Returns the losses that Megatron logged for the depths of the last call."""
    from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper

    losses: Tensor = MTPLossLoggingHelper.tracker["loss_values"]
    return losses


def by_hand(model: Any, inputs: Inputs) -> Results:
    """Everything from the hidden states of Megatron's MTP block, in plain torch on one rank."""
    hidden: list[Tensor] = []
    capture = model.mtp.register_forward_hook(lambda *call: hidden.append(call[-1]))
    model(*inputs.model)
    capture.remove()
    weight = (
        model.embedding.word_embeddings if model.share_embeddings_and_output_weights else model.output_layer
    ).weight
    scale = model.config.mup_output_mult if model.config.use_mup else 1.0
    trunk, *depths = hidden[0].chunk(1 + model.config.mtp_num_layers)
    logprobs = (trunk.transpose(0, 1) @ weight.t() * scale / TEMPERATURE).log_softmax(-1)
    losses = []
    for depth, rows in enumerate(depths, start=1):
        logits = rows.transpose(0, 1) @ (weight.detach() if model.config.mtp_detach_heads else weight).t() * scale
        labels, mask = inputs.labels[:, depth:], inputs.loss_mask[:, depth:]
        scores = logits.log_softmax(-1)[:, :-depth].gather(-1, labels[..., None])[..., 0]
        losses.append(-(scores * mask).sum() / mask.sum())
    return {
        "logprob": logprobs.gather(-1, inputs.labels[..., None])[..., 0],
        "entropy": -(logprobs.exp() * logprobs).sum(-1),
        "losses": torch.stack(losses),
    }


def verl_patch(model: Any, inputs: Inputs) -> Results:
    """verl's patched `_postprocess`, which returns logits though the call has labels."""
    patch = import_alone("verl.models.mcore.mtp_patch")
    utils = import_alone("verl.utils.megatron.tensor_parallel")
    patch.patch_postprocess(model)
    with torch.compiler.set_stance("force_eager"):
        logits = call(model, inputs) / TEMPERATURE
        patch.unpatch_postprocess(model)
        logprob = utils.vocab_parallel_log_probs_from_logits(logits.clone(), inputs.labels)
        return {"logprob": logprob, "entropy": utils.vocab_parallel_entropy(logits), "trained": losses_of_megatron()}


def output_processor(model: Any, inputs: Inputs) -> Results:
    """GPTModel's own hook, or ours, after Megatron's own MTP loss."""
    output = call(model, inputs, output_processor=verl_output_processor, output_processor_context=CONTEXT)
    return {"logprob": output[0], "entropy": output[1], "trained": losses_of_megatron()}


def mtp_callables(model: Any, inputs: Inputs) -> Results:
    output, losses = call(model, inputs, output_processor=verl_mtp_processor, output_processor_context=CONTEXT)
    return {"logprob": output[0], "entropy": output[1], "losses": torch.stack(losses)}


def with_hook(way: Way) -> Way:
    def run(model: Any, inputs: Inputs) -> Results:
        hook = OutputHook(model)
        results = way(model, inputs)
        hook.remove()
        return results

    return run


def with_gradients(model: Any, inputs: Inputs, results: Results) -> Results:
    """Returns masked rows, the depths' losses, and both gradients. Megatron adds those of "trained" losses itself."""
    model.zero_grad()
    losses = results.pop("losses", None)
    rows = {name: row * inputs.loss_mask for name, row in results.items() if name != "trained"}
    total = sum((row * up).sum() for row, up in zip(rows.values(), inputs.upstream, strict=True))
    if losses is not None:
        total = total + WEIGHT * losses.mean()
    total.backward()
    rows["losses"] = results["trained"] if losses is None else losses
    return {name: row.detach() for name, row in rows.items()} | gradients_of(model)


@dataclass(frozen=True)
class Case:
    pattern: str | None = None  # of a HybridModel
    depths: int = 2
    tp: int = 1
    config: dict[str, Any] = field(default_factory=dict)

    def model(self, device: str, *, tied: bool) -> Any:
        sizes = {"tensor_model_parallel_size": self.tp, "sequence_parallel": self.tp > 1}
        config = {"mtp_num_layers": self.depths, "mtp_loss_scaling_factor": WEIGHT, **sizes, **self.config}
        if self.pattern is None:
            return gpt_model(device, tied=tied, **config)
        pattern = self.pattern + "/*-" * self.depths
        return hybrid_model(device, pattern, tied=tied, dtype=torch.float32, **config)

    @property
    def ways(self) -> dict[str, Way]:
        """The first is the reference."""
        verl: dict[str, Way] = (
            {"verl": verl_patch, "output_processor": output_processor} if self.pattern is None else {}
        )
        formula: dict[str, Way] = {"formula": by_hand} if self.tp == 1 else {}
        return {**formula, **verl, "OutputHook": with_hook(output_processor), "mtp": with_hook(mtp_callables)}


CASES = {
    "GPTModel": Case(),
    "GPTModel, tp=2, sequence parallel": Case(tp=2),
    "GPTModel, detached": Case(config={"mtp_detach_heads": True}),
    "HybridModel": Case("*-*-"),
    "HybridModel, MuP": Case("*-*-", config={"use_mup": True, "mup_base_hidden_size": 32}),
}


def compare(_: Any, device: str, case: Case, tied: bool) -> dict[str, dict[str, float]]:
    inputs = Inputs(device)
    with megatron(device, tp=case.tp):
        model = case.model(device, tied=tied)
        results = {way: with_gradients(model, inputs, run(model, inputs)) for way, run in case.ways.items()}
    reference, *others = results.values()
    return {way: errors_of(actual, reference) for way, actual in zip([*case.ways][1:], others, strict=True)}


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("name", CASES)
def test_depths_equal_the_formula_and_verls_patch(workers: Ranks, device: str, name: str, tied: bool) -> None:
    for rank, ways in enumerate(workers(CASES[name].tp, compare, device, CASES[name], tied)):
        for way, errors in ways.items():
            report("megatron-core", f"MTP of a {name} on {device}, rank {rank}, {tied=}, by {way}", errors)
            assert max(errors.values()) <= TOLERANCE


def verl_detached(model: Any, inputs: Inputs) -> Results:
    """verl's `detach_encoder`: both patches. The depths train their own layers and the head."""
    patch = import_alone("verl.models.mcore.mtp_patch")
    model.config.mtp_detach_heads = False  # the patched layers detach
    patch.patch_mtp_layer_get_embeddings(model)
    return verl_patch(model, inputs)


def mtp_that_trains_the_head(model: Any, inputs: Inputs) -> Results:
    def processor(*, mtp: tuple[MegatronDepth, ...], **hook: Any) -> tuple[Tensor, list[Tensor]]:
        (depth,) = mtp
        logprob = depth(LogprobsProcessor(), stop_head=False).logprob
        return verl_output_processor(**hook), [-logprob.sum() / depth.loss_mask.sum()]

    output, losses = call(model, inputs, output_processor=processor, output_processor_context=CONTEXT)
    return {"logprob": output[0], "entropy": output[1], "losses": torch.stack(losses)}


def compare_detached(_: Any, device: str) -> dict[str, float]:
    inputs = Inputs(device)
    with megatron(device):
        model = Case(depths=1, config={"mtp_detach_heads": True}).model(device, tied=False)
        actual = with_gradients(model, inputs, with_hook(mtp_that_trains_the_head)(model, inputs))
        return errors_of(actual, with_gradients(model, inputs, verl_detached(model, inputs)))


def test_detached_depth_that_trains_the_head_equals_verls_patches(workers: Ranks, device: str) -> None:
    (errors,) = workers(1, compare_detached, device)
    report("verl", f"MTP of a GPTModel on {device}, detached by both of its patches", errors)
    assert max(errors.values()) <= TOLERANCE
