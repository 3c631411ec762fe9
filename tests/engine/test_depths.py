"""Published multi-token prediction: layouts equal one rank; streamed, saved and resumed."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from postlude import Engine, Layout, Recast, load_model
from postlude.hf.read_model import read_model_with_mtp
from postlude.objectives import MTP, SFT
from postlude.verify.cases import Case
from postlude.verify.compare import Report, compare
from tests.engine.training import batch, build
from tests.hf.published import FILE, publish
from tests.meshes import mesh

AHEAD = MTP(objective=SFT(), weight=0.3)


def bitwise_equal(first: dict[str, Tensor], second: dict[str, Tensor]) -> bool:
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


def run_in_layout(group: Any, directory: Path, layout: str) -> tuple[Report | None, dict[str, Tensor]]:
    engine = build(layout, directory, mtp=True)
    streamed = {name: tensor.clone() for name, tensor in engine.stream_weights(dtype=torch.float32)}
    case = Case(directory, layout=Layout.parse(layout), objective="sft")
    return compare(case, mesh=mesh(case.layout)), streamed


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "layout"),
    [
        ("glm4_moe", "tp=2"),
        pytest.param("deepseek_v3", "pp=2", marks=pytest.mark.thorough),
        pytest.param("qwen3_next", "tp=2", marks=pytest.mark.thorough),
        pytest.param("nemotron_h", "ep=2,dp_shard=2", marks=pytest.mark.thorough),
    ],
)
def test_loaded_depths_in_a_layout_equal_one_rank(ranks: Any, name: str, layout: str, tmp_path: Path) -> None:
    published = publish(name, tmp_path, depths=1 if name == "qwen3_next" else 2)
    (report, streamed), (_, also) = ranks(2, run_in_layout, published.directory, layout)
    assert report.passes(1e-5), report.worst
    assert any(gradient.startswith(("mtp.", "model.layers.3.")) for gradient in report.gradients)
    expected = load_file(published.directory / FILE)
    assert bitwise_equal(streamed, expected)
    assert bitwise_equal(also, expected)


def continue_training(group: Any, directory: Path, checkpoint: Path) -> None:
    def step(engine: Engine) -> float:
        loss = engine.forward_backward(batch(1, vocab_size=61), AHEAD).loss
        engine.optimizer_step()
        return loss

    engine = build("", directory, mtp=True)
    step(engine)
    engine.save(checkpoint)
    saved = {name: tensor.clone() for name, tensor in engine.stream_weights(dtype=torch.float32)}
    second_engine = build("", checkpoint, mtp=True)
    assert bitwise_equal(saved, dict(second_engine.stream_weights(dtype=torch.float32)))
    second_engine.load(checkpoint)
    pattern = read_model_with_mtp(directory)[1].pattern
    other_engine = build("", Recast(directory, f"{''.join(pattern.layers)}/{''.join(pattern.mtp[0])}"), mtp=True)
    other_engine.load(checkpoint, recast=True)
    assert not other_engine.new_tensors
    assert step(engine) == step(second_engine) == step(other_engine)


@pytest.mark.slow
def test_checkpoint_keeps_mtp_depths(ranks: Any, tmp_path: Path) -> None:
    published = publish("glm4_moe", tmp_path / "published")
    ranks(1, continue_training, published.directory, tmp_path / "step-1")
    with pytest.warns(UserWarning, match="multi-token prediction"):
        assert not load_model(tmp_path / "step-1").config.pattern.mtp
    assert len(load_model(tmp_path / "step-1", mtp=True).config.pattern.mtp) == 1
