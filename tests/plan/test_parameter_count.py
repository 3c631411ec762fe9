"""Parameter counts from one layer of each kind equal those of the full model, and the ranks' sum is the model's."""

import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Qwen3Config, Qwen3MoeConfig

from postlude import AdamW, pack
from postlude.head import HeadConfig
from postlude.hf.linear_layers import adapter_configs
from postlude.hf.read_model import read_model
from postlude.layout import Layout, Stage
from postlude.lora import LoRA
from postlude.model import LanguageModel, ModelConfig, Pattern
from postlude.model.adapters import is_adapter
from postlude.model.schedule_plan import interleave
from postlude.options import Recompute, WeightStorage
from postlude.plan.memory import MemoryEstimate, estimate_memory
from postlude.plan.parameter_count import ParameterCount, count_parameters, total_parameters
from postlude.training_options import TrainingOptions
from tests.model.small import sequences, small_config

ROOT = Path(__file__).parents[2]
MODELS = ("tiny-dense", "tiny-moe", "tiny-hybrid")


def config_of(model: str, ahead: str = "") -> ModelConfig:
    config = read_model(model)[1]
    return replace(config, pattern=Pattern.parse(f"{config.pattern}{ahead}"))


def counted(config: ModelConfig, stage: Stage | None = None) -> int:
    with torch.device("meta"):
        model = LanguageModel(config, stage=stage)
    return sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize("model", MODELS)
def test_counts_equal_those_of_the_built_model(model: str) -> None:
    assert total_parameters(config_of(model)) == counted(config_of(model))


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("repeated", [False, True])
def test_counts_of_depths_and_stages_equal_those_of_the_built_model(tied: bool, repeated: bool) -> None:
    config = replace(config_of("tiny-moe", "/[*E]/[*E]"), tied_head=tied, mtp_repeated=repeated)
    for index in range(4):
        stage = Stage(index, 4)
        assert count_parameters(config).stage(stage).used == counted(config, stage)


def test_sharded_parameters_are_divided_and_replicated_ones_are_not() -> None:
    config = config_of("tiny-moe")
    full_count = count_parameters(config).layers["*E"]
    cut = count_parameters(config, Layout(tp=2, dp_shard=2, ep=4)).layers["*E"]
    assert cut.experts == full_count.experts // 4
    router = config.hidden_size * config.blocks["E"].experts
    norms = 2 * config.hidden_size + 2 * config.blocks["*"].head_dim
    assert cut.dense == router + norms + (full_count.dense - router - norms) // 2
    assert ParameterCount(8, 8).stored(Layout(tp=2, dp_shard=2, ep=4)) == 4 + 8  # experts lie on one rank each
    assert ParameterCount(8, 8).stored(Layout(dp_shard=4, ep=2)) == 2 + 4


BUDGET, COMPUTE_BYTES = 1024, 2


def estimates(
    config: ModelConfig, layout: str = "", mtp: bool = True, microbatches: int | None = None, **options: Any
) -> list[MemoryEstimate]:
    training = TrainingOptions(layout=Layout.parse(layout), budget=BUDGET, **options)
    return estimate_memory(config, training, compute_bytes=COMPUTE_BYTES, mtp=mtp, microbatches=microbatches)


@pytest.mark.parametrize("layout", ["pp=4", "pp=2,vpp=2"])
def test_activation_memory_scales_with_microbatches_in_flight(layout: str) -> None:
    config, parsed = config_of("tiny-dense"), Layout.parse(layout)
    single, plain, shared = (
        [rank_memory.activations for rank_memory in estimates(config, layout, microbatches=microbatches, **options)]
        for microbatches, options in ((1, {}), (9, {}), (9, {"overlap": True}))
    )
    assert all(
        single_bytes <= plain_bytes <= shared_bytes
        for single_bytes, plain_bytes, shared_bytes in zip(single, plain, shared, strict=True)
    )
    if parsed.vpp == 1:
        assert [round(plain_bytes / single_bytes) for plain_bytes, single_bytes in zip(plain, single, strict=True)] == [
            4,
            3,
            2,
            1,
        ]
        assert [
            round(shared_bytes / single_bytes) for shared_bytes, single_bytes in zip(shared, single, strict=True)
        ] == [8, 6, 4, 2]


def test_deferred_weight_gradients_are_held_until_computed() -> None:
    config = config_of("tiny-dense")
    plain, filled = (estimates(config, "pp=4", overlap=overlap) for overlap in (False, "zero_bubble"))
    hidden, blocks = config.hidden_size, [config.blocks[symbol] for symbol in "*-"]
    one_microbatch = sum(block.wgrad_activations(hidden) for block in blocks) * BUDGET * COMPUTE_BYTES
    for rank, (plain_bytes, filled_bytes) in enumerate(zip(plain, filled, strict=True)):
        layers = len(config.stage_layers(Stage(rank, 4)))
        assert filled_bytes.activations - plain_bytes.activations == pytest.approx(rank * layers * one_microbatch)
        assert (filled_bytes.gathered, filled_bytes.working, filled_bytes.head) == (
            plain_bytes.gathered,
            plain_bytes.working,
            plain_bytes.head,
        )


def test_head_memory_is_that_of_its_settings() -> None:
    config = replace(config_of("tiny-dense"), vocab_size=50_000)
    (default,), (small,), (plain,) = (
        estimates(config, "", head=head)
        for head in (HeadConfig(), HeadConfig(memory_budget=1 << 20), HeadConfig(backend="logits"))
    )
    all_logits = BUDGET * config.vocab_size * 4
    assert small.head < default.head < plain.head
    assert plain.head > 2 * all_logits


@pytest.mark.parametrize("repeated", [False, True])
def test_stage_with_a_repeated_depth_defers_no_wgrads(repeated: bool) -> None:
    config = replace(config_of("tiny-dense", "/[*-]/[*-]"), mtp_repeated=repeated)
    plain, filled = (estimates(config, "pp=2", overlap=overlap)[1] for overlap in (False, "zero_bubble"))
    assert (filled.activations == plain.activations) == repeated


@pytest.mark.parametrize("symbol", list("*SMG+-E"))
def test_deferred_wgrad_memory_equals_what_blocks_declare(symbol: str) -> None:
    """Within 10 %; heads of a few features leave more."""
    config = small_config(symbol, hidden_size=64)
    (microbatch,) = pack(sequences(40, 24, 64), budget=128)
    plan = LanguageModel(config).build_schedule_plan(microbatch, targets=True)
    interleave(plan.backward_steps(plan.forward().sum(), compute_wgrads=False))
    held_tensors = {
        value.untyped_storage().data_ptr(): value.untyped_storage().nbytes()
        for _, closure in plan.wgrad_queue or ()
        for value in (
            closure.args[1:] if isinstance(closure, partial) else [c.cell_contents for c in closure.__closure__ or ()]
        )
        if isinstance(value, torch.Tensor)
    }
    assert sum(held_tensors.values()) == pytest.approx(
        config.blocks[symbol].wgrad_activations(64) * 4 * len(microbatch), rel=0.1
    )


def test_untrained_mtp_depths_only_take_weight_memory() -> None:
    config = config_of("tiny-dense", "/[*-]")
    (trained,) = estimates(config)
    (idle,) = estimates(config, mtp=False)
    (without,) = estimates(config_of("tiny-dense"))
    depth = count_parameters(config).depth.used
    assert idle.parameters == trained.parameters == without.parameters + 4 * depth
    assert (idle.gradients, idle.optimizer, idle.activations) == (
        without.gradients, without.optimizer, without.activations
    )  # fmt: skip
    assert trained.gradients == without.gradients + 4 * depth
    assert trained.activations > without.activations


def test_offload_moves_estimated_memory_to_the_host() -> None:
    """Two of the layers are on the device while they are copied; the last one always is."""
    config = replace(config_of("tiny-dense"), pattern=Pattern.parse("[*-]{8}"))
    (none,), (chosen,) = (estimates(config, offload_activations=layers) for layers in (False, "1:6"))
    assert none.host == 0
    one_layer = chosen.host / 5
    assert none.activations - chosen.activations == pytest.approx(4 * one_layer, rel=1e-3)
    assert chosen.working - none.working == pytest.approx(one_layer, rel=1e-3)
    (every,) = estimates(config, offload_activations=True)
    assert every.host == pytest.approx(7 * one_layer, rel=1e-3)
    first, last = estimates(config, "pp=2", offload_activations="4:")
    assert (first.host, last.host) == (0, pytest.approx(3 * one_layer, rel=1e-3))


def test_recompute_lowers_the_estimated_memory() -> None:
    config = config_of("tiny-moe")
    none, selective, full = (
        estimates(config, recompute=recompute)[0].activations for recompute in ("none", "selective", "full")
    )
    assert full < selective < none


@pytest.mark.parametrize("layout", ["", "pp=2"])
@pytest.mark.parametrize(
    ("model", "lora"),
    [
        ("tiny-hybrid", LoRA(rank=3)),
        ("tiny-hybrid", LoRA(rank=2, experts="per_expert", targets=("2.attention.o_proj", "experts"))),
        ("tiny-dense", LoRA(rank=3, targets=("attention", "embedding", "head"), ranks={"head": 5})),
    ],
)
def test_adapter_counts_equal_those_of_the_built_model(layout: str, model: str, lora: LoRA) -> None:
    config, parsed = replace(config_of(model), tied_head=False), Layout.parse(layout)
    adapters = adapter_configs(lora, config, None)
    counts = count_parameters(config, parsed, adapters=adapters)
    for index in range(parsed.stages):
        stage = Stage(index, parsed.stages)
        with torch.device("meta"):
            built = LanguageModel(config, stage=stage, adapters=adapters)
        local = {name: parameter for name, parameter in built.named_parameters() if is_adapter(name)}
        assert counts.trained(stage).used == sum(parameter.numel() for parameter in local.values())
        experts = [name for name in local if ".experts." in name]
        assert counts.trained(stage).experts == sum(local[name].numel() for name in experts)


def test_tensor_parallel_shards_b_of_column_layers_and_a_of_row_layers() -> None:
    family, config = read_model("tiny-dense")
    hidden, heads = config.hidden_size, config.blocks["*"].heads * config.blocks["*"].head_dim
    for target, expected in (("q_proj", 3 * hidden + 3 * heads // 2), ("o_proj", 3 * heads // 2 + 3 * hidden)):
        adapters = adapter_configs(LoRA(rank=3, targets=target), config, family)
        assert count_parameters(config, Layout(tp=2), adapters=adapters).adapters[0] == ParameterCount(dense=expected)


RESULTS = ROOT / "benchmarks" / "results"
RECOMPUTE = {
    "lora": "none",
    "lora-selective": "selective",
    "lora-recompute": "full",
    "full": "none",
    "full-recompute": "full",
}
MEASURED = [
    (run["shape"], run["budget"], run["lora"], run["recompute"], run["peak_gib"])
    for run in json.loads((RESULTS / "train_step_lora_h200.json").read_text())["cases"]
    if run["lora"]
] + [
    (run["shape"], run["budget"], run["rank"] if run["case"].startswith("lora") else 0, recompute, run["peak_gib"])
    for run in json.loads((RESULTS / "lora_h200.json").read_text())["cases"]
    if (recompute := RECOMPUTE.get(run["case"]))
]
SHAPES = {
    "8b": (10, Qwen3Config, {"hidden_size": 4096, "intermediate_size": 12288, "num_key_value_heads": 8}),
    "8b-whole": (36, Qwen3Config, {"hidden_size": 4096, "intermediate_size": 12288, "num_key_value_heads": 8}),
    "30b-a3b": (
        6,
        Qwen3MoeConfig,
        {"hidden_size": 2048, "moe_intermediate_size": 768, "num_key_value_heads": 4, "num_experts": 128},
    ),
}
LARGEST = {16384: 13953, 8192: 8038}  # microbatches of those runs, by budget


@pytest.mark.parametrize(("shape", "budget", "rank", "recompute", "peak_gib"), MEASURED)
def test_memory_estimate_is_within_10_percent_of_measurement(
    shape: str, budget: int, rank: int, recompute: Recompute, peak_gib: float
) -> None:
    layers, kind, sizes = SHAPES[shape]
    heads = {"num_attention_heads": 32, "head_dim": 128, "vocab_size": 151936, "tie_word_embeddings": False}
    family, config = read_model(kind(num_hidden_layers=layers, **sizes, **heads))
    adapters = adapter_configs(LoRA(rank=rank), config, family) if rank else {}
    weights: WeightStorage = "fp32" if rank else "split"
    (estimate,) = estimate_memory(
        config,
        TrainingOptions(
            budget=LARGEST[budget],
            optimizer=AdamW(lr=1e-5, moments="fp32" if rank else "8bit"),
            recompute=recompute,
            weights=weights,
        ),
        compute_bytes=2,
        device="cuda",
        sizes=count_parameters(config, adapters=adapters),
    )
    assert estimate.total / 2**30 == pytest.approx(peak_gib, rel=0.1)
