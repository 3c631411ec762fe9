"""FP8 products of a model: which layers use them, what is refused, and that the model equals its layers."""

from __future__ import annotations

from dataclasses import replace
from unittest import mock

import pytest
import torch

from postlude import Batch, Engine, LanguageModel, load_model, pack, ranks
from postlude.generate.probe import WeightProbe
from postlude.layout import Stage
from postlude.model.blocks import AttentionConfig, MLPConfig
from postlude.model.fp8 import use_fp8
from postlude.model.parallel import Linear, apply_linears
from postlude.objectives import SFT
from postlude.ops import fp8
from postlude.ops.kernels import capabilities
from postlude.ops.kernels.capabilities import GPUS
from tests.model.small import small_config

SIZES = {
    "hidden_size": 32,
    "blocks": {"*": AttentionConfig(heads=4, kv_heads=1, head_dim=12), "-": MLPConfig(intermediate_size=48)},
}


def in_fp8(model: LanguageModel) -> set[str]:
    return {name for name, layer in model.named_modules() if isinstance(layer, Linear) and layer.fp8 is not None}


def test_only_layers_of_blocks_use_fp8() -> None:
    model = load_model("tiny-hybrid")
    unfit = use_fp8(model, True, tp=1)
    assert unfit == ["layers.3.latent_attention.kv_a_proj", "layers.3.latent_attention.kv_b_proj"]
    other_layers = {name for name, layer in model.named_modules() if isinstance(layer, Linear)} - in_fp8(model)
    kinds = {".".join(name.split(".")[-2:]) for name in other_layers - set(unfit)}
    assert kinds == {"mamba.dt_proj", "gated_delta.a_proj", "gated_delta.b_proj", "moe.router", "0.proj", "head"}
    assert any(name.startswith("mtp.0.") for name in in_fp8(model))


@pytest.mark.parametrize(
    ("layers", "chosen"),
    [("1:-1", {1, 2, 3}), ("::2", {0, 2, 4, "mtp"}), ("0,-1", {0, 4, "mtp"}), (":0", set()), (False, set())],
)
@pytest.mark.parametrize("stages", [1, 2])
def test_chosen_layers_of_the_whole_model_use_fp8(layers: bool | str, chosen: set[int | str], stages: int) -> None:
    """A depth's layers have no numbers, and are chosen with the last layer of the trunk."""
    config = small_config("-[*-]--*/[*-]", **SIZES)
    in_use = set()
    for index in range(stages):
        model = LanguageModel(config, stage=Stage(index, stages))
        use_fp8(model, layers, tp=1)
        in_use |= in_fp8(model)
    assert {"mtp" if name.startswith("mtp") else int(name.split(".")[1]) for name in in_use} == chosen


@pytest.mark.parametrize("layers", ["5", "1:6", "-6", "0,9"])
def test_layers_that_do_not_exist_are_refused(layers: str) -> None:
    model = LanguageModel(small_config("-[*-]--*", **SIZES))
    with pytest.raises(ValueError, match=f"fp8 is '{layers}', but the model's 5 layers are 0 to 4, and none is"):
        use_fp8(model, layers, tp=1)


def test_model_whose_layers_are_all_excluded_equals_bf16_to_the_bit() -> None:
    def step(fp8: bool | str) -> list[torch.Tensor]:
        engine = Engine("tiny-moe", fp8=fp8, compute_dtype=torch.bfloat16)
        engine.forward_backward(Batch([list(b"products in FP8")]), SFT())
        return [parameter.grad for parameter in engine.parameters.values() if parameter.grad is not None]

    with ranks():
        expected, excluded, included = step(False), step(":0"), step("-1")
    assert all(map(torch.equal, excluded, expected))
    assert not all(map(torch.equal, included, expected))


def test_layer_size_not_divisible_by_16_is_not_in_fp8() -> None:
    """Keys and values have 12 features. Queries are multiplied in FP8 beside them."""
    model = LanguageModel(small_config("[*-]", **SIZES))
    assert use_fp8(model, True, tp=1) == ["layers.0.attention.k_proj", "layers.0.attention.v_proj"]
    attention, _ = model.blocks
    rows = torch.randn(5, 32)
    outputs = apply_linears(rows, attention.q_proj, attention.k_proj, attention.v_proj)
    for output, layer in zip(outputs, (attention.q_proj, attention.k_proj, attention.v_proj), strict=True):
        assert torch.equal(output, layer(rows))


def test_a_layout_that_would_change_which_layers_are_in_fp8_is_refused() -> None:
    model = LanguageModel(small_config("[*-]", **SIZES))
    with pytest.raises(
        ValueError, match=r"tp=2 gives each rank 24 of the 48 output features of layers.0.attention.q_proj"
    ):
        use_fp8(model, True, tp=2)


def test_logprobs_change_by_the_rounding_of_fp8() -> None:
    model = load_model("tiny-moe", dtype=torch.float32)
    (microbatch,) = pack([list(b"a packed batch"), list(b"of two")], budget=32)
    exact = model(microbatch).log_softmax(-1)
    use_fp8(model, True, tp=1)
    off = (model(microbatch).log_softmax(-1) - exact).abs().max()
    assert 1e-4 < off < 0.5


@pytest.mark.parametrize(
    ("gpu", "dtype", "sentence"),
    [
        (GPUS["A100"], torch.bfloat16, "needs compute capability 8.9, and A100 has 8.0. Use fp8=False"),
        (GPUS["H200"], torch.float32, "computes in bfloat16 on a GPU, but the compute dtype is float32"),
    ],
)
def test_gpu_without_fp8_is_refused(gpu: capabilities.GPU, dtype: torch.dtype, sentence: str) -> None:
    with mock.patch.object(fp8, "gpu_of", return_value=gpu), pytest.raises(ValueError, match=sentence):
        fp8.check_fp8(torch.device("cuda"), dtype)


@pytest.mark.parametrize("name", ["L40S", "RTX 4090", "H100", "H200", "B200"])
def test_gpus_with_fp8_tensor_cores_are_accepted(name: str) -> None:
    with mock.patch.object(fp8, "gpu_of", return_value=GPUS[name]):
        assert "scaled_mm" in fp8.check_fp8(torch.device("cuda"), torch.bfloat16)
    amd = replace(GPUS[name], name="MI300X")
    with mock.patch.object(torch.version, "hip", "7.0"):
        assert "AMD" in str(capabilities.why_no_fp8(amd))


def test_weight_probe_compares_without_fp8() -> None:
    """Trainers with and without FP8 have the same weights, so the probe of a weight update finds no difference."""
    with ranks():
        scores = [WeightProbe(Engine("tiny-moe", fp8=in_fp8)).score().scores for in_fp8 in (False, True)]
        engine = Engine("tiny-moe", fp8=True)
        batch = Batch([list(b"products in FP8")])
        before, _ = engine.topk(batch, 1)
        WeightProbe(engine).score()
        assert torch.equal(before[0], engine.topk(batch, 1)[0][0])  # and is in FP8 again afterwards
    assert scores[0] == scores[1]


def test_cpu_warns_that_fp8_is_emulated() -> None:
    assert "emulated in fp32, as cpu has none in FP8" in fp8.check_fp8(torch.device("cpu"), torch.float32)
