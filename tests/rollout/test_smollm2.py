"""The real SmolLM2-135M-Instruct: greedy answers equal transformers', sampled ones agree with the trainer's forward."""

from __future__ import annotations

import pytest
import torch

from postlude import load_tokenizer
from postlude.rollout.generator import Generator
from postlude.rollout.sampling import Sampling
from tests.hf.test_smollm2 import TEXTS, gguf, ours, theirs  # noqa: F401 - fixtures
from tests.rollout.test_generator import teacher_forced

pytestmark = pytest.mark.slow


def test_greedy_equals_transformers(gguf, ours, theirs) -> None:  # noqa: F811
    tokenizer = load_tokenizer(gguf)
    asked = [tokenizer(text)["input_ids"] for text in TEXTS]
    generator = Generator(ours, tokenizer, max_sequences=2)
    answered = generator.generate(asked, Sampling(max_new_tokens=24, temperature=0.0, ignore_eos=True))
    for prompt, (completion,) in zip(asked, answered, strict=True):
        ids = torch.tensor([prompt])
        expected = theirs.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=24, min_new_tokens=24, do_sample=False
        )[0, len(prompt) :].tolist()
        ends = expected.index(tokenizer.eos_token_id) if tokenizer.eos_token_id in expected else len(expected)
        assert completion.tokens[:ends] == expected[:ends]


def test_logprobs_equal_a_forward_and_a_stop_string_ends_an_answer(gguf, ours) -> None:  # noqa: F811
    tokenizer = load_tokenizer(gguf)
    chat = [{"role": "user", "content": "Name three colours of the rainbow."}]
    prompt = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=True)["input_ids"]
    generator = Generator(ours, tokenizer)
    answered = generator.generate([prompt], Sampling(max_new_tokens=48, temperature=0.7, stop=(".",)), n=4)
    for completion, expected in zip(answered[0], teacher_forced(ours, [prompt], answered, 0.7), strict=True):
        torch.testing.assert_close(torch.tensor(completion.logprobs), expected, rtol=0, atol=1e-4)
        assert completion.text is not None
        if completion.finish_reason == "stop" and "." in tokenizer.decode(completion.tokens):
            assert "." in tokenizer.decode(completion.tokens[-1:])
            assert "." not in completion.text
