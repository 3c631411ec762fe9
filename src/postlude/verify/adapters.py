"""Adapters of a comparison: a layout's against one rank's, and one rank's against the merged model and against peft's.

Layouts are compared with one rank in `compare.py`; what is here gives both the same adapters.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import tempfile
import warnings
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from postlude.data import Batch, Microbatch, pack, unpack
from postlude.hf.export import export_hf
from postlude.hf.family import Family
from postlude.hf.linear_layers import adapter_configs
from postlude.hf.load import init_or_load_weights, load_model
from postlude.hf.peft import to_peft, write_adapter
from postlude.hf.read_model import Source, read_model
from postlude.hf.read_peft import SavedAdapter, merge_adapter
from postlude.lora import AdapterConfigs, LoRA
from postlude.model import LanguageModel, OutputInputs
from postlude.model.adapters import freeze_base, is_adapter
from postlude.model.blocks import BLOCKS, BlockTable
from postlude.model.parallel import local_shard, region
from postlude.verify.cases import BUDGET, batches

RANDOM_B = 0.1  # the standard deviation of B: a change that every output shows, and no larger than the model's own
WEIGHTS = "old_logprobs"  # the column whose numbers weigh the log-probs of tokens in the sum that is differentiated


@dataclass(frozen=True)
class AdapterReport:
    """The difference of adapted layers on one rank from another model, relative to the largest value, in fp32."""

    other: str
    """The model to compare with: the merged one, or peft and its version."""
    logprob: float = 0.0
    gradients: Mapping[str, float] = field(default_factory=dict)
    """By our name; of the merged model none, as it has no adapters."""
    skipped: str = ""
    """Why nothing was compared; empty if it was."""

    @property
    def worst(self) -> tuple[str, float]:
        """The gradient with the largest difference; ("", 0.0) if there is none."""
        return max(self.gradients.items(), key=lambda item: item[1], default=("", 0.0))

    def passes(self, tolerance: float) -> bool:
        return all(off <= tolerance for off in (self.logprob, *self.gradients.values()))


@torch.no_grad()
def randomize_b(parameters: Iterable[tuple[str, Tensor]], seed: int) -> None:
    """Fills B of every adapter by seed and name: the same in every layout, on every device."""
    for name, parameter in parameters:
        if is_adapter(name) and name.endswith(".b"):
            generator = torch.Generator().manual_seed(zlib.crc32(f"{seed} {name} random".encode()))
            full = torch.empty(parameter.shape).normal_(0.0, RANDOM_B, generator=generator)
            local_shard(parameter).copy_(full[region(parameter)])


def adapted_model(
    source: Source,
    lora: LoRA,
    *,
    seed: int,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    blocks: BlockTable = BLOCKS,
) -> LanguageModel:
    """Returns a whole model on one rank, frozen, with adapters of random A and B in the same dtype."""
    family, config = read_model(source, blocks=blocks)
    configs = adapter_configs(lora, config, family, blocks)
    with torch.device("meta"):
        model = LanguageModel(config, dtype=dtype, blocks=blocks, adapters=configs)
    model = model.to_empty(device=device)
    init_or_load_weights(model, source, family, seed)
    randomize_b(model.named_parameters(), seed)
    for name, parameter in model.named_parameters():
        if is_adapter(name):
            parameter.data = parameter.data.to(dtype)
    freeze_base(model, value_head=False)
    return model


def adapter_gradients(model: nn.Module) -> dict[str, Tensor]:
    return {
        name: (torch.zeros_like(parameter) if parameter.grad is None else parameter.grad).float().cpu()
        for name, parameter in model.named_parameters()
        if is_adapter(name)
    }


def compare_adapters(source: Source, lora: LoRA, *, objective: str = "grpo", seed: int = 0) -> list[AdapterReport]:
    """Compares the adapted model on one rank, in fp32 on the CPU, with the merged model and with peft's own."""
    family, config = read_model(source)
    model = adapted_model(source, lora, seed=seed)
    configs = adapter_configs(lora, config, family)
    tensors = {name: parameter.detach() for name, parameter in model.named_parameters() if is_adapter(name)}
    pairs = {name: (tensors[f"{name}.adapter.a"], tensors[f"{name}.adapter.b"]) for name in configs}
    batch = batches(objective, config, seed)["many"]
    base = load_model(source, dtype=torch.float32, seed=seed)
    logprobs = _differentiate(model, batch)
    reports = []
    with tempfile.TemporaryDirectory(prefix="postlude-verify-") as directory:
        peft = _start_peft(base, family, Path(directory))
        merge_adapter(base, SavedAdapter(Path(directory), configs, pairs))
        with torch.no_grad():
            merged = _logprobs(base, pack_batch(batch))
        reports.append(AdapterReport("the merged model", difference(logprobs, merged)))
        if isinstance(peft, str):
            return [*reports, AdapterReport("peft", skipped=peft)]
        peft_logprobs, peft_gradients = _run_peft(peft, Path(directory), pairs, configs, family, config, batch)
    gradients = adapter_gradients(model)
    offs = {name: difference(gradients[name], peft_gradients[name]) for name in gradients}
    version = importlib.metadata.version("peft")
    return [*reports, AdapterReport(f"peft {version}", difference(logprobs, peft_logprobs), offs)]


def pack_batch(batch: Batch, depths: int = 0) -> list[Microbatch]:
    return pack(batch.sequences, budget=BUDGET, columns=batch.columns, groups=batch.groups, depths=depths)


def _score(inputs: OutputInputs, context: None) -> Tensor:
    logprob: Tensor = inputs.head.logprobs(inputs.hidden, inputs.microbatch.targets).logprob
    return logprob


def _logprobs(model: LanguageModel, microbatches: list[Microbatch]) -> Tensor:
    return torch.cat(unpack(microbatches, [model(microbatch, output_processor=_score) for microbatch in microbatches]))


def _differentiate(model: LanguageModel, batch: Batch) -> Tensor:
    """Returns the log-probs of all tokens, and leaves the gradient of their weighted sum in the adapters."""
    model.eval()  # without the balance loss of routers, which peft's model has none of
    microbatches, parts = pack_batch(batch), []
    for microbatch in microbatches:
        logprob = model(microbatch, output_processor=_score)
        (logprob * microbatch.column(WEIGHTS)).sum().backward()
        parts.append(logprob.detach())
    return torch.cat(unpack(microbatches, parts))


def _start_peft(base: LanguageModel, family: Family | None, directory: Path) -> Any:
    """Returns transformers' model with the same weights, or a clause about why there is none."""
    if importlib.util.find_spec("peft") is None:
        return "peft is not installed (pip install peft)"
    if family is None:
        return "transformers has no model of this pattern"
    export_hf(base, directory / "base")
    return AutoModelForCausalLM.from_pretrained(directory / "base", dtype=torch.float32, attn_implementation="eager")


def _run_peft(
    base: Any,
    directory: Path,
    pairs: Mapping[str, tuple[Tensor, Tensor]],
    configs: AdapterConfigs,
    family: Family | None,
    config: Any,
    batch: Batch,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Returns the log-probs of peft's model, and the gradients of its adapters by Postlude name."""
    leaves = {name: (a.clone().requires_grad_(), b.clone().requires_grad_()) for name, (a, b) in pairs.items()}
    written, tensors = to_peft(leaves, configs, config, family, separate_experts=False)
    write_adapter(directory / "adapter", written, {name: tensor.detach() for name, tensor in tensors.items()})
    peft = importlib.import_module("peft")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of names that only match once peft has fused gate and up
        model = peft.PeftModel.from_pretrained(base, directory / "adapter", is_trainable=True).eval()
    trained = {
        name.replace(".default.", "."): parameter
        for name, parameter in model.named_parameters()
        if parameter.requires_grad
    }
    if trained.keys() != tensors.keys():
        raise RuntimeError(f"peft trains other tensors than were written: {sorted(trained.keys() ^ tensors.keys())}.")
    logprobs = []
    for sequence, weights in zip(batch.sequences, batch.columns[WEIGHTS], strict=True):
        tokens = torch.as_tensor(sequence)
        logits = model(tokens[None]).logits[0, :-1]
        logprob = logits.log_softmax(-1).gather(-1, tokens[1:, None])[:, 0]
        if len(logprob):
            (logprob * torch.as_tensor(weights)[1:]).sum().backward()
        logprobs.append(torch.cat((logits.new_zeros(1), logprob.detach())))
    # The file is a linear function of our A and B: its transpose takes the gradients back.
    order = list(tensors)
    gradients = [trained[name].grad for name in order]
    torch.autograd.backward([tensors[name] for name in order], gradients)
    gradients_by_name = {
        f"{name}.adapter.{'ab'[side]}": leaf.grad for name, pair in leaves.items() for side, leaf in enumerate(pair)
    }
    return torch.cat(logprobs), {name: gradient for name, gradient in gradients_by_name.items() if gradient is not None}


def difference(actual: Tensor, expected: Tensor) -> float:
    """Returns the largest difference relative to the largest expected magnitude."""
    if actual.shape != expected.shape or not (torch.isfinite(actual).all() and torch.isfinite(expected).all()):
        return float("inf")
    scale = expected.double().abs().max().clamp_min(1e-12)
    return float((actual.double() - expected.double()).abs().max() / scale)
