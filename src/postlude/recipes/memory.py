"""How much memory a rank will need, from the model's config and the layout alone: an estimate, made before any rank.

What a run keeps is counted exactly but for padding: parameters, gradients and the optimizer's numbers in fp32, evenly
over the ranks that share a stage. What comes and goes is estimated at a full microbatch.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch

from postlude.layout import Layout, Stage
from postlude.model import LanguageModel, ModelConfig
from postlude.model.recompute import Recompute
from postlude.ops.linear_logprobs.plan import Shape

STORED = 4  # bytes of a parameter as it is stored; of its gradient and each of the optimizer's numbers too
SELECTIVE = 0.5  # of what a block keeps, roughly, where it recomputes all but the expensive results


@dataclass(frozen=True)
class Memory:
    """Bytes on one rank."""

    parameters: int
    gradients: int
    optimizer: int
    frozen: int
    """A reference's or a teacher's weights."""
    gathered: int
    """Whole weights while they are used, in the dtype of computation."""
    activations: int
    """What the forward of microbatches in flight keeps for their backward."""
    head: int
    """Logits that exist at one time, and the gradient of the head's weight."""

    @property
    def lasting(self) -> int:
        """What a run holds at every moment."""
        return self.parameters + self.gradients + self.optimizer + self.frozen

    @property
    def total(self) -> int:
        """All of it at once."""
        return sum(getattr(self, part.name) for part in fields(self))


def estimate(
    config: ModelConfig,
    layout: Layout,
    *,
    budget: int,
    compute_bytes: int,
    moments: int,
    recompute: Recompute = "none",
    frozen: int = 0,
    device: str = "cpu",
) -> list[Memory]:
    """What a rank of each pipeline stage needs.

    `moments` are the numbers that the optimizer keeps for each parameter; `frozen` the parameters of other models that
    are held in the same layout, in all.
    """
    sharers = layout.dp_shard * layout.cp * layout.tp
    tokens = -(-budget // layout.cp)
    found = []
    for rank in range(layout.pp):
        stages = [Stage(index, layout.stages) for index in range(rank, layout.stages, layout.pp)]
        sizes = [_sizes(config, stage) for stage in stages]
        whole = sum(map(sum, sizes))
        if layout.pp > 1:  # between the microbatches of a pipeline weights and gradients stay whole
            gathered = whole // layout.tp * (compute_bytes + STORED)
        else:
            gathered = (2 * max(sizes[0][1:], default=0) + sizes[0][0]) // layout.tp * compute_bytes
        kept = [config.blocks[symbol].kept(config.hidden_size) for stage in stages for symbol in _blocks(config, stage)]
        layers = sum(len(config.stage_layers(stage)) for stage in stages)
        a_token = sum(kept)
        if recompute == "selective":
            a_token *= SELECTIVE
        elif recompute == "full":
            a_token = layers * config.hidden_size + max(kept, default=0)
        in_flight = layout.pp - rank if layout.vpp == 1 else layout.pp
        head = _head(config, layout, tokens, device) if any(stage.last for stage in stages) else 0
        found.append(
            Memory(
                parameters=whole * STORED // sharers,
                gradients=whole * STORED // sharers,
                optimizer=whole * STORED * moments // sharers,
                frozen=frozen * STORED // (sharers * layout.pp),
                gathered=gathered if sharers > 1 or compute_bytes != STORED else 0,
                activations=int(a_token * tokens * compute_bytes * in_flight / layout.tp),
                head=head,
            )
        )
    return found


def parameters_in(config: ModelConfig) -> int:
    """How many parameters a model has."""
    return sum(_sizes(config, Stage()))


def _sizes(config: ModelConfig, stage: Stage) -> list[int]:
    """Parameters of a stage: those outside its layers, then those of each layer."""
    with torch.device("meta"):
        model = LanguageModel(config, stage=stage)
    layers = [sum(parameter.numel() for parameter in layer.parameters()) for layer in model.layers.values()]
    return [sum(parameter.numel() for parameter in model.parameters()) - sum(layers), *layers]


def _blocks(config: ModelConfig, stage: Stage) -> list[str]:
    return [symbol for index in config.stage_layers(stage) for symbol in config.pattern.layer(index).blocks]


def _head(config: ModelConfig, layout: Layout, tokens: int, device: str) -> int:
    """A slab of logits and what is summed beside it."""
    columns = -(-config.vocab_size // layout.tp)
    shape = Shape(rows=tokens, columns=columns, hidden=config.hidden_size, device=device)
    slab = min(shape.slab_bytes(shape.scratch.backward), tokens * columns * shape.logit_bytes)
    return slab + columns * config.hidden_size * shape.accumulator_bytes
