"""TrainingOptions: how a model is computed and trained. An engine, a recipe's config and the planner share them.

Needs no torch. The strings under fields are the help of config keys.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Annotated, Any, Self, get_args

from postlude.checks import Bounds, NonNegative, check_bounds, check_choice
from postlude.head import HeadConfig
from postlude.layout import Layout
from postlude.lora import LoRA
from postlude.optimizer import AdamW, OptimizerConfig
from postlude.option_types import LARGEST_SEED
from postlude.options import (
    Common,
    LayerChoice,
    Overlap,
    Recompute,
    SharePrefixes,
    WeightStorage,
    check_layer_choice,
    check_overlap,
)
from postlude.router_losses import RouterLosses


@dataclass(frozen=True, kw_only=True)
class ForwardOptions:
    """The options of anything that runs a model."""

    budget: Common[Annotated[int, Bounds(least=1)]] = 8192
    """Maximum number of tokens of a microbatch, and so of a sequence."""
    seed: Common[Annotated[int, Bounds(least=0, most=LARGEST_SEED)]] = 0
    """Random seed."""


@dataclass(frozen=True, kw_only=True)
class TrainingOptions(ForwardOptions):
    """The options of a model in training. They are checked when they are made."""

    layout: Layout = Layout()
    """Parallel layout, such as pp=2,tp=2."""
    optimizer: OptimizerConfig = AdamW()
    """Optimizer."""
    weights: WeightStorage = "fp32"
    """Storage of the weights, where ranks do not share them: "fp32"; "split", bf16 with the other sixteen bits of fp32
    in the optimizer's state; "rounded", bf16 alone with stochastic rounding."""
    fp8: LayerChoice = False
    """Multiply tokens and weights inside the blocks in FP8 (e4m3, a scale per row), weight gradients excepted: in all
    layers, or in some by their numbers, such as "1:-1" for all but the first and the last."""
    lora: LoRA | Mapping[str, LoRA] | None = None
    """Low-rank adapters: they are trained, and the model is frozen. None trains all weights."""
    selection_bias_rate: NonNegative | None = None
    """Update rate of the selection bias of routers that have one (DeepSeek-V3, GLM, Nemotron-H), towards even load;
    none takes the model config's, which is 0 for a Hugging Face model."""
    router_losses: RouterLosses = RouterLosses()
    """Auxiliary losses of MoE routers."""
    head: HeadConfig = HeadConfig()
    """Computation of the output head."""
    share_prefixes: SharePrefixes = "auto"
    """Compute the tokens with which several sequences of a microbatch begin once: "auto" where it pays, "always"
    wherever two sequences begin alike, "off" never. It changes no result, only rounding."""
    recompute: Recompute = "none"
    """Activations to recompute in the backward instead of keeping them."""
    offload_activations: LayerChoice = False
    """Keep activations for the backward in host memory: of all layers, or of some by their numbers, such as "::3" for
    every third. They are copied while other layers compute."""
    overlap: Overlap = False
    """true interleaves one microbatch's forward with another's backward, which overlaps the experts' all-to-all with
    compute. It keeps one more microbatch and gathered weights in memory. "zero_bubble" computes weight gradients in the
    pipeline's bubble."""
    gather_once: bool = False
    """Gather sharded weights and reduce gradients once per optimizer step instead of once per microbatch. Each rank
    then needs memory for all weights and gradients of its stage."""

    def __post_init__(self) -> None:
        check_bounds(self)
        check_choice("recompute", self.recompute, get_args(Recompute))
        check_choice("weights", self.weights, get_args(WeightStorage))
        check_layer_choice("fp8", self.fp8)
        check_layer_choice("offload_activations", self.offload_activations)
        if self.offload_activations and self.overlap and self.recompute == "full":
            raise ValueError(
                f"offload_activations={self.offload_activations!r} has nothing to move: with recompute='full' and "
                f"overlap={self.overlap!r} layers keep their inputs alone, which pass to the device's next step. "
                "Use recompute='none', overlap=False, or offload_activations=False."
            )
        if self.lora is not None and self.weights != "fp32":
            raise ValueError(
                f"weights={self.weights!r} stores trained weights below fp32, but with lora the model is stored in the "
                'compute dtype and the adapters, which are small, in fp32. Use weights="fp32".'
            )
        check_overlap(self.overlap, pp=self.layout.pp, vpp=self.layout.vpp)

    @classmethod
    def of(cls, options: TrainingOptions, **changes: Any) -> Self:
        """Returns the training options of another class of options, with changes."""
        return cls(**{field.name: getattr(options, field.name) for field in fields(TrainingOptions)} | changes)

    @property
    def batch_dependent(self) -> dict[str, object]:
        """The options that are set and that make a token's results depend on its batch, by name."""
        backend = self.head.backend if self.head.backend == "logits" else None
        options = {"lora": self.lora is not None, "overlap": self.overlap, "fp8": self.fp8, "head.backend": backend}
        return {name: value for name, value in options.items() if value}

    @property
    def moments(self) -> float:
        """The fp32 numbers that the optimizer keeps on the device for each parameter."""
        return self.optimizer.fp32_per_parameter(self.weights)
