"""Prints the tables of "A thousand GPUs on paper" in docs/scale-out.md: the planner's forecasts, and arithmetic.

    PYTHONPATH=src python docs/thousand.py                            # 18 searches, half a minute each
    PYTHONPATH=src python docs/thousand.py 30B-A3B=512 235B-A22B=512 70B=640    # the number of GPUs that train

The training side is `postlude plan --search`. The serving side is a roofline: weights and keys are read once per token,
at a share of the memory bandwidth that good engines reach. Nothing here was measured at this size.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace

from transformers import LlamaConfig, PretrainedConfig, Qwen3MoeConfig

from postlude.hf.read_model import read_model
from postlude.plan.cost import CostModel
from postlude.plan.forecast import StepForecast
from postlude.plan.hardware import HARDWARE, Hardware
from postlude.plan.parameter_count import total_parameters
from postlude.plan.search import search
from postlude.training_options import TrainingOptions

GPUS = 1024
SPLITS = (256, 384, 512, 640, 768, 896)  # GPUs that train, of which the best is taken
PROMPT, ANSWER, GROUP, PROMPTS = 512, 3584, 16, 1024  # tokens, tokens on average, answers a prompt, prompts a step
LONGEST = 3 * ANSWER
STALEST = 16  # the most steps ahead that are looked at, and how much slower than the fastest a smaller one may be:
WORTH = 1.1
STEP_TOKENS = (PROMPT + ANSWER) * GROUP * PROMPTS
H200 = HARDWARE["h200"]
READ_SHARE = 0.6  # of memory's speed, while answers are drawn
DECODE_SHARE = 0.4  # of the peak of products
LAYER_SECONDS = 3e-5  # a layer takes besides, however little there is to compute: launches and sums over a node
MOST_SEQUENCES = 512  # a server draws at once
CACHE_SHARE = 0.85  # of what weights leave of a server's memory
HTTP_SECONDS = 0.01  # a request to every server, and its answer
SEND_BYTES = 2**30
DISK, SHARED = 2e9, 50e9  # bytes a second: of one writer, and of a shared file system to all readers
PARSED = 233e3  # tokens a second whose answers one core of a Neoverse N1 reads; measured
TOKEN_BYTES = 91  # of an answer's JSON; measured
FAILED_EVERY = 54 * 24 * 16384 / 419  # GPU-hours: Llama 3's report counts 419 interruptions in 54 days on 16,384 H100s
RESTART = 300.0  # seconds until a gang has started again


@dataclass(frozen=True)
class Shape:
    """A model, the GPUs of one of its servers, and the share of peak that its steps are taken to reach."""

    name: str
    config: PretrainedConfig
    server: int
    efficiency: float

    @property
    def hardware(self) -> Hardware:
        """A GPU of which steps reach that share."""
        return replace(H200, efficiency=self.efficiency)

    def start(self) -> CostModel:
        """The cost model that the search starts from."""
        model = read_model(self.config)[1]
        return CostModel(
            config=model,
            options=TrainingOptions(budget=4 * (PROMPT + ANSWER), recompute="selective"),
            hardware=self.hardware,
            length=PROMPT + ANSWER,
            microbatches=1,
        )

    @property
    def cached(self) -> float:
        """Bytes of keys and values a token, in bf16."""
        config = self.config
        return 2 * 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim


def moe(**sizes: int) -> Qwen3MoeConfig:
    """A mixture of 128 experts, of which a token goes to 8."""
    return Qwen3MoeConfig(
        vocab_size=151936, num_experts=128, num_experts_per_tok=8, head_dim=128, num_key_value_heads=4,
        norm_topk_prob=True, tie_word_embeddings=False, max_position_embeddings=40960, **sizes,
    )  # fmt: skip


SHAPES = (
    Shape("30B-A3B", moe(hidden_size=2048, num_hidden_layers=48, num_attention_heads=32, moe_intermediate_size=768),
          1, 0.38),
    Shape("235B-A22B", moe(hidden_size=4096, num_hidden_layers=94, num_attention_heads=64, moe_intermediate_size=1536),
          8, 0.38),
    Shape("70B", LlamaConfig(vocab_size=128256, hidden_size=8192, intermediate_size=28672, num_hidden_layers=80,
                             num_attention_heads=64, num_key_value_heads=8, head_dim=128, tie_word_embeddings=False,
                             max_position_embeddings=131072), 2, 0.45),
)  # fmt: skip


@dataclass(frozen=True)
class Plan:
    """So many GPUs train, and the rest serve."""

    shape: Shape
    train: StepForecast
    training: int
    staleness: int = 1

    @property
    def parameters(self) -> int:
        """Of the model."""
        return total_parameters(self.train.model.config)

    @property
    def weights(self) -> float:
        """Bytes in bf16: what goes to servers."""
        return 2.0 * self.parameters

    @property
    def servers(self) -> int:
        """How many."""
        return (GPUS - self.training) // self.shape.server

    @property
    def sequences(self) -> int:
        """Answers that a server draws at once: of those that are under way, what its memory has keys for.

        Half of an answer is there on average, and all of k + 1 steps are under way.
        """
        room = CACHE_SHARE * (self.shape.server * H200.memory - self.weights)
        under_way = math.ceil((self.staleness + 1) * GROUP * PROMPTS / self.servers)
        return min(MOST_SEQUENCES, under_way, int(room / (self.shape.cached * (PROMPT + ANSWER / 2))))

    @property
    def token_seconds(self) -> float:
        """Of one token of all answers of a server: each expert is read, as so many tokens choose all of them."""
        read = self.weights + self.sequences * self.shape.cached * (PROMPT + ANSWER / 2)
        flops = self.sequences * self.train.model.model_flops / 3
        slowest = (
            max(read / (H200.memory_bandwidth * READ_SHARE), flops / (H200.flops * DECODE_SHARE)) / self.shape.server
        )
        return slowest + LAYER_SECONDS * self.shape.config.num_hidden_layers

    @property
    def drawn(self) -> float:
        """Tokens a second of all servers."""
        return self.servers * self.sequences / self.token_seconds

    @property
    def drawing_seconds(self) -> float:
        """Until a step's answers are drawn."""
        return GROUP * PROMPTS * ANSWER / self.drawn

    @property
    def sums_seconds(self) -> float:
        """All ranks sum buckets, to which each adds what it holds: twice the bytes through a ring."""
        return 2 * self.weights / self.shape.hardware.ring_rate(self.training, 1)

    @property
    def one_link(self) -> float:
        """Weights through one GPU's link to other nodes."""
        return self.weights / (H200.inter_node * H200.link_efficiency)

    @property
    def network_seconds(self) -> float:
        """Sums, and sends to servers of which no rank has more than so many."""
        requests = (math.ceil(self.weights / SEND_BYTES) + 5) * HTTP_SECONDS
        return self.sums_seconds + self.one_link * math.ceil(self.servers / self.training) + requests

    @property
    def period(self) -> float:
        """Seconds from step to step, answers being drawn meanwhile; the longest has k + 1 steps to be drawn in."""
        longest = LONGEST * self.token_seconds / (self.staleness + 1)
        return max(self.train.step.seconds, self.drawing_seconds, longest) + self.network_seconds

    @property
    def checkpoint(self) -> float:
        """Bytes: fp32 weights and two moments."""
        return 12.0 * self.parameters


def balanced(shape: Shape, train: StepForecast, training: int) -> Plan:
    """With answers drawn as few steps ahead as costs less than `WORTH`."""
    ahead = [Plan(shape, train, training, k) for k in range(1, STALEST + 1)]
    fastest = min(plan.period for plan in ahead)
    return next(plan for plan in ahead if plan.period <= WORTH * fastest)


def plans(shape: Shape, splits: tuple[int, ...]) -> Iterator[Plan]:
    """The best for each number of GPUs that train."""
    for training in splits:
        found = search(shape.start(), training, STEP_TOKENS, overlap=True, most=1)
        if found.best:
            plan = balanced(shape, found.best[0], training)
            balance = f"{plan.train.step.seconds:.1f} s to learn, {plan.drawing_seconds:.1f} s to draw"
            print(
                f"{shape.name}: {training} train: {balance}, k={plan.staleness}, {plan.period:.1f} s", file=sys.stderr
            )
            yield plan


def layout(plan: Plan) -> str:
    """In few words."""
    return f"`{str(plan.train.model.layout)[7:-1].replace(' ', '')}`"


def rows(plan: Plan) -> Iterator[tuple[str, str]]:
    """What there is to say of one."""
    train, step = plan.train, plan.train.step
    results = GROUP * PROMPTS / plan.period
    in_flight = plan.servers * plan.sequences
    nodes = plan.training // H200.gpus_per_node
    failures = {"a day": 24 * GPUS / FAILED_EVERY, "of the trainer": 24 * plan.training / FAILED_EVERY}
    steps = 3600 / plan.period
    yield "GPUs that train / serve", f"{plan.training} / {GPUS - plan.training}"
    yield "layout (planner)", layout(plan)
    yield "memory per GPU (planner)", f"{train.peak / 2**30:.0f} GiB"
    yield (
        "step (planner)",
        f"{step.seconds:.1f} s, {train.tokens_per_second:,.0f} tokens/s per GPU, MFU {train.mfu:.0%}",
    )
    yield "servers × GPUs, completions at once", f"{plan.servers} × {plan.shape.server}, {plan.sequences}"
    yield "time per token", f"{plan.token_seconds * 1e3:.0f} ms"
    yield "tokens/s of all servers", f"{plan.drawn / 1e6:.2f}M"
    yield "completions of a step sampled in", f"{plan.drawing_seconds:.1f} s"
    yield "weights", f"{plan.weights / 1e9:.0f} GB"
    yield "by network: sums + sends", f"{plan.sums_seconds:.1f} + {plan.network_seconds - plan.sums_seconds:.1f} s"
    yield "… if one rank sent to all", f"{plan.sums_seconds + plan.servers * plan.one_link:.0f} s"
    yield "by disk: write + read", f"{plan.weights / DISK:.0f} + {plan.servers * plan.weights / SHARED:.0f} s"
    yield "from step to step", f"{plan.period:.1f} s, {steps:.0f} steps an hour"
    longest = LONGEST * plan.token_seconds
    yield "longest completion, 3× the mean", f"{longest:.0f} s, so k = {plan.staleness}"
    yield "completions/s, in flight", f"{results:.0f}, {in_flight:,}"
    heard = results * ANSWER
    yield "rank 0 reads", f"{heard * TOKEN_BYTES / 1e6:.0f} MB/s of JSON, {heard / PARSED:.1f} cores"
    yield "reward workers at 0.1 s per completion", f"{results / 10:.0f} cores"
    yield "checkpoint", f"{plan.checkpoint / 1e9:.0f} GB, {plan.checkpoint / nodes / DISK:.0f} s at 2 GB/s a node"
    yield "failures a day, of the trainer", f"{failures['a day']:.2f}, {failures['of the trainer']:.2f}"
    lost = failures["of the trainer"] * (RESTART + 25 * plan.period) / 86400
    yield "lost to them, saving every 50 steps", f"{lost:.1%}"


def main(words: list[str]) -> None:
    """Print the table."""
    asked = {name: (int(gpus),) for name, _, gpus in (word.partition("=") for word in words)}
    chosen = asked or {shape.name: SPLITS for shape in SHAPES}
    shapes = [shape for shape in SHAPES if shape.name in chosen]
    best = [min(plans(shape, chosen[shape.name]), key=lambda plan: plan.period) for shape in shapes]
    print("| |", " | ".join(plan.shape.name for plan in best), "|\n|---|" + "---|" * len(best))
    for cells in zip(*map(rows, best), strict=True):
        print("|", " | ".join([cells[0][0], *(value for _, value in cells)]), "|")


if __name__ == "__main__":
    main(sys.argv[1:])
