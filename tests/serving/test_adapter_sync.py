"""AdapterSync: servers get the model once and then the adapter; failures are detected in the same step."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from postlude import Batch, Engine, Layout, load_model
from postlude.engine import AdamW
from postlude.generate.generator import Generator
from postlude.generate.probe import WeightProbe
from postlude.generate.protocol import Request
from postlude.generate.sampling_params import SamplingParams
from postlude.hf.families import FAMILIES
from postlude.hf.load import byte_tokenizer
from postlude.hf.peft import read_adapter
from postlude.hf.read_peft import from_peft
from postlude.lora import LoRA
from postlude.objectives import SFT
from postlude.recipes.rollouts.server_commands import vllm_lora_rank
from postlude.serving.clients.client import GenerationClient
from postlude.serving.engine import ServerEngine
from postlude.serving.errors import ServerError
from postlude.serving.weights import adapter_sync
from postlude.serving.weights.adapter_sync import POLICY, AdapterSync
from postlude.serving.weights.sync import SyncOptions
from tests.conftest import Ranks
from tests.engine.training import config
from tests.meshes import mesh
from tests.recipes.test_rollout_engine import TinyVLLM
from tests.serving.fake_vllm import Refusal
from tests.serving.test_generation_server import KEY, serving

GREEDY = SamplingParams(max_new_tokens=6, temperature=0.0, ignore_eos=True)
PROMPT = tuple(b"one by one")


class LoRAServer(TinyVLLM):
    """Loads adapters like vLLM. `spoil` may change what it loads: configs, A and B."""

    def __init__(self, *, loads_adapters: bool = True) -> None:
        super().__init__()
        self.loads_adapters = loads_adapters
        self.spoil: Callable[[Any, Any], tuple[Any, Any]] = lambda configs, pairs: (configs, pairs)
        self.applies = True
        self.read = self.read_base
        self.bases = 0

    def read_base(self, directory: str) -> None:
        self.bases += 1
        self.generator = Generator(load_model(directory), self.tokenizer)

    def reply(self, path: str, body: Any) -> Any:
        if path == "/v1/load_lora_adapter":
            if not self.loads_adapters:
                raise Refusal(404, "Not Found")
            if not body:
                raise Refusal(400, "lora_name is missing")
            assert body["load_inplace"]
            model = self.generator.model
            files = read_adapter(body["lora_path"])
            loaded = self.spoil(*from_peft(*files, model.config, FAMILIES[model.config.family or ""]))
            self.generator.load_adapter(body["lora_name"], *loaded)
            return "Success: LoRA adapter 'policy' added successfully."
        return super().reply(path, body)

    def sampled(self, body: dict[str, Any]) -> tuple[list[int], list[float]]:
        drawn, adapter = body["sampling_params"], body["model"] if self.applies and body["model"] != "tiny" else None
        sampling = SamplingParams(
            max_new_tokens=drawn["max_tokens"], temperature=drawn["temperature"], seed=drawn["seed"], ignore_eos=True
        )
        with self.lock:
            ((completion,),) = self.generator.generate([body["token_ids"]], sampling, adapter=adapter)
        return completion.tokens, completion.logprobs


def build(lora: LoRA | None) -> Engine:
    hf = config("tiny-dense", num_hidden_layers=2, tie_word_embeddings=False)
    return Engine(hf, mesh=mesh(Layout()), budget=64, lora=lora, optimizer=AdamW(lr=5e-3))


def train(engine: Engine) -> None:
    engine.forward_backward(Batch([list(PROMPT)]), SFT())
    engine.optimizer_step()


def logprob_difference(engine: Engine, rollouts: ServerEngine) -> float:
    """Returns the largest difference between a completion's log-probs and the engine's."""
    rollouts.submit(Request(PROMPT, GREEDY))
    (finished,) = rollouts.poll(60)
    assert finished.completion is not None, finished.error
    completion = finished.completion
    expected = engine.logprobs(Batch([[*PROMPT, *completion.tokens]])).logprob[0][-len(completion.tokens) :]
    return float((expected - torch.tensor(completion.logprobs)).abs().max())


def synced(group: Any, url: str, run: str, steps: int, rank: int = 4) -> dict[str, Any]:
    engine = build(LoRA(rank=rank, alpha=16.0))
    options = SyncOptions(Path(run), probe=WeightProbe(engine, byte_tokenizer()))
    rollouts = ServerEngine(
        lambda: GenerationClient(url, tokenizer=byte_tokenizer(), api_key=KEY, retries=1, backoff=0.01),
        engine=engine,
        sync=options,
    )
    gaps, sizes, kind = [], [], type(rollouts.sync).__name__
    with closing(rollouts):
        for step in range(steps):
            if step:
                train(engine)
            try:
                rollouts.sync_weights()
            except ServerError as error:
                return {"gaps": gaps, "error": str(error), "kind": kind}
            gaps.append(logprob_difference(engine, rollouts))
            sizes.append(rollouts.take_metrics()["servers/sync_bytes"])
        folder = getattr(rollouts.sync, "_adapter_root", None)
        file_names = sorted(path.name for path in folder.iterdir()) if folder is not None else []
    exists = folder is not None and folder.exists()
    return {"gaps": gaps, "sizes": sizes, "error": "", "kind": kind, "kept": file_names, "left": exists}


def test_vllm_gets_the_model_once_and_then_adapters(ranks: Ranks, tmp_path: Path) -> None:
    with closing(LoRAServer()) as server:
        (actual,) = ranks(1, synced, server.url, str(tmp_path), 3)
        assert server.bases == 1
        assert server.calls.count("/v1/load_lora_adapter") == 4  # one asked whether it loads any
        assert server.generator.adapters.names == (POLICY,)
    assert actual["error"] == ""
    assert max(actual["gaps"]) < 1e-4
    assert len(actual["gaps"]) == 3
    assert len(actual["kept"]) == 1, "only the newest adapter"
    assert not actual["left"], "and none after the run"
    assert actual["kind"] == "AdapterSync"


def test_postlude_server_gets_adapters(ranks: Ranks, tmp_path: Path) -> None:
    model = load_model(config("tiny-dense", num_hidden_layers=2, tie_word_embeddings=False))
    with serving(Generator(model, byte_tokenizer(), eos_tokens=()), key=KEY) as (served, url):
        (actual,) = ranks(1, synced, url, str(tmp_path), 3)
        assert served.generator.adapters.names == (POLICY,)
        assert served.weights.version is not None
        assert served.weights.version.endswith(".2")
    assert actual["error"] == ""
    assert max(actual["gaps"]) < 1e-4
    assert actual["kind"] == "AdapterSync"


@pytest.mark.parametrize("fault", ["keeps the old adapter", "loads it and does not apply it", "has another scale"])
def test_a_wrong_adapter_ends_the_run_in_that_step(ranks: Ranks, tmp_path: Path, fault: str) -> None:
    with closing(LoRAServer()) as server:
        first: list[Any] = []

        def spoil(configs: Any, pairs: Any) -> tuple[Any, Any]:
            if not first:
                first.append(pairs)
                return configs, pairs
            if fault == "keeps the old adapter":
                return configs, first[0]
            server.applies = fault != "loads it and does not apply it"
            scale = 4.0 if fault == "has another scale" else 1.0
            return configs, {name: (scale * a, b) for name, (a, b) in pairs.items()}

        server.spoil = spoil
        (actual,) = ranks(1, synced, server.url, str(tmp_path), 3)
    assert len(actual["gaps"]) == 1
    message = "has other weights than the trainer after it was given those of optimizer step 1"
    old = "has the weights of optimizer step 0 after it was given those of step 1"
    problem = message if fault == "has another scale" else old
    assert f"{server.url} {problem}: its log-probs differ by " in actual["error"]


def test_a_server_without_adapters_gets_merged_weights(ranks: Ranks, tmp_path: Path) -> None:
    with closing(LoRAServer(loads_adapters=False)) as server:
        (actual,) = ranks(1, synced, server.url, str(tmp_path), 2)
        assert server.bases == 2
    assert actual["kind"] == "DiskSync"
    assert max(actual["gaps"]) < 1e-4


def test_launched_vllm_gets_the_lora_rank_of_the_files() -> None:
    assert [vllm_lora_rank(rank) for rank in (1, 4, 16, 17, 300, 512)] == [1, 8, 16, 32, 320, 512]
    with pytest.raises(ValueError, match="the adapters have rank 513, but vLLM takes at most 512"):
        vllm_lora_rank(513)


def synced_with_memory_of(group: Any, url: str, run: str, size: int) -> tuple[bool, float]:
    """Returns whether adapters are in memory, which has so many free bytes, and the difference of the log-probs."""
    adapter_sync.shutil = SimpleNamespace(disk_usage=lambda _: SimpleNamespace(free=size))  # type: ignore[attr-defined]
    engine = build(LoRA(rank=4, alpha=16.0))
    try:
        sync = SyncOptions(Path(run))
        with closing(ServerEngine(lambda: GenerationClient(url), engine=engine, sync=sync)) as rollouts:
            rollouts.sync_weights()
            assert isinstance(rollouts.sync, AdapterSync)
            return rollouts.sync._in_memory is not None, logprob_difference(engine, rollouts)
    finally:
        adapter_sync.shutil = shutil  # type: ignore[attr-defined]


@pytest.mark.parametrize(("size", "in_memory"), [(1 << 30, True), (1 << 10, False)])
def test_adapters_are_in_memory_where_there_is_room(ranks: Ranks, tmp_path: Path, size: int, in_memory: bool) -> None:
    with closing(LoRAServer()) as server:
        ((was_in_memory, difference),) = ranks(1, synced_with_memory_of, server.url, str(tmp_path), size)
    assert (was_in_memory, difference < 1e-4) == (in_memory, True)
