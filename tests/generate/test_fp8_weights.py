"""FP8 weights: copies used only in generation, made at every update and checked after it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from postlude import load_model
from postlude.engine import AdamW
from postlude.generate.distributed import SyncedGenerator
from postlude.generate.generator import Generator
from postlude.generate.probe import WeightProbe, WeightsDiffer
from postlude.generate.sampling_params import SamplingParams
from postlude.generate.session import Session
from postlude.hf.load import byte_tokenizer
from postlude.model.fp8 import FP8Weights, check_quantization
from postlude.model.parallel import Linear
from postlude.ops.block_fp8 import FP8Weight, round_rows
from postlude.ops.kernels import capabilities
from tests.engine.training import build, config, train
from tests.generate.test_kv_cache_fp8 import assert_alike
from tests.generate.test_scheduler import DEVICES, EagerGenerator, GraphGenerator, dense, hybrid, uneven

GREEDY = SamplingParams(max_new_tokens=5, temperature=0.0)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("pattern", ["*-S-", "M-G-"])
def test_pages_equal_rows_with_fp8_weights(device: str, pattern: str) -> None:
    model = hybrid(pattern).to(device)
    prompt_list, samplings = uneven(4, 30, seed=4, ignore_eos=True)
    actual = GraphGenerator(model, quantization="fp8").generate(prompt_list, samplings)
    assert_alike(actual, EagerGenerator(model, quantization="fp8").generate(prompt_list, samplings))


def test_products_equal_those_of_rounded_tokens_and_weights() -> None:
    """For every linear layer of the blocks, in `forward`, in groups and after an activation."""
    model = dense("cpu")
    fp8_weights, block = FP8Weights(model), model.blocks[1]
    fp8_weights.write()
    hidden, products_by_name = torch.randn(5, model.config.hidden_size), {}
    for name in ("gate_proj", "up_proj", "down_proj"):
        layer = getattr(block, name)
        copy = FP8Weight.like(layer.weight)
        copy.write(layer.weight.detach())
        products_by_name[name] = lambda rows, copy=copy: round_rows(rows) @ copy.rounded(torch.float32).t()
    gated = torch.nn.functional.silu(products_by_name["gate_proj"](hidden)) * products_by_name["up_proj"](hidden)
    expected, plain = products_by_name["down_proj"](gated), block.sublayer(hidden, None)
    with torch.no_grad(), fp8_weights.attached():
        torch.testing.assert_close(block.up_proj(hidden), products_by_name["up_proj"](hidden))
        torch.testing.assert_close(block.sublayer(hidden, None), expected, rtol=1e-3, atol=1e-3)
    assert (plain - expected).abs().max() > 1e-2
    assert torch.equal(block.sublayer(hidden, None), plain)
    linears = [layer for block in model.blocks for layer in block.modules() if isinstance(layer, Linear)]
    assert len(fp8_weights._copies) == len(linears) == 7 * 4
    assert fp8_weights.size_in_bytes > sum(layer.weight.numel() for layer in linears)


def test_fp8_weights_are_used_only_in_generation_after_an_update() -> None:
    model = dense("cpu")
    exact, rounded = Generator(model), Generator(model, quantization="fp8")
    before = exact.generate([[1, 2, 3]], GREEDY)
    first = rounded.generate([[1, 2, 3]], GREEDY)
    assert first[0][0].logprobs != before[0][0].logprobs
    assert exact.generate([[1, 2, 3]], GREEDY) == before
    with rounded.without_fp8():
        assert rounded.generate([[1, 2, 3]], GREEDY) == before
    with torch.no_grad():
        for block in model.blocks:
            for parameter in block.parameters():
                parameter.mul_(1.5)
    assert exact.generate([[1, 2, 3]], GREEDY) != before
    assert "FP8 weights other than those it was given" in rounded.fp8_weights.problem()
    rounded.weights_changed()
    assert rounded.fp8_weights.problem() == ""
    assert rounded.generate([[1, 2, 3]], GREEDY) != first


def test_new_weights_of_a_session_are_rounded() -> None:
    model = dense("cpu")
    session = Session(Generator(model, quantization="fp8"))
    session.generator.generate([[1, 2, 3]], GREEDY)

    def load() -> None:
        with torch.no_grad():
            for block in model.blocks:
                for parameter in block.parameters():
                    parameter.mul_(1.5)

    session.update_weights(load, "2")
    assert session.generator.fp8_weights.problem() == ""
    expected = Generator(model, quantization="fp8").generate([[1, 2, 3]], GREEDY)
    assert session.generator.generate([[1, 2, 3]], GREEDY) == expected


class KeepsOldFP8(SyncedGenerator):
    """Makes FP8 weights only once."""

    def _copy_if_changed(self) -> None:
        if self.engine.step:
            self.generator.weights_changed = lambda: None
        super()._copy_if_changed()


class ScalesFP8(SyncedGenerator):
    """From the second copy on, the scale of one block is doubled."""

    def _copy_if_changed(self) -> None:
        super()._copy_if_changed()
        if self.engine.step:
            _, copy = next(iter(self.generator.fp8_weights._copies.values()))
            copy.scales[0, 0] = 2.0 * copy.scales[0, 0]


class KeepsOldWeights(SyncedGenerator):
    """Keeps the first weights, and rounds those."""

    def _copy(self) -> None:
        if self.copied_step < 0:
            super()._copy()


KINDS = {kind.__name__: kind for kind in (SyncedGenerator, KeepsOldFP8, ScalesFP8, KeepsOldWeights)}


def probed(group: Any, kind: str, dtype: str) -> tuple[list[dict[str, float]], str]:
    """Returns the differences after 0 and 1 small steps, and the error that ended the sampling."""
    hf = config("tiny-dense", num_hidden_layers=1, intermediate_size=128, tie_word_embeddings=False)
    engine = build("pp=1", hf, compute_dtype=getattr(torch, dtype), optimizer=AdamW(lr=1e-5))
    probe = WeightProbe(engine, byte_tokenizer())
    generator = KINDS[kind](engine, byte_tokenizer(), probe=probe, quantization="fp8")
    gaps = []
    for step in range(2):
        if step:
            train(engine, [step])
        try:
            generator.generate([[1, 2, 3], [4, 5]], SamplingParams(max_new_tokens=2))
        except WeightsDiffer as error:
            return gaps, str(error)
        gaps.append(generator.take_metrics())
    return gaps, ""


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_probe_allows_the_rounding_of_fp8(ranks: Any, dtype: str) -> None:
    ((gaps, problem),) = ranks(1, probed, "SyncedGenerator", dtype)
    assert problem == ""
    for gap in gaps:
        assert gap["sync/logprob_diff"] < {"float32": 1e-5, "bfloat16": 0.125}[dtype]
        assert 1e-4 < gap["sync/fp8_logprob_diff"] < 0.5


@pytest.mark.parametrize(
    ("kind", "dtype", "problem"),
    [
        ("KeepsOldFP8", "float32", "has FP8 weights other than those it was given"),
        ("KeepsOldFP8", "bfloat16", "has FP8 weights other than those it was given"),
        ("ScalesFP8", "bfloat16", "has FP8 weights other than those it was given"),
        ("KeepsOldWeights", "float32", "has the weights of optimizer step 0"),
    ],
)
def test_faulty_update_is_detected_after_one_small_step(ranks: Any, kind: str, dtype: str, problem: str) -> None:
    ((gaps, sentence),) = ranks(1, probed, kind, dtype)
    assert len(gaps) == 1
    assert sentence.startswith(f"the native generator of rank 0 {problem}")


def test_unsupported_models_and_gpus_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    dense_config = load_model("tiny-dense").config
    with pytest.raises(ValueError, match=r"layers\.0\.moe has experts, whose weights have no FP8 products here"):
        Generator(load_model("tiny-moe"), quantization="fp8")
    with pytest.raises(ValueError, match="caches latents"):
        Generator(hybrid("+-"), quantization="fp8")
    with pytest.raises(ValueError, match="quantization='awq': give \"fp8\""):
        check_quantization("awq", dense_config, torch.device("cpu"))
    monkeypatch.setattr("postlude.model.fp8.gpu_of", lambda device: capabilities.GPUS["A100"])
    with pytest.raises(ValueError, match=r"need compute capability 8\.9, and A100 has 8\.0\. Leave it out"):
        check_quantization("fp8", dense_config, torch.device("cuda"))
