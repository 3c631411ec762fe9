"""8-bit, split and offloaded optimizer state: trains like fp32 AdamW and resumes bit-exactly in every layout."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import LlamaForCausalLM

from postlude import AdamW, Batch, Layout, load_model
from postlude import ranks as started
from postlude.engine import SGD, Engine
from postlude.engine.optimizers import PIECE_BYTES
from postlude.engine.optimizers import build as optimizer_of
from postlude.hf.builtin import tiny_hybrid
from postlude.model import LanguageModel
from postlude.model.blocks import BLOCKS, MLP, MoEConfig
from postlude.model.parallel import local_shard, region
from postlude.objectives import SFT
from postlude.plan.memory import estimate_memory
from tests.engine.training import (
    ADAMW,
    assert_refused,
    batch,
    bitwise_equal,
    build,
    config,
    error_text,
    optimizer_state,
    policy,
    train,
    weights,
)
from tests.equality import TOLERANCE, difference
from tests.hf.families import CONFIGS
from tests.model.small import sequences, small_config

KINDS: dict[str, tuple[AdamW, str]] = {
    "8-bit moments": (replace(ADAMW, moments="8bit"), "fp32"),
    "split": (ADAMW, "split"),
    "split, 8-bit moments, offload": (replace(ADAMW, moments="8bit", offload=True), "split"),
    "rounded, offload": (replace(ADAMW, offload=True), "rounded"),
    "rounded, 8-bit moments": (replace(ADAMW, moments="8bit"), "rounded"),
}


def of_kind(kind: str, layout: str = "", **options: Any) -> Engine:
    source = config("tiny-dense", num_hidden_layers=2)
    return build(layout, source, **{"optimizer": KINDS[kind][0], "weights": KINDS[kind][1], **options})


def learned(optimizer: AdamW, stored: str, steps: int = 150) -> list[float]:
    """Returns losses of a small network that learns another one's outputs."""
    generator = torch.Generator().manual_seed(0)
    shapes = ((64, 16), (64,), (8, 64))
    teacher, start = ([torch.randn(shape, generator=generator) / shape[-1] ** 0.5 for shape in shapes] for _ in "ab")
    dtype = torch.float32 if stored == "fp32" else torch.bfloat16
    parameters = {str(place): torch.nn.Parameter(tensor.to(dtype)) for place, tensor in enumerate(start)}

    def answer(inputs: Tensor, network: Any) -> Tensor:
        return torch.tanh(inputs @ network[0].float().T + network[1].float()) @ network[2].float().T

    mover, losses = optimizer_of(optimizer, parameters, {"0", "2"}, stored), []
    for _ in range(steps):
        inputs = torch.randn(64, 16, generator=generator)
        loss = (answer(inputs, list(parameters.values())) - answer(inputs, teacher)).square().mean()
        loss.backward()
        mover.clipped_step(optimizer, optimizer.lr, torch.tensor(1.0, dtype=torch.float64))
        mover.zero_grad()
        losses.append(float(loss.detach()))
    return losses


@pytest.mark.slow
def test_a_small_problem_is_trained_as_in_fp32() -> None:
    plain = AdamW(lr=6e-3, betas=(0.9, 0.99), max_grad_norm=None)
    expected = learned(plain, "fp32")
    assert expected[-1] < 0.05 * expected[0]
    end = sum(expected[-20:])
    for optimizer, stored in KINDS.values():
        actual = learned(replace(plain, moments=optimizer.moments, offload=optimizer.offload), stored)
        # bf16 weights that are rounded at random stay as far from the best ones as their last bits are
        assert sum(actual[-20:]) < end * (2.0 if stored == "rounded" else 1.25), (optimizer, stored)


def test_split_weights_equal_fp32_weights() -> None:
    """Except for the low bits, which the network does not see."""
    start = torch.randn(8, 70, generator=torch.Generator().manual_seed(0)).bfloat16()
    wide, narrow = torch.nn.Parameter(start.float()), torch.nn.Parameter(start.clone())
    narrow.grad_dtype = None
    movers = [optimizer_of(ADAMW, {"w": wide}, {"w"}), optimizer_of(ADAMW, {"w": narrow}, {"w"}, "split")]
    for seed in range(5):
        gradient = torch.randn(8, 70, generator=torch.Generator().manual_seed(seed))
        for mover, parameter in zip(movers, (wide, narrow), strict=True):
            parameter.grad = gradient.clone()
            mover.clipped_step(ADAMW, 1e-2, gradient.double().norm())
    assert (wide.detach().bfloat16() - narrow.detach()).abs().max() <= 2.0**-8 * wide.detach().abs().max()
    low = movers[1].state[narrow]["low"]
    assert low.count_nonzero() > 500


def resumed(group: Any, kind: str, layout: str, directory: str) -> tuple[Any, ...]:
    """Returns a continuous run, one resumed from disk, and one that loads an earlier state in the same engine."""
    engine = of_kind(kind, layout)
    train(engine, [1, 2])
    engine.save(directory)
    expected = train(engine, [3, 4]), weights(engine), optimizer_state(engine)
    fresh = of_kind(kind, layout, seed=1)
    fresh.load(directory)
    actual = train(fresh, [3, 4]), weights(fresh), optimizer_state(fresh)
    engine.load(directory)
    return expected, actual, (train(engine, [3, 4]), weights(engine), optimizer_state(engine))


@pytest.mark.parametrize(
    ("kind", "layout"),
    [
        ("split, 8-bit moments, offload", ""),
        *(pytest.param(kind, "", marks=pytest.mark.thorough) for kind in KINDS if "split, 8" not in kind),
        pytest.param("8-bit moments", "tp=2,dp_shard=2", marks=pytest.mark.thorough),
        pytest.param("split, 8-bit moments, offload", "pp=2,tp=2", marks=pytest.mark.thorough),
    ],
)
@pytest.mark.slow
def test_resumed_run_is_bit_identical_to_the_uninterrupted_one(
    ranks: Any, tmp_path: Path, kind: str, layout: str
) -> None:
    for expected, *resumed_runs in ranks(
        Layout.parse(layout).world_size, resumed, kind, layout, str(tmp_path / "saved")
    ):
        for actual in resumed_runs:
            assert actual[0] == expected[0]
            assert bitwise_equal(actual[1], expected[1])
            assert bitwise_equal(actual[2], expected[2])


def given_gradients(group: Any, kind: str, layout: str, directory: str, source: str | None = None) -> Any:
    """Returns weights after steps with layout-independent gradients; saves, or loads another layout's checkpoint."""
    optimizer, _ = KINDS[kind]
    engine = of_kind(kind, layout, optimizer=replace(optimizer, max_grad_norm=None))
    if source is not None:
        engine.load(source)
    for step in range(engine.step, 4):
        engine.forward_backward(batch(0), policy)  # makes room for them
        for name, parameter in engine.parameters.items():
            drawn = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(step + len(name)))
            assert parameter.grad is not None
            local_shard(parameter.grad).copy_(drawn[region(parameter)])
        engine.optimizer_step()
        if step == 1:
            engine.save(directory)
    return dict(engine.stream_weights(dtype=torch.float32))  # all bits


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "layout"),
    [
        ("8-bit moments", "dp_shard=2"),
        pytest.param("rounded, 8-bit moments", "tp=2", marks=pytest.mark.thorough),
        pytest.param("split, 8-bit moments, offload", "pp=2,tp=2", marks=pytest.mark.thorough),
    ],
)
def test_update_is_bit_identical_in_every_layout(ranks: Any, tmp_path: Path, kind: str, layout: str) -> None:
    """Blocks and random numbers are those of the full tensor; also from a checkpoint of the other layout."""
    size = Layout.parse(layout).world_size
    single_directory, sharded_directory = str(tmp_path / "one"), str(tmp_path / "many")
    (expected,) = ranks(1, given_gradients, kind, "", single_directory)
    for actual in ranks(size, given_gradients, kind, layout, sharded_directory):
        assert bitwise_equal(actual, expected)
    for actual in ranks(size, given_gradients, kind, layout, str(tmp_path / "third"), single_directory):
        assert bitwise_equal(actual, expected)
    (actual,) = ranks(1, given_gradients, kind, "", str(tmp_path / "fourth"), sharded_directory)
    assert bitwise_equal(actual, expected)


def split_updates(group: Any, layout: str) -> tuple[list[float], dict[str, Tensor]]:
    """Returns losses before each of three updates with given gradients, and the weights after them with all bits."""
    options: dict[str, Any] = {"overlap": True, "recompute": "full"} if layout else {}
    optimizer = AdamW(lr=1e-2, offload=True, max_grad_norm=None)
    experts = MoEConfig(experts=4, top_k=2, intermediate_size=12, shared_intermediate_size=8, router_fp32=True)
    source = small_config("[GE][*E]", blocks={"E": experts})
    engine = build(layout, source, optimizer=optimizer, weights="split", **options)
    losses = []
    for step in range(3):
        losses.append(engine.forward_backward(Batch(sequences(20, 17, 3, 25, 6, 11)), SFT()).loss)
        for name, parameter in engine.parameters.items():
            assert parameter.grad is not None
            drawn = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(step + len(name)))
            local_shard(parameter.grad).copy_(drawn[region(parameter)])
        engine.optimizer_step()
    return losses, dict(engine.stream_weights(dtype=torch.float32))


@pytest.mark.slow
def test_split_weights_of_every_block_are_bit_identical_to_one_rank(ranks: Any) -> None:
    """With equal gradients, so only the gradients' rounding can differ between layouts."""
    (expected,) = ranks(1, split_updates, "")
    assert max(expected[0]) - min(expected[0]) > 1e-2
    for losses, actual in ranks(4, split_updates, "pp=2,tp=2,ep=2"):
        assert losses == pytest.approx(expected[0], rel=1e-5)
        assert bitwise_equal(actual, expected[1])


def resumed_with_fp32_parameters(group: Any, directory: str) -> list[dict[str, Tensor]]:
    """Returns the weights, with all bits, of a run of split weights and of runs resumed before and after its step.

    A critic, a router and recurrent blocks keep some parameters in fp32.
    """
    experts = MoEConfig(experts=4, top_k=2, intermediate_size=12, router_fp32=True)
    source = small_config("[GE][M-]", blocks={"E": experts})

    def built() -> Engine:
        return build("", source, optimizer=AdamW(lr=1e-2), weights="split", critic=True)

    def step(engine: Engine) -> None:
        engine.forward_backward(Batch(sequences(20, 17, 3)), SFT())
        engine.optimizer_step()

    engine = built()
    engine.save(f"{directory}/0")
    step(engine)
    engine.save(f"{directory}/1")
    fresh = [built(), built()]
    for number, resumed_engine in enumerate(fresh):
        resumed_engine.load(f"{directory}/{number}")
    rewound = built()
    step(rewound)
    rewound.load(f"{directory}/0")
    for other in (engine, fresh[0], fresh[0], fresh[1], rewound, rewound):
        step(other)
    return [dict(other.stream_weights(dtype=torch.float32)) for other in (engine, *fresh, rewound)]


def test_split_runs_with_fp32_parameters_resume(ranks: Any, tmp_path: Path) -> None:
    ((expected, *others),) = ranks(1, resumed_with_fp32_parameters, str(tmp_path))
    for actual in others:
        assert bitwise_equal(actual, expected)


def update_in_pieces(group: Any) -> bool:
    """Returns whether state loaded in pieces of a row or two updates weights like state that is not."""
    results = []
    for piece_bytes in (PIECE_BYTES, 1 << 14):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("postlude.engine.optimizers.PIECE_BYTES", piece_bytes)
            engine = of_kind("split, 8-bit moments, offload")
            results.append((train(engine, [1]), weights(engine)))
    staying = of_kind("split, 8-bit moments, offload", optimizer=replace(ADAMW, moments="8bit"))
    results.append((train(staying, [1]), weights(staying)))
    return all(losses == results[0][0] and bitwise_equal(moved, results[0][1]) for losses, moved in results)


@pytest.mark.thorough
def test_optimizer_state_in_host_memory_gives_equal_updates(ranks: Any) -> None:
    assert ranks(1, update_in_pieces) == [True]


def held_bytes(group: Any) -> list[tuple[int, int, int, int]]:
    """Returns the bytes of weights and of state of each kind, estimated and allocated."""
    results = []
    for kind_config, stored in KINDS.values():
        optimizer = replace(kind_config, offload=False)
        engine = build("", config("tiny-dense"), optimizer=optimizer, weights=stored)
        for parameter in engine.parameters.values():
            parameter.grad = torch.zeros_like(parameter)
        engine.optimizer_step()
        (estimate,) = estimate_memory(engine.config, engine.options, compute_bytes=2)
        assert (estimate.gathered == 0) == (stored != "fp32")
        state_tensors = [tensor for state in engine.optimizer.state.values() for tensor in state.values()]
        sizes = [
            sum(tensor.numel() * tensor.element_size() for tensor in tensors)
            for tensors in (engine.parameters.values(), state_tensors)
        ]
        results.append((estimate.parameters, sizes[0], estimate.optimizer, sizes[1]))
    return results


def test_estimated_memory_equals_that_of_an_engine(ranks: Any) -> None:
    for parameters, stored, optimizer, state_bytes in ranks(1, held_bytes)[0]:
        assert stored == parameters
        assert state_bytes == pytest.approx(optimizer, rel=0.01)  # vectors have moments in fp32


def refused_settings(group: Any, directory: str) -> None:
    build("", config("tiny-dense")).save(directory)
    saved = f"{directory} was saved with AdamW, but this engine has AdamW,"
    assert_refused(
        {
            "weights='split' need AdamW, but the optimizer is SGD": lambda: of_kind("split", optimizer=SGD()),
            f"{saved} 8-bit moments.": lambda: of_kind("8-bit moments").load(directory),
            f"{saved} split weights.": lambda: of_kind("split").load(directory),
        }
    )


def test_invalid_settings_are_refused_with_clear_error(ranks: Any, tmp_path: Path) -> None:
    ranks(1, refused_settings, str(tmp_path / "saved"))


def refused_layouts(group: Any) -> None:
    """Those that replicate narrow weights or split a block of 8-bit moments."""
    odd = config("tiny-dense", intermediate_size=320)  # 160 columns a rank
    cut = f"of 320 columns of layers.0.mlp.down_proj.weight this rank stores {160 * group.rank()} to"
    assert_refused(
        {
            "narrower than fp32 where no other rank shares them": lambda: of_kind("rounded, offload", "dp_shard=2"),
            cut: lambda: build("tp=2", odd, optimizer=replace(ADAMW, moments="8bit")),
        }
    )


@pytest.mark.slow
def test_layouts_that_cannot_hold_narrow_state_are_refused(ranks: Any) -> None:
    ranks(2, refused_layouts)


def update_on_a_gpu(engine: Engine, steps: range) -> None:
    for step in steps:
        for name, parameter in engine.parameters.items():
            generator = torch.Generator("cuda").manual_seed(step + len(name))
            parameter.grad_dtype = None
            parameter.grad = torch.randn(parameter.shape, generator=generator, device="cuda")
        engine.optimizer_step()


@pytest.mark.gpu
def test_large_tensors_are_updated_like_small_ones_on_a_gpu() -> None:
    results = []
    with started(device="cuda"):
        for large in (1, 1 << 40):
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr("postlude.engine.optimizers.LARGE", large)
                source = config("tiny-dense", num_hidden_layers=1)
                engine = Engine(source, budget=64, device="cuda", optimizer=AdamW(lr=1e-2, weight_decay=0.1))
                update_on_a_gpu(engine, range(4))
                results.append({name: parameter.detach().clone() for name, parameter in engine.parameters.items()})
    for name, small in results[1].items():
        assert difference(results[0][name], small) < TOLERANCE, name


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["rounded, offload", "split, 8-bit moments, offload"])
def test_offloaded_state_is_copied_in_and_back_on_a_gpu(kind: str, tmp_path: Path) -> None:
    """In pieces and bit-identical to resident state; also through a checkpoint saved right after a step."""
    kind_config, stored = KINDS[kind]

    def make(offload: bool, seed: int = 0) -> Engine:
        optimizer = replace(kind_config, offload=offload)
        source = config("tiny-dense", num_hidden_layers=1)
        return Engine(source, budget=64, device="cuda", optimizer=optimizer, weights=stored, seed=seed)

    with started(device="cuda"), pytest.MonkeyPatch.context() as patch:
        patch.setattr("postlude.engine.optimizers.PIECE_BYTES", 50_000)
        results = []
        for offload in (False, True):
            engine = make(offload)
            update_on_a_gpu(engine, range(2))
            engine.save(tmp_path / str(offload))
            update_on_a_gpu(engine, range(2, 4))
            results.append(weights(engine))
            state_tensors = [value for state in engine.optimizer.state.values() for value in state.values()]
            assert any(not value.is_cuda for value in state_tensors) == offload
        for offload in (False, True):
            engine = make(offload, seed=1)
            engine.load(tmp_path / str(not offload))
            update_on_a_gpu(engine, range(2, 4))
            results.append(weights(engine))
        assert all(bitwise_equal(weights_after, results[0]) for weights_after in results)


def by_role(group: Any) -> tuple[dict[str, float], dict[str, set[str]], dict[str, bool]]:
    """Returns weight decay, state and zero start of each parameter of GPT-OSS, whose experts have biases."""
    optimizer = AdamW(lr=1e-3, weight_decay=0.1, moments="8bit")
    engine = build("", CONFIGS["gpt_oss"](), optimizer=optimizer)
    zero = {name: not parameter.any() for name, parameter in engine.parameters.items()}
    engine.forward_backward(batch(1, vocab_size=61), SFT())
    engine.optimizer_step()
    names = engine.optimizer.names
    groups = engine.optimizer.param_groups
    decay = {names[param]: group["weight_decay"] for group in groups for param in group["params"]}
    return decay, {name: set(engine.optimizer.state[parameter]) for name, parameter in engine.parameters.items()}, zero


def test_the_role_of_a_parameter_is_declared_by_its_module(ranks: Any) -> None:
    ((decay, state, zero),) = ranks(1, by_role)
    assert "layers.0.moe.experts.down_proj.bias" in decay  # [experts, size]
    for name in decay:
        leaf = name.rpartition(".")[2]
        matrix = leaf == "weight" and not name.endswith("norm.weight")
        assert decay[name] == (0.1 if matrix else 0.0), name
        assert ("exp_avg_codes" in state[name]) == matrix, name
        assert zero[name] == (leaf in ("bias", "sinks")), name


def test_matrix_parameters_of_every_block_by_name() -> None:
    with torch.device("meta"):
        model = LanguageModel(tiny_hybrid(), value_head=True)
    not_matrices = {name for name, _ in model.named_parameters()} - model.matrices
    assert {name.removeprefix("layers.0.mamba.") for name in not_matrices if name.startswith("layers.0.mamba.")} == {
        "norm.weight",
        "gated_norm.weight",
        *(f"vectors.{name}" for name in ("A_log", "D", "dt_bias")),
        *(f"{name}_conv.bias" for name in "xbc"),
    }
    assert all(
        name.endswith(("norm.weight", "bias")) or "vectors." in name or "value_head" in name for name in not_matrices
    )
    assert not any(name.endswith(("norm.weight", "bias")) or "vectors." in name for name in model.matrices)


def test_a_parameter_without_a_role_is_refused() -> None:
    class Scaled(MLP):
        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments)
            self.gain = torch.nn.Parameter(torch.ones(3, 2))

    with pytest.raises(TypeError, match=r"layers.0.mlp.gain has no role: add 'gain' to `roles`"):
        LanguageModel(small_config("[*-]"), blocks={**BLOCKS, "-": Scaled})
    Scaled.roles = {"gain": "vector"}
    assert not LanguageModel(small_config("[*-]"), blocks={**BLOCKS, "-": Scaled}).layers["0"].mlp.gain.any()


def streamed_and_exported(group: Any, layout: str, directory: str) -> dict[str, Any]:
    """Returns split weights streamed and exported in fp32, before and after another optimizer is set."""
    engine = of_kind("split", layout)
    train(engine, [1, 2, 3])
    before = {name: tensor.clone() for name, tensor in engine.stream_weights(dtype=torch.float32)}
    narrow = {name: tensor.clone() for name, tensor in engine.stream_weights(dtype=torch.bfloat16)}
    assert all(
        torch.equal(tensor, narrow[name].float()) for name, tensor in engine.stream_weights()
    )  # as computed with
    exported = engine.export_hf(f"{directory}/untied", dtype=torch.float32, untied=True)
    other_config = replace(ADAMW, lr=1e-5)
    refusal = error_text(lambda: engine.set_optimizer(SGD(lr=1.0)))
    old_optimizer = engine.optimizer_config, type(engine.optimizer).__name__
    engine.set_optimizer(replace(other_config, offload=False))
    after = {name: tensor.clone() for name, tensor in engine.stream_weights(dtype=torch.float32)}
    engine.save(f"{directory}/checkpoint")  # before the first step of the new one
    fresh = of_kind("split", layout, optimizer=other_config, seed=1)
    fresh.load(f"{directory}/checkpoint")
    resumed = {name: tensor.clone() for name, tensor in fresh.stream_weights(dtype=torch.float32)}
    assert "need AdamW, but" in refusal
    assert old_optimizer == (ADAMW, "ShardedAdamW")
    assert train(engine, [4]) == train(fresh, [4])
    return {"streams": (before, after, resumed), "narrow": narrow, "exported": str(exported)}


@pytest.mark.parametrize("layout", ["", pytest.param("pp=2,tp=2", marks=pytest.mark.thorough)])
def test_split_weights_keep_all_bits_in_streams_exports_and_another_optimizer(
    ranks: Any, tmp_path: Path, layout: str
) -> None:
    for actual in ranks(Layout.parse(layout).world_size, streamed_and_exported, layout, str(tmp_path)):
        before, *later_streams = actual["streams"]
        assert any(not torch.equal(tensor, tensor.bfloat16().float()) for tensor in before.values())
        for name, tensor in before.items():
            gap = (tensor - actual["narrow"][name].float()).abs()
            assert (gap <= 2.0**-8 * tensor.abs()).all(), name
        assert all(bitwise_equal(before, later) for later in later_streams)
        files = load_file(Path(actual["exported"]) / "model.safetensors")
        assert bitwise_equal({name: files[name] for name in before}, before)
        assert torch.equal(files["lm_head.weight"], before["model.embed_tokens.weight"])


def split_from_files(group: Any, layout: str, source: str, directory: str) -> dict[str, dict[str, Tensor]]:
    """Returns weights in fp32: at the start, of fp32 and split storage; of a split run; and of its checkpoint."""

    def stored(engine: Engine) -> dict[str, Tensor]:
        return {name: tensor.clone() for name, tensor in engine.stream_weights(dtype=torch.float32)}

    options: dict[str, Any] = {"compute_dtype": torch.bfloat16, "optimizer": ADAMW}
    results = {"fp32": stored(build(layout, source, **options))}
    engine = build(layout, source, weights="split", **options)
    results["split"] = stored(engine)
    train(engine, [1, 2])
    engine.save(directory)
    results["trained"] = stored(engine)
    results["model"] = stored(build(layout, directory, **options))
    results["split model"] = stored(build(layout, directory, weights="split", **options))
    halves = load_model(directory, dtype=torch.bfloat16).state_dict()
    results["live halves"], results["halves"] = {}, {}
    for name, tensor in engine.tensors.items():
        results["live halves"][name] = local_shard(tensor)
        results["halves"][name] = halves[name][region(tensor)]
    return results


@pytest.mark.parametrize("layout", ["", "tp=2"])
def test_split_weights_are_fp32_from_files_to_files(ranks: Any, tmp_path: Path, layout: str) -> None:
    hf = config("tiny-dense", num_hidden_layers=2)
    LlamaForCausalLM(hf).save_pretrained(tmp_path / "model")
    size = Layout.parse(layout).world_size
    for weights_of in ranks(size, split_from_files, layout, str(tmp_path / "model"), str(tmp_path / "checkpoint")):
        assert bitwise_equal(weights_of["split"], weights_of["fp32"])
        assert bitwise_equal(weights_of["model"], weights_of["trained"])
        assert bitwise_equal(weights_of["split model"], weights_of["trained"])
        assert bitwise_equal(weights_of["halves"], weights_of["live halves"])
        rounded = {name: tensor.bfloat16().float() for name, tensor in weights_of["trained"].items()}
        assert not bitwise_equal(rounded, weights_of["trained"])
