"""After a weight sync the native generator's log-probs equal the trainer's, or no completion is sampled."""

from __future__ import annotations

import random
import re
from dataclasses import replace
from typing import Any

import pytest
import torch

from postlude import ranks as started
from postlude.engine import AdamW, Engine
from postlude.engine.base_weights import adapter_matrices
from postlude.generate.distributed import POLICY, SyncedGenerator
from postlude.generate.probe import POSITIONS, Probe, TrainerScores, WeightProbe, WeightsDiffer, probe_tokens
from postlude.generate.protocol import Completion
from postlude.generate.sampling_params import SamplingParams
from postlude.hf.load import byte_tokenizer
from postlude.lora import LoRA
from tests.engine.training import build, config, train

SAMPLING = SamplingParams(max_new_tokens=2)
SMALL_STEPS = AdamW(lr=1e-5)


class KeepsOldWeights(SyncedGenerator):
    """Keeps the first weights."""

    def _copy_if_changed(self) -> None:
        self.first = getattr(self, "first", None) or {}
        super()._copy_if_changed()
        for name, parameter in self.model.named_parameters():
            parameter.data.copy_(self.first.setdefault(name, parameter.detach().clone()))


class ScalesOneMatrix(SyncedGenerator):
    """On the last rank, one matrix of the second copy is 1 % too large."""

    def _copy_if_changed(self) -> None:
        copied = self.copied_step
        super()._copy_if_changed()
        last = torch.distributed.get_rank() == torch.distributed.get_world_size() - 1
        if self.copied_step != copied >= 0 and last:
            self.model.get_parameter("layers.0.attention.q_proj.weight").data.mul_(1.01)


class KeepsOldAdapter(SyncedGenerator):
    """Keeps the first adapter."""

    def _copy(self) -> None:
        if self.adapter is None:
            super()._copy()


class IgnoresAdapter(SyncedGenerator):
    """From the second sync on, the adapter is loaded but not applied."""

    def _copy(self) -> None:
        super()._copy()
        if self.engine.step:
            self.adapter = None


class ScalesAdapter(SyncedGenerator):
    """From the second sync on, the scale of the adapter is alpha instead of alpha / rank."""

    def _copy(self) -> None:
        super()._copy()
        if self.engine.step:
            configs, pairs = adapter_matrices(self.engine)
            scaled = {name: replace(config, scale=config.scale * config.rank) for name, config in configs.items()}
            self.generator.load_adapter(POLICY, scaled, pairs)


KINDS = {
    kind.__name__: kind
    for kind in (
        SyncedGenerator,
        KeepsOldWeights,
        ScalesOneMatrix,
        KeepsOldAdapter,
        IgnoresAdapter,
        ScalesAdapter,
    )
}


def probed(group: Any, kind: str, model: str, layout: str, dtype: str) -> tuple[list[float], str]:
    """Returns the log-prob differences after 0, 1 and 2 small steps, and the error that ended the sampling."""
    hf = config(model, num_hidden_layers=2, intermediate_size=96, tie_word_embeddings=False)
    return sampled(kind, build(layout, hf, compute_dtype=getattr(torch, dtype), optimizer=SMALL_STEPS))


def sampled(kind: str, engine: Engine) -> tuple[list[float], str]:
    generator = KINDS[kind](engine, byte_tokenizer(), probe=WeightProbe(engine, byte_tokenizer()))
    differences = []
    for step in range(3):
        if step:
            train(engine, [step])
        try:
            generator.generate([[1, 2, 3], [4, 5]], SAMPLING)
        except WeightsDiffer as error:
            return differences, str(error)
        differences.append(generator.take_metrics()["sync/logprob_diff"])
    return differences, ""


@pytest.mark.parametrize(
    ("model", "layout", "dtype"),
    [
        ("tiny-dense", "pp=1", "float32"),
        ("tiny-moe", "pp=1", "bfloat16"),
        ("tiny-dense", "pp=2", "bfloat16"),
        pytest.param("tiny-moe", "tp=2", "float32", marks=pytest.mark.thorough),
        pytest.param("tiny-dense", "cp=2", "float32", marks=pytest.mark.thorough),
    ],
)
def test_generator_with_the_trainers_weights_passes(ranks: Any, model: str, layout: str, dtype: str) -> None:
    for differences, problem in ranks(int(layout[-1]), probed, "SyncedGenerator", model, layout, dtype):
        assert problem == ""
        assert len(differences) == 3
        assert max(differences) < {"float32": 1e-5, "bfloat16": 0.125}[dtype]


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["SyncedGenerator", "KeepsOldWeights"])
def test_old_weights_are_distinguished_from_bf16_rounding_on_gpu(kind: str) -> None:
    with started(device="cuda"):
        differences, problem = sampled(
            kind, Engine(config("tiny-moe", num_hidden_layers=2), budget=64, optimizer=SMALL_STEPS)
        )
    assert (len(differences), bool(problem)) == ((3, False) if kind == "SyncedGenerator" else (1, True))


@pytest.mark.parametrize(("layout", "dtype"), [("pp=1", "float32"), ("dp_shard=2", "bfloat16")])
def test_old_weights_are_detected_after_one_small_step(ranks: Any, layout: str, dtype: str) -> None:
    for differences, problem in ranks(int(layout[-1]), probed, "KeepsOldWeights", "tiny-dense", layout, dtype):
        assert len(differences) == 1
        assert problem.startswith(
            "the native generator of rank 0 has the weights of optimizer step 0 after it was given those of step 1: "
            "its log-probs differ by "
        )


@pytest.mark.parametrize("layout", ["pp=1", "dp_shard=2"])
def test_wrongly_scaled_matrix_is_detected_on_any_rank(ranks: Any, layout: str) -> None:
    size = int(layout[-1])
    for differences, problem in ranks(size, probed, "ScalesOneMatrix", "tiny-dense", layout, "float32"):
        assert len(differences) == 1
        assert problem.startswith(
            f"the native generator of rank {size - 1} has other weights than the trainer after it was given those of "
            "optimizer step 1: its log-probs differ by "
        )


def probed_adapter(group: Any, kind: str, model: str, layout: str, dtype: str) -> tuple[list[float], str]:
    """Like `probed`, for an engine with adapters."""
    hf = config(model, num_hidden_layers=2, tie_word_embeddings=False)
    options: dict[str, Any] = {"compute_dtype": getattr(torch, dtype), "optimizer": AdamW(lr=2e-3)}
    return sampled(kind, build(layout, hf, lora=LoRA(rank=4, alpha=16.0), **options))


@pytest.mark.parametrize(
    ("model", "layout", "dtype"),
    [
        ("tiny-dense", "pp=1", "float32"),
        ("tiny-moe", "tp=2", "float32"),
        pytest.param("tiny-moe", "pp=2", "bfloat16", marks=pytest.mark.thorough),
    ],
)
def test_generator_with_the_trainers_adapter_passes(ranks: Any, model: str, layout: str, dtype: str) -> None:
    for differences, problem in ranks(int(layout[-1]), probed_adapter, "SyncedGenerator", model, layout, dtype):
        assert problem == ""
        assert len(differences) == 3
        assert max(differences) < {"float32": 1e-5, "bfloat16": 0.125}[dtype]


@pytest.mark.parametrize(
    ("kind", "begins"),
    [
        ("KeepsOldAdapter", "has the weights of optimizer step 0 after it was given those of step 1: its log-probs"),
        # A new adapter changes nothing, so a model without one is that of step 0.
        ("IgnoresAdapter", "has the weights of optimizer step 0 after it was given those of step 1: its log-"),
        ("ScalesAdapter", "has other weights than the trainer after it was given those of optimizer step 1: its log-"),
    ],
)
def test_wrong_adapter_is_detected_in_the_same_step(ranks: Any, kind: str, begins: str) -> None:
    for differences, problem in ranks(1, probed_adapter, kind, "tiny-dense", "pp=1", "float32"):
        assert len(differences) == 1
        assert problem.startswith(f"the native generator of rank 0 {begins}")
        assert re.search(r"differ by [0-9.e-]+", problem)


def replies(*logprobs: float, token: int = 7) -> list[Completion]:
    return [Completion([token], [logprob], [logprob], "length") for logprob in logprobs]


def probe(*versions: list[float], limit: float = 0.1) -> Probe:
    """Returns each version's log-probs of token 7, with token 8 well below it."""
    scores = [
        TrainerScores(step, [{7: logprob, 8: logprob - 3.0} for logprob in version])
        for step, version in enumerate(versions)
    ]
    return Probe([], scores[-1], scores[:-1], limit)


def test_one_rerouted_token_passes_and_many_fail() -> None:
    new = [-2.0] * POSITIONS
    result = probe(new).compare(replies(-1.0, *[-2.01] * (POSITIONS - 1)))
    assert result.problem == ""
    assert result.logprob_diff < 0.05
    three_differ = probe(new).compare(replies(*[-0.5] * 3, *[-2.01] * (POSITIONS - 3)))
    assert "has other weights than the trainer" in three_differ.problem
    assert three_differ.logprob_diff == pytest.approx((3 * 1.5 + 5 * 0.01) / POSITIONS / 4)


def test_token_outside_the_top_k_uses_a_lower_bound() -> None:
    new = [-2.0] * POSITIONS  # and -5 for the other token
    assert probe(new).compare(replies(*[-1.0] * POSITIONS, token=9)).logprob_diff == 4.0
    assert probe(new).compare(replies(*[-6.0] * POSITIONS, token=9)).logprob_diff == 4.0, (
        "its likeliest is ours, which is -2"
    )


def test_rounding_is_not_reported_as_old_weights() -> None:
    old, new = [-2.0] * POSITIONS, [-2.001] * POSITIONS
    rounded = [logprob + 0.01 * (-1) ** place for place, logprob in enumerate(new)]
    assert probe(old, new).compare(replies(*rounded)).problem == "", "both are as far away as the other"
    assert probe(old, old).compare(replies(*rounded)).problem == "", "a step that changed nothing"
    moved = [-2.05] * POSITIONS
    assert "has the weights of optimizer step 0" in probe(old, new, moved).compare(replies(*old)).problem


def test_rounding_of_many_versions_is_not_reported_as_old_weights() -> None:
    """Small steps: log-probs of all versions, and the sampler's, differ only by independent rounding."""
    source = random.Random(0)

    def rounded() -> list[float]:
        return [-2.0 + source.gauss(0.0, 0.01) for _ in range(POSITIONS)]

    results = [probe(*(rounded() for _ in range(17))).compare(replies(*rounded())) for _ in range(500)]
    assert [result.problem for result in results if result.problem] == []


def test_unchanged_sampler_is_reported_only_if_the_trainer_is_deterministic() -> None:
    old, new = [-2.0] * POSITIONS, [-2.01] * POSITIONS
    before = probe(old).compare(replies(*[-2.02] * POSITIONS))
    later_replies = replies(*[-2.02] * POSITIONS)
    assert probe(old, new).compare(later_replies).problem == "", "nothing is known of the sampler"
    assert "has the weights of optimizer step 0" in probe(old, new).compare(later_replies, before).problem
    assert replace(probe(old, new), repeatable=False).compare(later_replies, before).problem == ""
    assert probe(old, [-2.0001] * POSITIONS).compare(later_replies, before).problem == "", "the step may change nothing"


def test_probe_tokens_exclude_added_tokens() -> None:
    tokenizer = byte_tokenizer()
    tokens = probe_tokens(33, 258, tokenizer)
    assert len(set(tokens)) > 20
    assert not set(tokens) & set(tokenizer.added_tokens_decoder)
    assert probe_tokens(33, 2, None) == probe_tokens(33, 2, None)
    assert max(probe_tokens(33, 2, None)) < 2
