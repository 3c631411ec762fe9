"""The cases of a comparison: a model in a layout, on batches that are hard to divide."""

from __future__ import annotations

import math
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from postlude.data import Batch
from postlude.data.microbatch import ROUTING
from postlude.hf.builtin import BUILTIN
from postlude.hf.postlude_format import POSTLUDE_CONFIG
from postlude.hf.read_model import CONFIG, Source, read_description
from postlude.layout import Layout
from postlude.lora import LoRA
from postlude.model import ModelConfig
from postlude.model.blocks import BlockTable
from postlude.model.context import Routers
from postlude.training_options import TrainingOptions
from postlude.verify.choices import GRID

BUDGET = 32
FRESH_RANGE = 0.1  # with fresh weights this wide, tokens differ in the outputs


@dataclass(frozen=True)
class Case(TrainingOptions):
    """One comparison. `initializer_range` widens a fresh model's weights, so that tokens differ in its outputs.

    `blocks` is a table with your own blocks, by default the built-in one. With `lora` the adapters are trained, and
    their B starts from random numbers too: with zeros the gradient of A would be zero.
    """

    source: Source
    objective: str = "grpo"
    budget: int = field(default=BUDGET, kw_only=True)
    compute_dtype: torch.dtype = torch.float32
    tied: bool | None = None
    initializer_range: float | None = None
    blocks: BlockTable | None = None
    lora: LoRA | None = field(default=None, kw_only=True)
    steps: bool = False
    """Whether optimizer steps are compared too (`verify.compare`): in float32 alone, as ranks store weights in it."""


def resolve_source(model: str) -> tuple[Source, float | None]:
    """Returns the source of a model named on the command line, and the range of fresh weights if it has none.

    The name is a built-in one, a directory or a GGUF file; or a directory, a config.json or a postlude.json without
    weights.
    """
    path = Path(model).expanduser()
    if model in BUILTIN:
        return model, FRESH_RANGE
    if path.name in (CONFIG, POSTLUDE_CONFIG) and path.is_file():
        path = path.parent
    elif path.suffix == ".json" and path.is_file():
        raise ValueError(
            f"{path} is known by its name: call it {CONFIG} if it is Hugging Face's, {POSTLUDE_CONFIG} if Postlude's."
        )
    if path.is_dir() and not any(path.glob("*.safetensors*")):
        return read_description(path), FRESH_RANGE
    return str(path), None


def fitting_layouts(config: ModelConfig) -> list[Layout]:
    """Returns the layouts of the grid that fit this model."""
    layouts = []
    experts = any(block.has_experts for block in config.blocks.values())
    for layout in GRID:
        with suppress(ValueError):
            config.check_layout(layout)
            layouts += [layout] if experts or layout.ep == 1 else []
    return layouts


def has_routing_column(compute_dtype: torch.dtype, config: ModelConfig) -> bool:
    """Returns whether batches say which experts each token goes to, instead of the model's routers.

    In half precision, rounding decides between experts of nearly equal scores. Two layouts, which round differently,
    would send a few tokens to different experts, and so not compute the same function.
    """
    return compute_dtype.itemsize < torch.float32.itemsize and bool(config.routers)


def batches(
    objective: str,
    config: ModelConfig,
    seed: int,
    compute_dtype: torch.dtype = torch.float32,
    *,
    share_prefixes: bool = False,
) -> dict[str, Batch]:
    """Returns batches by name: unequal lengths of which one fills a microbatch, and fewer sequences than ranks.

    For preferences, pairs of them. With `share_prefixes` most begin like another.
    """
    pairs = objective == "dpo"
    many_lengths = (5, 3, 8, 2, 12, 7, 9, 4, 20, BUDGET - 20) if pairs else (5, 1, 8, 3, 12, 2, 7, 9, 4, 11, BUDGET)
    few_lengths = (6, 4) if pairs else (6,)
    batches = {}
    for index, (name, lengths) in enumerate({"many": many_lengths, "few": few_lengths}.items()):
        batch = _batch(lengths, config.vocab_size, seed + index, pairs)
        if has_routing_column(compute_dtype, config):
            routing = _random_routing(config.routers, sum(lengths), seed + index)
            batch = replace(batch, columns={**batch.columns, ROUTING: routing.split(lengths)})
        batches[name] = _with_shared_beginnings(batch, seed + index) if share_prefixes else batch
    return batches


def case_batches(case: Case, config: ModelConfig) -> dict[str, Batch]:
    return batches(
        case.objective, config, case.seed, case.compute_dtype, share_prefixes=case.share_prefixes == "always"
    )


def _with_shared_beginnings(batch: Batch, seed: int) -> Batch:
    """Returns the batch with the beginnings of most sequences, and their routing, replaced by those of earlier ones.

    So there are trees of several levels, branches of one token, and sequences that are the beginning of another.
    """
    generator = torch.Generator().manual_seed(seed)
    sequences = [torch.as_tensor(tokens).clone() for tokens in batch.sequences]
    routing = list(batch.columns.get(ROUTING, ()))
    for index in range(1, len(sequences)):
        source, draw = (int(torch.randint(limit, (), generator=generator)) for limit in (index, 4))
        shortest = min(len(sequences[source]), len(sequences[index]))
        shared = (shortest, shortest - 1, (shortest + 1) // 2, 0)[draw]
        sequences[index][:shared] = sequences[source][:shared]
        if routing:
            routing[index] = torch.cat((routing[source][:shared], routing[index][shared:]))
    columns = {**batch.columns, **({ROUTING: routing} if routing else {})}
    return replace(batch, sequences=sequences, columns=columns)


def _random_routing(routers: Routers, tokens: int, seed: int) -> Tensor:
    """Returns different random experts for each token and router, [tokens, routers, top_k]."""
    generator, width = torch.Generator().manual_seed(seed), max(top_k for top_k, _ in routers.values())
    chosen = (
        F.pad(torch.rand(tokens, experts, generator=generator).topk(top_k).indices, (0, width - top_k), value=-1)
        for top_k, experts in routers.values()
    )
    return torch.stack(list(chosen), 1).short()


def _batch(lengths: tuple[int, ...], vocab_size: int, seed: int, pairs: bool) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    # Near a model's log-prob of random tokens. Far from it most ratios are clipped, and a KL is mostly rounding.
    guess = -math.log(vocab_size)

    def normal(length: int) -> Tensor:
        return torch.randn(length, generator=generator)

    return Batch(
        [torch.randint(vocab_size, (length,), generator=generator) for length in lengths],
        {
            "response_mask": [(torch.arange(length) >= length // 3).float() for length in lengths],
            "advantages": [normal(1).expand(length) for length in lengths],
            "old_logprobs": [guess + 0.5 * normal(length) for length in lengths],
            "reference_logprobs": [guess + 0.5 * normal(length) for length in lengths],
            "returns": [normal(length) for length in lengths],
        },
        groups=[index // 2 for index in range(len(lengths))] if pairs else None,
    )
