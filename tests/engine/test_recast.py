"""Training under another pattern: bit-identical curves from the same weights and the same checkpoint."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig

from postlude import SGD, AdamW, Batch, Engine, Recast, export_hf, load_model
from postlude.model.blocks import MoEConfig
from postlude.objectives import MTP, SFT
from tests.engine.training import assert_refused, bitwise_equal, build, optimizer_state, weights

LLAMA = LlamaConfig(
    vocab_size=41,
    hidden_size=16,
    intermediate_size=24,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    tie_word_embeddings=True,
    initializer_range=0.2,
    pad_token_id=None,
    bos_token_id=None,
    eos_token_id=2,
)
MOE = MoEConfig(experts=4, top_k=2, intermediate_size=12, selection_bias=True, selection_bias_rate=1e-3)
FAST = AdamW(lr=1e-2, weight_decay=0.1, max_grad_norm=0.5)


def batch(step: int) -> Batch:
    generator = torch.Generator().manual_seed(step)
    return Batch([torch.randint(41, (length,), generator=generator) for length in (7, 3, 12)])


def curve(engine: Engine, steps: range, objective: Any = None) -> list[tuple[float, float]]:
    """Returns loss and gradient norm of every step, on repeating batches."""
    results = []
    for step in steps:
        loss = engine.forward_backward(batch(step % 4), objective or SFT()).loss
        results.append((loss, engine.optimizer_step().grad_norm))
    return results


def curves(group: Any, sources: list[Any], steps: int) -> list[list[tuple[float, float]]]:
    return [curve(build("", source, optimizer=FAST), range(steps)) for source in sources]


def continue_in_other_pattern(
    group: Any, directory: str, checkpoint: str, pattern: str, layouts: tuple[str, str]
) -> tuple[Any, ...]:
    """Takes two steps, and two more: in the same engine, and in one of another pattern that loads its checkpoint."""
    first = build(layouts[0], Path(directory), optimizer=FAST)
    curve(first, range(2))
    first.save(checkpoint, extra={"epoch": 1})
    other_engine = build(layouts[1], Recast(Path(directory), pattern), optimizer=FAST, seed=5)
    curve(other_engine, range(7, 8))  # moments of its own, to be forgotten
    extra = other_engine.load(checkpoint, recast=True)
    scores = [engine.logprobs(batch(9)).logprob for engine in (first, other_engine)]
    state = extra, other_engine.step, other_engine.new_tensors
    return *state, curve(first, range(2, 5)), curve(other_engine, range(2, 5)), scores


@pytest.mark.parametrize(
    ("pattern", "layouts", "exact"),
    [("*-*-", ("", ""), True), ("[*-]|[*-]", ("", ""), True), ("*-[*-]", ("tp=2", "pp=2"), False)],
)
@pytest.mark.slow
def test_a_checkpoint_resumes_in_another_grouping_of_blocks(
    ranks: Any, tmp_path: Path, pattern: str, layouts: tuple[str, str], exact: bool
) -> None:
    llama = export_hf(load_model(LLAMA, seed=2), tmp_path / "llama")
    arguments = (str(llama), str(tmp_path / "begun"), pattern, layouts)
    for extra, step, fresh, expected, actual, scores in ranks(1 if exact else 2, continue_in_other_pattern, *arguments):
        assert (extra, step, fresh) == ({"epoch": 1}, 2, ())
        for expected_logprobs, logprobs in zip(*scores, strict=True):
            torch.testing.assert_close(
                logprobs, expected_logprobs, rtol=0 if exact else 1e-5, atol=0 if exact else 1e-6
            )
        if exact:
            assert actual == expected
        else:
            torch.testing.assert_close(torch.tensor(actual), torch.tensor(expected), rtol=1e-4, atol=1e-5)


def continue_with_new_block(group: Any, directory: str, checkpoint: str, later: str) -> tuple[Any, ...]:
    """Loads a checkpoint into a pattern with another block and a depth; continues, saves and resumes."""
    first = build("", Path(directory), optimizer=FAST)
    curve(first, range(3))
    first.save(checkpoint)
    moments = optimizer_state(first)
    source = Recast(Path(directory), "*-[*E]/[*-]", {"E": MOE})
    other_engine = build("", source, optimizer=FAST, mtp=True, seed=5)
    before, objective = other_engine.new_tensors, MTP(objective=SFT(), weight=0.5)
    curve(other_engine, range(7, 8), objective)  # moments of its own, to be forgotten
    drawn = weights(other_engine)
    other_engine.load(checkpoint, recast=True)
    old_weights, loaded, state = weights(first), weights(other_engine), optimizer_state(other_engine)
    curve(other_engine, range(3, 5), objective)
    other_engine.save(later)
    resumed = build("", source, optimizer=FAST, mtp=True, seed=6)
    resumed.load(later)
    curves = [curve(engine, range(5, 8), objective) for engine in (other_engine, resumed)]
    assert curves[0] == curves[1]
    assert bitwise_equal(weights(other_engine), weights(resumed))
    assert bitwise_equal(optimizer_state(other_engine), optimizer_state(resumed))
    assert before == other_engine.new_tensors
    return before, old_weights, drawn, loaded, moments, state


def test_new_tensors_start_without_moments_and_resume_exactly(ranks: Any, tmp_path: Path) -> None:
    llama = export_hf(load_model(LLAMA, seed=2), tmp_path / "llama")
    arguments = (str(llama), str(tmp_path / "begun"), str(tmp_path / "later"))
    fresh, old_weights, drawn, loaded, moments, state = ranks(1, continue_with_new_block, *arguments)[0]
    assert {name.rpartition(".")[0].partition(".")[0] for name in fresh} == {"layers", "mtp"}
    for name in fresh:
        assert torch.equal(loaded[name], drawn[name])
    hf_names = {"layers.0.attention": "model.layers.0.self_attn", "layers.2.attention": "model.layers.1.self_attn"}
    for layer, name in hf_names.items():
        assert torch.equal(loaded[f"{layer}.q_proj.weight"], old_weights[f"{name}.q_proj.weight"])
    assert torch.equal(loaded["layers.1.mlp.up_proj.weight"], old_weights["model.layers.0.mlp.up_proj.weight"])
    assert torch.equal(state["layers.1.mlp.up_proj.weight.exp_avg"], moments["layers.0.mlp.up_proj.weight.exp_avg"])
    steps: dict[str, float] = {name: float(tensor) for name, tensor in state.items() if name.endswith(".step")}
    parameters = {name.removesuffix(".step") for name in steps}
    assert set(fresh) & parameters
    for name in parameters:
        assert steps[f"{name}.step"] == (0.0 if name in fresh else 3.0)
        if name in fresh:
            assert not any(state[f"{name}.{moment}"].any() for moment in ("exp_avg", "exp_avg_sq"))


def refused(group: Any, directory: str, checkpoint: str) -> None:
    engine = build("", Path(directory), optimizer=FAST)
    curve(engine, range(1))
    engine.save(checkpoint)
    other_engine = build("", Recast(Path(directory), "*-*-"), optimizer=FAST)
    wider = LlamaConfig(**{**LLAMA.to_dict(), "vocab_size": 43})

    def load(source: Any, **options: Any) -> Callable[[], Any]:
        return lambda: build("", source, **{"optimizer": FAST, **options}).load(checkpoint, recast=True)

    flat = Recast(LLAMA, "*-*-")
    assert_refused(
        {
            "is of another model: it lacks": lambda: other_engine.load(checkpoint),
            "was saved with AdamW, but this engine has SGD": load(flat, optimizer=SGD()),
            "embedding.weight is (43, 16) in [*-]{2}, but (41, 16) in [*-]{2}: the two differ in more": load(wider),
            "was saved without a critic, but this engine has one": load(flat, critic=True),
        }
    )
    state = Path(checkpoint) / "state.json"
    catalogue = json.loads(state.read_text())
    del catalogue["tensors"]["model/norm.weight"]
    state.write_text(json.dumps(catalogue))
    lacking = "lacks 1 tensor(s) of this model and optimizer, such as model/norm.weight"
    assert_refused({lacking: lambda: other_engine.load(checkpoint, recast=True)})


def test_code_or_weights_that_cannot_be_loaded_are_refused(ranks: Any, tmp_path: Path) -> None:
    llama = export_hf(load_model(LLAMA, seed=2), tmp_path / "llama")
    ranks(1, refused, str(llama), str(tmp_path / "begun"))


def load_sharded(group: Any, layout: str, source: Any) -> dict[str, Tensor]:
    engine = build(layout, source, seed=3)
    return weights(engine)


@pytest.mark.parametrize("layout", ["pp=2", "dp_shard=2,ep=2"])
def test_ranks_load_their_shards_of_a_model_under_another_pattern(ranks: Any, tmp_path: Path, layout: str) -> None:
    llama = export_hf(load_model(LLAMA, seed=2), tmp_path / "llama")
    source = Recast(llama, "[*E]*-/[*-]", {"E": MOE})
    expected = load_model(source, seed=3).state_dict()
    for actual in ranks(2, load_sharded, layout, source):
        assert bitwise_equal(actual, expected)
