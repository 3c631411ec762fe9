"""MoE: a router, experts that each see their own tokens, and optional shared experts that see all."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, Self, get_args

import torch
from torch import Tensor

from postlude.checks import Finite, NonNegative, check_choice
from postlude.layout import Layout, nearest_degrees
from postlude.lora import LoRAGroup
from postlude.model.block_config import BlockConfig, LayerMetric, Size, SizeOrZero
from postlude.model.blocks.block import Block, SeparateUnit
from postlude.model.blocks.experts import Experts, SharedExpert
from postlude.model.blocks.mlp import GatedConfig, MLPConfig
from postlude.model.config import ModelConfig
from postlude.model.context import ForwardContext
from postlude.model.parallel import FP32Linear, Linear
from postlude.model.recompute import Recompute, recomputed
from postlude.model.steps import LayerStep, compute, exchange
from postlude.ops.decode_experts import add_experts, choose_experts, decodes_experts
from postlude.ops.experts import (
    ExpertRoute,
    add_aux_loss,
    expert_order,
    grouped_kernel_fits,
    merge_rows,
    replicate_rows,
    start_expert_route,
    weighted_sum,
)
from postlude.ops.norm import Norm, rms_norm
from postlude.router_losses import Balance
from postlude.world.mesh import Mesh


@dataclass(frozen=True, kw_only=True)
class MoEConfig(GatedConfig):
    """Experts, and how the router chooses `top_k` of them for a token.

    `scores` turn router logits into weights over all experts. With `groups` > 1 a token first picks its best
    `top_groups` groups (by the sum of each one's best `group_best` experts, by default top_k / top_groups), then
    experts inside them. `normalise` makes the chosen weights sum to one, `weight_scale` multiplies them after that.
    `selection_bias` adds a per-expert bias to the choice alone; after each step it moves by `selection_bias_rate`
    towards even load, without an auxiliary loss, whatever the learning rate is. The default of 0 leaves it as it was
    loaded. The rate is a setting of training: configs that differ only in it are equal, also in exports. With a
    `latent_size` the chosen experts work on that many features: one projection before tokens are exchanged, another
    after. Router and shared expert do not.

    `balance_coefficient` weighs E · Σ_e f_e · p_e (f_e an expert's share of the slots, p_e its mean score: 1 when
    even). With `balance` "sequence" both are of a sequence, and sequences are averaged by their lengths: DeepSeek-V3's
    sequence-wise loss. With "batch" both are of the whole batch, as in transformers (for one layer) and Megatron; the
    shares are counted in a forward of the batch before the training pass. `z_coefficient` weighs the mean squared
    logsumexp of the router. Both are means over the tokens of the whole batch, and like the rate settings of training.
    """

    has_experts = True
    selective_share = 0.9  # results of exchanges are kept
    kernel_share = 0.62
    experts: Size
    top_k: Size
    expert_bias: bool = False
    router_bias: bool = False
    scores: Literal["softmax", "sigmoid"] = "softmax"
    normalise: bool = True
    weight_scale: Finite = 1.0
    groups: Size = 1
    top_groups: Size = 1
    group_best: Size | None = None
    selection_bias: bool = False
    selection_bias_rate: NonNegative = field(default=0.0, compare=False)
    router_fp32: bool = False
    shared_intermediate_size: SizeOrZero = 0
    shared_gate: bool = False
    latent_size: SizeOrZero = 0
    balance_coefficient: NonNegative = field(default=0.0, compare=False)
    z_coefficient: NonNegative = field(default=0.0, compare=False)
    balance: Balance = field(default="sequence", compare=False)

    @property
    def group_score_experts(self) -> int:
        """The number of best experts whose scores make the score of a group."""
        return self.top_k // self.top_groups if self.group_best is None else self.group_best

    @property
    def has_aux_losses(self) -> bool:
        """Whether it has a balance loss or z-loss."""
        return bool(self.balance_coefficient or self.z_coefficient)

    @property
    def counts_batch(self) -> bool:
        """Whether the balance loss needs the load of the whole batch."""
        return self.balance == "batch" and self.balance_coefficient > 0

    @property
    def router_shape(self) -> tuple[int, int]:
        """top_k, and the number of experts."""
        return self.top_k, self.experts

    @property
    def metric_sums(self) -> Mapping[str, int]:
        """Slots of each expert; the rest are sums over tokens, replayed slots, or ranks (the selection bias)."""
        names = ("entropy", "z", "balance", "changed", "given", "bias_range", "bias_count")
        return {"load": self.experts, **dict.fromkeys(names, 1)}

    def metrics(self, sums: Mapping[str, Sequence[float]]) -> Mapping[str, LayerMetric]:
        """Returns load, idle experts and entropy; balance loss, selection bias and replay where the router has them."""
        load, slots = sums["load"], sum(sums["load"])
        if not slots:
            return {}
        tokens = slots / self.top_k
        values = {
            "load_max_over_mean": LayerMetric(max(load) * self.experts / slots),
            "idle_experts": LayerMetric(sum(count == 0 for count in load) / self.experts),
            "entropy": LayerMetric(sums["entropy"][0] / tokens, worst="min"),
            "z_loss": LayerMetric(sums["z"][0] / tokens),
        }
        if self.balance_coefficient:
            values["balance_loss"] = LayerMetric(sums["balance"][0] / tokens)
        if self.selection_bias:
            values["selection_bias_range"] = LayerMetric(sums["bias_range"][0] / sums["bias_count"][0])
        if sums["given"][0]:
            values["routing_changed"] = LayerMetric(sums["changed"][0] / sums["given"][0])
        return values

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.top_k > self.experts:
            raise ValueError(
                f"top_k={self.top_k} of {self.experts} experts: choose at least 1 and at most all of them."
            )
        check_choice("scores", self.scores, ("softmax", "sigmoid"))
        check_choice("balance", self.balance, get_args(Balance))
        if self.experts % self.groups or not 1 <= self.top_groups <= self.groups:
            raise ValueError(
                f"{self.experts} experts in {self.groups} groups, {self.top_groups} of them chosen: groups divide the "
                "experts, and a token picks between 1 and all groups."
            )
        size = self.experts // self.groups
        if self.groups > 1 and self.group_best is None and self.top_k % self.top_groups:
            raise ValueError(
                f"top_k={self.top_k} from {self.top_groups} groups: top_groups divides top_k, unless group_best says "
                "how many experts score a group."
            )
        if self.groups > 1 and not (self.top_k <= self.top_groups * size and 1 <= self.group_score_experts <= size):
            raise ValueError(
                f"top_k={self.top_k} from {self.top_groups} groups of {size} experts, each scored by its best "
                f"{self.group_score_experts}: the chosen groups hold at least top_k experts, and each group at least "
                "as many as score it."
            )
        if self.shared_gate and not self.shared_intermediate_size:
            raise ValueError("shared_gate needs a shared expert; set shared_intermediate_size.")

    @classmethod
    def default_for(cls, hidden_size: int, others: Sequence[BlockConfig]) -> Self:
        """Returns eight experts with top_k=2, which together are as wide as the model's MLP."""
        default = MLPConfig.default_for(hidden_size, others)
        mlp = next((config for config in others if isinstance(config, MLPConfig)), default)
        fields = cls.gated_fields([mlp]) | {"intermediate_size": max(1, mlp.intermediate_size // 2)}
        return cls(experts=8, top_k=2, **fields)

    def flops(self, hidden_size: int) -> float:
        """Counts the router, the chosen experts and the shared expert."""
        products = 3 if self.gated else 2
        chosen = products * self.top_k * self.intermediate_size * (self.latent_size or hidden_size)
        others = products * self.shared_intermediate_size + self.experts + 2 * self.latent_size
        return 2 * (chosen + hidden_size * others)

    def tp_traffic(self, hidden_size: int) -> float:
        """Returns 0: every rank routes its own tokens."""
        return 0.0

    def ep_traffic(self, hidden_size: int) -> float:
        """Counts the token, or its latent, once for each expert."""
        return self.top_k * (self.latent_size or hidden_size)

    def saved_activations(self, hidden_size: int) -> float:
        """Counts tokens and features of each chosen expert and the shared one, and the router's scores."""
        wide = 4 if self.gated else 2
        chosen = self.top_k * (2 * (self.latent_size or hidden_size) + wide * self.intermediate_size)
        return 3 * hidden_size + chosen + wide * self.shared_intermediate_size + 2 * self.experts

    def wgrad_activations(self, hidden_size: int) -> float:
        """Counts an MLP for each chosen and shared expert, the norm's output, and the gradients of the scores."""
        wide = 3 if self.gated else 2
        chosen = self.top_k * (2 * (self.latent_size or hidden_size) + wide * self.intermediate_size)
        outputs = hidden_size if self.shared_intermediate_size or self.latent_size else 0
        others = hidden_size + outputs + 2 * self.latent_size + self.experts
        return chosen + wide * self.shared_intermediate_size + others

    def check_layout(self, layout: Layout, name: str) -> None:
        """Raises unless ep divides the experts."""
        if self.experts % layout.ep:
            others = nearest_degrees(layout.ep, (ep for ep in range(1, self.experts + 1) if self.experts % ep == 0))
            raise ValueError(
                f"{name} has {self.experts} experts, which ep={layout.ep} ranks cannot share evenly. Use ep={others}."
            )


class MoE(Block):
    """route -> exchange_sizes -> plan -> dispatch -> experts -> combine -> merge.

    Every rank routes its own tokens and holds some of the experts. Dispatch and combine move tokens between ranks.
    """

    Config = MoEConfig
    lora_groups: ClassVar[Mapping[str, LoRAGroup]] = {"": "mlp", "router": "router"}
    never_fp8 = ("router",)
    supports_decoding = shares_prefixes = batch_invariant = True
    selection_bias: Tensor  # [experts] fp32, added to the scores for the choice
    load: Tensor  # [experts] fp32, slots of each expert in this step
    batch_load: Tensor  # [experts] fp32, slots of each expert in this batch, of all ranks

    def __init__(self, config: MoEConfig, model: ModelConfig, name: str, mesh: Mesh) -> None:
        super().__init__(config, model, name, mesh)
        self.config = config
        self.moves_bias = config.selection_bias and config.selection_bias_rate > 0
        router = FP32Linear if config.router_fp32 else Linear
        self.router = router(model.hidden_size, config.experts, bias=config.router_bias, tp=mesh.tp)
        expert_sizes = (config.experts, config.latent_size or model.hidden_size)
        self.experts = Experts(config, *expert_sizes, mesh.ep, bias=config.expert_bias)
        self.latent_down = self.latent_up = None
        if config.latent_size:
            self.latent_down = Linear(model.hidden_size, config.latent_size, tp=mesh.tp)
            self.latent_up = Linear(config.latent_size, model.hidden_size, tp=mesh.tp)
        if config.selection_bias:
            self.register_buffer("selection_bias", torch.zeros(config.experts, dtype=torch.float32))
            self.register_buffer("load", torch.zeros(config.experts, dtype=torch.float32), persistent=False)
        self.batch_counted = False
        if config.counts_batch:
            self.register_buffer("batch_load", torch.zeros(config.experts, dtype=torch.float32), persistent=False)
        self.shared = None
        if config.shared_intermediate_size:
            sizes = (model.hidden_size, config.shared_intermediate_size)
            self.shared = SharedExpert(config, *sizes, mesh.tp, gate=config.shared_gate)

    @property
    def cuda_graphable(self) -> bool:
        """True where one kernel takes the rows of all experts. Elsewhere the host must know the counts."""
        layers = (self.experts.gate_proj, self.experts.up_proj, self.experts.down_proj)
        fits = all(grouped_kernel_fits(layer.weight) for layer in layers if layer is not None)
        return fits and self.mesh.ep.group is None

    def steps(self) -> tuple[LayerStep, ...]:
        """Returns the steps. Dispatch and combine are left out where this rank has all experts.

        Steps with a separately sharded unit are not recomputed as a whole: it would be gathered during a backward.
        """
        between = self.mesh.ep.group is not None
        return (
            compute("route", self.route, recompute_selective=not self.config.router_fp32),
            compute("exchange_sizes", self.exchange_sizes, never_recompute=True),
            compute("plan", self.plan, never_recompute=True, syncs_host=between),
            *([exchange("dispatch", "rows", plan_name="to_experts")] if between else []),
            compute("experts", self.run_experts, recompute_selective=False),
            *([exchange("combine", "rows", plan_name="to_tokens")] if between else []),
            compute("merge", self.merge),
        )

    def fused_projections(self) -> tuple[tuple[Linear, ...], ...]:
        """Returns those of the shared expert."""
        return () if self.shared is None else self.shared.fused_projections()

    def sharded_separately(self) -> tuple[SeparateUnit, ...]:
        """Returns the experts, and an fp32 router."""
        experts = SeparateUnit(self.experts, experts=True)
        return (SeparateUnit(self.router, fp32=True), experts) if isinstance(self.router, FP32Linear) else (experts,)

    def token_counters(self) -> tuple[Tensor, ...]:
        """Returns the load of each expert."""
        return (self.load,) if self.moves_bias else ()

    def batch_counters(self) -> tuple[Tensor, ...]:
        """Returns the load of each expert in the whole batch."""
        return (self.batch_load,) if self.config.counts_batch else ()

    @torch.no_grad()
    def take_metric_sums(self) -> Tensor | None:
        """Adds the range of the selection bias, which is equal on every rank, and a count of those ranks."""
        if self.config.selection_bias and self.metric_sums.total is not None:
            span = self.selection_bias.max() - self.selection_bias.min()
            self.metric_sums.add({"bias_range": span, "bias_count": torch.ones_like(span)})
        return super().take_metric_sums()

    @torch.no_grad()
    def after_optimizer_step(self) -> None:
        """Raises the bias of experts below the mean load and lowers the others'."""
        if self.moves_bias:
            self.selection_bias += self.config.selection_bias_rate * torch.sign(self.load.mean() - self.load)

    def fused_decode(self, hidden: Tensor, norm: Norm, context: ForwardContext) -> Tensor | None:
        """Supports few rows of experts without adapters, and routers that choose among all experts: see `Block`."""
        config, experts = self.config, self.experts.operand()
        replays = context.routing(self.name) is not None
        if experts is None or replays or config.groups > 1 or config.latent_size or self.mesh.ep.group is not None:
            return None
        bias = self.selection_bias if config.selection_bias else None
        if not decodes_experts(hidden, config.top_k, experts, bias):
            return None
        tokens = rms_norm(hidden, norm.weight, norm.eps, norm.offset)
        logits, shared = self.router(tokens), None
        if self.shared is not None:  # while the counters are zero
            with_shared = self.shared.fused_decode(hidden, norm, context.counters)
            hidden, shared = (hidden, self.shared(tokens)) if with_shared is None else (with_shared, None)
        chosen = choose_experts(
            logits, bias, context.counters, config.top_k, softmax=config.scores == "softmax",
            normalise=config.normalise, scale=config.weight_scale, dtype=tokens.dtype,
        )  # fmt: skip
        assert context.decode_state is not None
        context.decode_state.record_routing(self.name, chosen.choice)
        return add_experts(hidden, tokens, chosen, experts, shared)

    def route(self, hidden: Tensor, context: ForwardContext) -> Mapping[str, Any]:
        """Chooses experts: `choice` and `weights` [T, top_k]. The shared expert needs no exchange, so it runs here.

        A choice given with the microbatch replaces the router's; the weights are the router's in any case.
        """
        tokens = self.norm(hidden)
        selective = self.config.router_fp32 and context.recompute == "selective"
        inside: Recompute = "selective" if selective else "none"
        logits, scores = self.score(tokens, inside)
        choice = self.replay(self.choose(scores.detach()), context)
        if context.decode_state is not None:
            context.decode_state.record_routing(self.name, choice)
        weights = scores.gather(-1, choice)
        if self.config.normalise:
            weights = weights / weights.sum(-1, keepdim=True).clamp_min(1e-20)
        weights = (weights * self.config.weight_scale).to(tokens.dtype)
        shared = recomputed(self.shared, inside, tokens) if self.shared is not None else None
        if self.training:
            weights = self.balance(weights, logits, scores, choice, context)
        elif self.config.counts_batch and context.decode_state is None:
            self.batch_load += context.sum_to_sequences(self.count(choice, context)).sum(0)
            self.batch_counted = True
        if self.latent_down is not None:
            tokens = recomputed(self.latent_down, inside, tokens)
        return {"tokens": tokens, "choice": choice, "weights": weights, "shared": shared}

    def exchange_sizes(self, tokens: Tensor, choice: Tensor, context: ForwardContext) -> Mapping[str, Any]:
        """Lays out a row for every expert of a token, sorted by expert, and starts telling ranks how many they get."""
        order, inverse, counts = expert_order(choice, self.config.experts)
        rows = replicate_rows(tokens, order, inverse, self.config.top_k)
        return {
            "rows": rows,
            "pending_route": start_expert_route(counts, self.mesh.ep),
            "order": order,
            "inverse": inverse,
        }

    def plan(self, pending_route: Callable[[], ExpertRoute], context: ForwardContext) -> Mapping[str, Any]:
        """Waits for how many rows arrive, and plans the exchanges to the experts and back."""
        route = pending_route()
        to_tokens = None if route.to_experts is None else route.to_experts.reverse
        return {"counts": route.counts, "to_experts": route.to_experts, "to_tokens": to_tokens}

    def run_experts(self, rows: Tensor, counts: Tensor, context: ForwardContext) -> Mapping[str, Any]:
        """Applies each row's expert."""
        return {"rows": self.experts(rows, counts, context.recompute)}

    def merge(
        self,
        hidden: Tensor,
        rows: Tensor,
        order: Tensor,
        inverse: Tensor,
        weights: Tensor,
        shared: Tensor | None,
        context: ForwardContext,
    ) -> Mapping[str, Any]:
        """Sums each token's experts by weight, and adds them and the shared expert to the residual stream."""
        routed = merge_rows(rows, weights, order, inverse)
        if self.latent_up is not None:
            routed = self.latent_up(routed)
        return self.add_residual(hidden, routed if shared is None else routed + shared)

    def score(self, tokens: Tensor, recompute: Recompute = "none") -> tuple[Tensor, Tensor]:
        """Returns router logits and scores over all experts, fp32 [T, experts]."""
        logits = self.router(tokens, recompute) if self.config.router_fp32 else self.router(tokens).float()
        return logits, logits.softmax(-1) if self.config.scores == "softmax" else logits.sigmoid()

    @torch.no_grad()
    def choose(self, scores: Tensor) -> Tensor:
        """Returns the experts of each token, [T, top_k]."""
        config = self.config
        if config.selection_bias and self.selection_bias.dtype != torch.float32:
            raise TypeError(
                f"{self.name} has its selection bias in {self.selection_bias.dtype}, where small steps of it are lost; "
                "cast parameters alone, as load_model(dtype=...) does."
            )
        ranking = scores + self.selection_bias if config.selection_bias else scores
        if config.groups > 1:
            grouped = ranking.unflatten(-1, (config.groups, -1))  # [T, groups, experts / groups]
            group_scores = grouped.topk(config.group_score_experts, dim=-1).values.sum(-1)
            chosen = group_scores.topk(config.top_groups, dim=-1).indices
            allowed = torch.zeros_like(group_scores, dtype=torch.bool).scatter_(-1, chosen, True)
            ranking = grouped.masked_fill(~allowed[..., None], float("-inf")).flatten(-2)
        return ranking.topk(config.top_k, dim=-1).indices

    @torch.no_grad()
    def replay(self, choice: Tensor, context: ForwardContext) -> Tensor:
        """Returns `choice` [T, top_k], replaced for tokens whose experts are given."""
        replayed = context.routing(self.name)
        if replayed is None:
            return choice
        replayed = replayed[:, : self.config.top_k].to(choice.dtype)
        known = (replayed >= 0).all(-1, keepdim=True)
        if self.training and context.is_first_call(f"{self.name}.replay"):
            others = known & ~(replayed[:, :, None] == choice[:, None, :]).any(-1)
            given = context.count_copies(known.expand_as(others).float())
            self.metric_sums.add({"changed": (given * others).sum(), "given": given.sum()})
        return torch.where(known, replayed, choice)

    @torch.no_grad()
    def count(self, choice: Tensor, context: ForwardContext) -> Tensor:
        """Counts the slots of each expert in this rank's tokens of each sequence, without padding: fp32 [n, experts].

        Unless a balance loss is of each sequence, all count as one. Where sequences share tokens, n are the segments.
        """
        experts = self.config.experts
        ones = torch.ones_like(choice, dtype=torch.float32)
        if context.token_mask is not None:
            ones = ones * context.token_mask[:, None]
        rows, slots = 1, choice
        by_sequence = self.config.balance_coefficient and self.config.balance == "sequence"
        if by_sequence or context.segments is not None:
            rows, slots = context.packing.count, choice + experts * context.sequence_index[:, None]
        # Whole numbers, so their sum is the same in any order.
        return ones.new_zeros(rows * experts).scatter_add_(0, slots.flatten(), ones.flatten()).view(rows, experts)

    def balance(
        self, weights: Tensor, logits: Tensor, scores: Tensor, choice: Tensor, context: ForwardContext
    ) -> Tensor:
        """Attaches the balance and z losses: their gradient joins at `weights`, so they need no path to the caller.

        They are means over the whole batch. An expert's share is of a whole sequence, wherever its tokens are, or of
        the whole batch. The metrics and the load are counted here too, once if the layer is recomputed.
        """
        config, batch_tokens = self.config, context.microbatch.batch_tokens
        measures = context.is_first_call(f"{self.name}.metrics")
        if not (measures or config.has_aux_losses):
            return weights
        if config.counts_batch and not self.batch_counted:
            raise RuntimeError(
                f"{self.name} balances its experts over the whole batch, but no forward in evaluation mode counted it. "
                'Train with an Engine, which does so before each pass, or use balance="sequence".'
            )
        counts = context.sum_to_sequences(self.count(choice, context))
        sums = {"load": counts.sum(0)}
        if config.balance_coefficient:
            totals = self.batch_load.expand_as(counts) if config.counts_batch else context.total(counts)
            one_row = config.counts_batch and context.segments is None
            rows = torch.zeros_like(choice[:, 0]) if one_row else context.sequence_index
            share = context.sum_to_segments(totals / totals.sum(-1, keepdim=True).clamp_min(1.0))
            probabilities = context.drop_padding(self.probability(scores))
            # A sum, like every loss.
            evenness = config.experts * weighted_sum(probabilities, share, rows)
            sums["balance"] = evenness.detach()
            weights = add_aux_loss(weights, evenness * (config.balance_coefficient / batch_tokens))
        if config.z_coefficient:
            squares = context.count_copies(logits.logsumexp(-1).square()).sum()
            weights = add_aux_loss(weights, squares * (config.z_coefficient / batch_tokens))
        if measures:
            self.metric_sums.add(sums | self.describe(logits.detach(), scores.detach(), context))
            if self.moves_bias:
                self.load += sums["load"]
        return weights

    def probability(self, scores: Tensor) -> Tensor:
        """Returns scores that sum to one, [T, experts]."""
        return scores if self.config.scores == "softmax" else scores / scores.sum(-1, keepdim=True)

    def describe(self, logits: Tensor, scores: Tensor, context: ForwardContext) -> dict[str, Tensor]:
        """Returns the sums of the routing entropy and of the squared logsumexp over this rank's tokens."""
        entropy = torch.special.entr(self.probability(scores)).sum(-1)
        logsumexp = logits[:, 0] - logits.log_softmax(-1)[:, 0]  # two kernels instead of logsumexp's nine
        values = context.count_copies(torch.stack((entropy, logsumexp.square()), dim=-1)).sum(0)
        return {"entropy": values[0], "z": values[1]}
