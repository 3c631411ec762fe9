"""vLLM samples with an adapter trained here: its log-probs equal the trainer's.

Only of dense models: with --enable-lora, vLLM 0.32 on a CPU runs no mixture of experts (its kernels there need Triton).
"""

from __future__ import annotations

import itertools
from collections.abc import Coroutine
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PretrainedConfig, Qwen3Config

from postlude import Batch, Engine, Layout, export_hf, load_model, load_tokenizer
from postlude.engine import AdamW
from postlude.engine.base_weights import adapter_matrices, export_base
from postlude.generate.probe import WeightProbe
from postlude.generate.protocol import Request
from postlude.generate.sampling_params import SamplingParams
from postlude.hf.peft import to_peft, write_adapter
from postlude.lora import LoRA
from postlude.objectives import SFT
from postlude.recipes.rollouts.server_commands import peft_rank, vllm_lora_rank
from postlude.serving.clients.api import SendRequest, ServerAPI
from postlude.serving.clients.client import GenerationClient
from postlude.serving.clients.server_weights import WeightsVersion
from postlude.serving.engine import ServerEngine
from postlude.serving.weights.sync import SyncOptions
from tests.conftest import Ranks
from tests.meshes import mesh
from tests.serving.test_vllm import PROMPTS, SMALL
from tests.serving.vllm_server import vllm

pytestmark = pytest.mark.serving

CLOSE = 1e-5
RANK = 8
CONFIGS: dict[str, PretrainedConfig] = {
    "qwen3": Qwen3Config(**SMALL, initializer_range=0.1, tie_word_embeddings=False),
}
SAMPLING = SamplingParams(max_new_tokens=12, temperature=1.0, ignore_eos=True)


def build(family: str) -> Engine:
    lora = LoRA(rank=RANK, alpha=32.0)
    return Engine(CONFIGS[family], mesh=mesh(Layout()), budget=256, lora=lora, optimizer=AdamW(lr=1e-2))


def sampled(group: Any, family: str, url: str, run: str) -> tuple[list[float], list[float], str]:
    """Compares a server's log-probs with the engine's, and with those without the adapter, at each of 3 steps."""
    engine, tokenizer = build(family), load_tokenizer("tiny-dense")
    assert vllm_lora_rank(peft_rank(engine)) == RANK
    options = SyncOptions(Path(run), probe=WeightProbe(engine, tokenizer))
    rollouts = ServerEngine(lambda: GenerationClient(url, tokenizer=tokenizer), engine=engine, sync=options)
    gaps, moved = [], []
    with closing(rollouts):
        kind = type(rollouts.sync).__name__
        for step in range(3):
            if step:
                engine.forward_backward(Batch(PROMPTS), SFT())
                engine.optimizer_step()
            rollouts.sync_weights()
            for place, prompt in enumerate(PROMPTS):
                rollouts.submit(Request(tuple(prompt), SamplingParams(**{**vars(SAMPLING), "seed": place})))
            finished: list[Any] = []
            while len(finished) < len(PROMPTS):
                finished += rollouts.poll(60)
            completions = [
                finished_completion.completion
                for finished_completion in sorted(
                    finished, key=lambda finished_completion: finished_completion.request_id
                )
            ]
            batch = Batch([prompt + completion.tokens for prompt, completion in zip(PROMPTS, completions, strict=True)])
            for values, adapter in ((gaps, "default"), (moved, None)):
                engine.set_adapter(adapter)
                rows = engine.logprobs(batch).logprob
                engine.set_adapter("default")
                values.append(
                    max(
                        float((row[-len(completion.tokens) :] - torch.tensor(completion.logprobs)).abs().max())
                        for row, completion in zip(rows, completions, strict=True)
                    )
                )
    return gaps, moved, kind


def sampled_with_several(group: Any, family: str, url: str, run: str) -> dict[tuple[str, str], float]:
    """Returns the largest log-prob gap of completions of each adapter, requested together, to each engine."""
    engines = {name: build(family) for name in ("first", "second")}
    for steps, engine in zip((1, 3), engines.values(), strict=True):
        for _ in range(steps):
            engine.forward_backward(Batch(PROMPTS), SFT())
            engine.optimizer_step()
    base, version = Path(run) / "base", "several.0"
    export_base(engines["first"], base)
    with closing(GenerationClient(url, tokenizer=load_tokenizer("tiny-dense"))) as client:
        (server,) = client.connect()
        client.reload(WeightsVersion(str(base), version))
        for name, engine in engines.items():
            configs, pairs = adapter_matrices(engine)
            path = Path(run) / name
            write_adapter(path, *to_peft(pairs, configs, engine.config, engine.family, blocks=engine.block_types))

            def load(
                api: ServerAPI, send: SendRequest, name: str = name, path: Path = path
            ) -> Coroutine[Any, Any, None]:
                return api.load_adapter(send, name, str(path), version)

            client.run(server.call(load))
        owners = {
            client.submit(Request(tuple(prompt), replace(SAMPLING, seed=place), adapter=name)): (name, prompt)
            for place, prompt in enumerate(PROMPTS)
            for name in engines
        }
        finished: list[Any] = []
        while len(finished) < len(owners):
            finished += client.poll(60)
    gaps = dict.fromkeys(itertools.product(engines, engines), 0.0)
    for result in finished:
        name, prompt = owners[result.request_id]
        tokens, logprobs = result.completion.tokens, torch.tensor(result.completion.logprobs)
        for other, engine in engines.items():
            row = engine.logprobs(Batch([prompt + tokens])).logprob[0][-len(tokens) :]
            gaps[name, other] = max(gaps[name, other], float((row - logprobs).abs().max()))
    return gaps


@pytest.mark.parametrize("family", CONFIGS)
def test_log_probs_with_an_adapter_equal_the_trainer(
    ranks: Ranks, family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_ALLOW_RUNTIME_LORA_UPDATING", "1")
    directory = tmp_path / "model"
    export_hf(load_model(CONFIGS[family]), directory)
    load_tokenizer("tiny-dense").save_pretrained(directory)
    flags = ("--enable-lora", "--max-loras", "3", "--max-lora-rank", str(RANK))
    flags += ("--logprobs-mode", "processed_logprobs")
    with vllm(directory, tmp_path, *flags) as url:
        ((gaps, moved, kind),) = ranks(1, sampled, family, url, str(tmp_path / "run"))
        (several,) = ranks(1, sampled_with_several, family, url, str(tmp_path / "several"))
    print(f"{family}: gaps {gaps}, without the adapter {moved}")
    assert kind == "AdapterSync"
    assert max(gaps) < CLOSE
    assert min(moved[1:]) > 1e-2
    print(f"two adapters at once: {several}")
    for (name, other), gap in several.items():
        assert gap < CLOSE if name == other else gap > 1e-2
