"""GRPO with `rollout.batch_invariant`: trainer and generator agree bit for bit, so rollout_kl is exactly 0."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from postlude import load_tokenizer
from postlude import ranks as started
from postlude.hf.export import export_hf
from postlude.hf.load import load_model
from postlude.hf.read_model import read_description
from postlude.recipes import evaluation
from postlude.recipes.checks.preflight import LaunchInfo, PreflightError, PreflightInputs, preflight
from postlude.recipes.config.load import ConfigError, load
from postlude.recipes.config.recipe_configs import EvalConfig
from postlude.recipes.grpo import GRPOConfig, GRPOTrainer
from postlude.recipes.registry import RECIPES
from postlude.recipes.run.runtime import LOCAL_RUNTIME
from postlude.recipes.sequence_limit import SequenceLimit
from tests.conftest import Ranks
from tests.rollout import functions

ROWS = "".join(json.dumps({"prompt": f"{a} + {b} = ", "answer": str(a + b)}) + "\n" for a in range(8) for b in range(8))
CONFIG = f"""
model: tiny-dense
budget: 256
environment: {{kind: dataset, path: sums.jsonl, reward: "{functions.__file__}:ascii_share", workers: 0}}
steps: 2
prompts_per_step: 2
samples_per_prompt: 3
minibatches: 1
sampling: {{max_new_tokens: 4, temperature: 0.8}}
optimizer: {{lr: 1e-3}}
rollout: {{kind: native, batch_invariant: true}}
evaluation: {{every: 0}}
save_every: 0
export: false
"""


def config_of(directory: Path, *overrides: str) -> GRPOConfig:
    (directory / "sums.jsonl").write_text(ROWS)
    (directory / "grpo.yaml").write_text(CONFIG)
    return load(GRPOConfig, directory / "grpo.yaml", ["--run", str(directory / "run"), *overrides])


@pytest.fixture(scope="module")
def one_layer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """tiny-dense with one layer and a narrow MLP: some CPUs need 50 ms for a small product in bfloat16."""
    directory, hf = tmp_path_factory.mktemp("model"), read_description("tiny-dense")
    hf.num_hidden_layers, hf.intermediate_size = 1, 64
    export_hf(load_model(hf), directory, tokenizer=load_tokenizer("tiny-dense"))
    return directory


def mismatch(directory: Path, model: Path | str, device: str, *overrides: str) -> list[dict[str, Any]]:
    """Returns the metrics of a run's steps."""
    config = config_of(directory, "--model", str(model), "--dtype", "bfloat16", *overrides)
    with started(device=device):
        RECIPES["grpo"].run(config, device)
    rows = [json.loads(line) for line in (config.run / "metrics.jsonl").read_text().splitlines()]
    assert rows[0]["grad_norm"] > 0.0, "the weights of the second step are others"
    return [row for row in rows if "rollout_kl" in row]


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("old_logprobs", ["rollout", "recompute"])
def test_in_bfloat16_rollout_kl_is_exactly_zero(
    tmp_path: Path, one_layer: Path, device: str, old_logprobs: str
) -> None:
    steps = mismatch(tmp_path, one_layer, device, "--old_logprobs", old_logprobs)
    assert [step["rollout_kl"] for step in steps] == [0.0] * 2
    if old_logprobs == "recompute":
        assert [step["rollout_logprob_diff_max"] for step in steps] == [0.0] * 2
    else:
        assert [(step["ratio"], step["ratio_max"]) for step in steps] == [(1.0, 1.0)] * 2


def trained(group: Any, directory: str, *overrides: str) -> list[float]:
    config = load(GRPOConfig, Path(directory) / "grpo.yaml", ["--run", f"{directory}/run", *overrides])
    RECIPES["grpo"].run(config)
    rows = [json.loads(line) for line in (config.run / "metrics.jsonl").read_text().splitlines()]
    return [row["rollout_kl"] for row in rows if "rollout_kl" in row]


@pytest.mark.slow
@pytest.mark.thorough
def test_rollout_kl_is_exactly_zero_with_sharded_weights(ranks: Ranks, tmp_path: Path) -> None:
    """Two ranks gather the weights that the trainer multiplies with."""
    config_of(tmp_path)  # writes the files
    for kl in ranks(2, trained, str(tmp_path), "--dtype", "bfloat16", "--layout", "dp_shard=2"):
        assert kl == [0.0] * 2


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_bfloat16_differs_without_batch_invariant(tmp_path: Path, device: str) -> None:
    """Uses all layers of the model: in one, few roundings differ on a CPU that multiplies in bfloat16."""
    steps = mismatch(tmp_path, "tiny-dense", device, "--rollout.batch_invariant", "false")
    assert all(step["rollout_kl"] > 0.0 for step in steps)


@pytest.mark.parametrize(
    ("overrides", "reason"),
    [
        (("--model", "tiny-hybrid"), "has 'M' (Mamba)"),
        (("--layout", "tp=2"), "batch_invariant needs tp=1, but tp is 2"),
        (("--rollout.kv_cache_dtype", "fp8"), "batch_invariant is not possible with rollout.kv_cache_dtype=fp8"),
        (("--head.backend", "logits"), "batch_invariant is not possible with head.backend=logits"),
        (("--lora.rank", "4"), "batch_invariant is not possible with lora=True"),
    ],
)
def test_preflight_refuses_options_that_depend_on_the_batch(
    tmp_path: Path, overrides: tuple[str, ...], reason: str
) -> None:
    config = config_of(tmp_path, *overrides)
    ranks = config.layout.world_size
    with pytest.raises(PreflightError, match="batch_invariant") as raised:
        preflight(GRPOTrainer.checks(PreflightInputs(config, LaunchInfo(ranks=ranks))))
    assert reason in str(raised.value)


def test_evaluation_supports_batch_invariant(tmp_path: Path) -> None:
    config_of(tmp_path)
    (tmp_path / "eval.yaml").write_text(
        "model: tiny-dense\nbudget: 256\nenvironment: {kind: dataset, path: sums.jsonl, reward: exact, workers: 0}\n"
        "tasks: 3\nsampling: {max_new_tokens: 3}\nrollout: {kind: native, batch_invariant: true}\n"
    )
    config = load(EvalConfig, tmp_path / "eval.yaml", ["--run", str(tmp_path / "evaluated")])
    assert "batch_invariant" in preflight(evaluation.checks(PreflightInputs(config, LaunchInfo())))
    with started():
        tokenizer, limit = load_tokenizer("tiny-dense"), SequenceLimit(config.budget)
        assert evaluation._make_engine(config, tokenizer, "cpu", limit, LOCAL_RUNTIME).model.batch_invariant


@pytest.mark.parametrize("kind", ["vllm", "generators"])
def test_servers_refuse_batch_invariant(tmp_path: Path, kind: str) -> None:
    with pytest.raises(ConfigError, match="batch_invariant"):
        config_of(tmp_path, "--rollout.kind", kind)
