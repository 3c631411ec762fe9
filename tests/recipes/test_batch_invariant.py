"""A GRPO run with `rollout.batch_invariant`: trainer and generator agree to the bit, so rollout_kl is exactly 0."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from postlude import ranks as started
from postlude.recipes.checks.preflight import LaunchInfo, PreflightError, PreflightInputs, preflight
from postlude.recipes.config.load import ConfigError, load
from postlude.recipes.grpo import GRPOConfig, checks, run

ROWS = "".join(json.dumps({"prompt": f"{a} + {b} = ", "answer": str(a + b)}) + "\n" for a in range(8) for b in range(8))
CONFIG = """
model: tiny-dense
budget: 256
environment: {kind: dataset, path: sums.jsonl, reward: exact, workers: 0}
steps: 2
prompts_per_step: 2
samples_per_prompt: 3
minibatches: 1
sampling: {max_new_tokens: 4, temperature: 0.8}
optimizer: {lr: 1e-3}
rollout: {kind: native, batch_invariant: true}
evaluation: {every: 0}
save_every: 0
export: false
"""


def config_of(directory: Path, *overrides: str) -> GRPOConfig:
    (directory / "sums.jsonl").write_text(ROWS)
    (directory / "grpo.yaml").write_text(CONFIG)
    return load(GRPOConfig, directory / "grpo.yaml", ["--run", str(directory / "run"), *overrides])


def mismatch(directory: Path, device: str, *overrides: str) -> list[dict[str, Any]]:
    """The metrics of a run's steps."""
    config = config_of(directory, *overrides)
    with started(device=device):
        run(config, device)
    rows = [json.loads(line) for line in (config.run / "metrics.jsonl").read_text().splitlines()]
    return [row for row in rows if "rollout_kl" in row]


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("old_logprobs", ["rollout", "recompute"])
def test_in_bfloat16_rollout_kl_is_exactly_zero(tmp_path: Path, device: str, old_logprobs: str) -> None:
    steps = mismatch(tmp_path, device, "--dtype", "bfloat16", "--old_logprobs", old_logprobs)
    assert [step["rollout_kl"] for step in steps] == [0.0] * 2
    if old_logprobs == "recompute":
        assert [step["rollout_logprob_diff_max"] for step in steps] == [0.0] * 2
    else:
        assert [(step["ratio"], step["ratio_max"]) for step in steps] == [(1.0, 1.0)] * 2


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_without_the_mode_bfloat16_differs(tmp_path: Path, device: str) -> None:
    steps = mismatch(tmp_path, device, "--dtype", "bfloat16", "--rollout.batch_invariant", "false")
    assert all(step["rollout_kl"] > 0.0 for step in steps)


@pytest.mark.parametrize(
    ("overrides", "why"),
    [
        (("--model", "tiny-hybrid"), "has 'M' (Mamba)"),
        (("--layout", "tp=2"), "batch_invariant needs tp=1, but tp is 2"),
        (("--rollout.kv_cache_dtype", "fp8"), "batch_invariant is not possible with rollout.kv_cache_dtype=fp8"),
        (("--lora.rank", "4"), "batch_invariant is not possible with lora=LoRA(rank=4"),
    ],
)
def test_preflight_refuses_what_depends_on_the_batch(tmp_path: Path, overrides: tuple[str, ...], why: str) -> None:
    config = config_of(tmp_path, *overrides)
    ranks = config.layout.world_size
    with pytest.raises(PreflightError, match="batch_invariant") as raised:
        preflight(checks(PreflightInputs(config, LaunchInfo(ranks=ranks))))
    assert why in str(raised.value)


@pytest.mark.parametrize("kind", ["vllm", "generators"])
def test_servers_do_not_have_the_mode(tmp_path: Path, kind: str) -> None:
    with pytest.raises(ConfigError, match="batch_invariant"):
        config_of(tmp_path, "--rollout.kind", kind)
