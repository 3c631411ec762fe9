"""`postlude generate`: answers of a model to prompts."""

from __future__ import annotations

import argparse
import json

from postlude.commands.loading import encode, load_generator, read_text, sampling_from_options
from postlude.data.chat import Prompt


def run(options: argparse.Namespace) -> None:
    """Print `--n` answers to each prompt, as text or as lines of JSON."""
    texts = [read_text(text, "prompt") for text in options.prompt or ["-"]]
    if options.system is not None and options.plain:
        raise ValueError("--system is a message, but --plain gives the prompt without a chat template. Leave one out.")
    sampling = sampling_from_options(options)
    generator, tokenizer = load_generator(options)
    chat = not options.plain and bool(tokenizer.chat_template)
    if options.system is not None and not chat:
        raise ValueError(f"--system needs a chat template, but {options.model} has none.")
    system = [] if options.system is None else [{"role": "system", "content": options.system}]
    prompts: list[Prompt] = [[*system, {"role": "user", "content": text}] if chat else text for text in texts]
    groups = generator.generate([encode(tokenizer, prompt) for prompt in prompts], sampling, n=options.n)
    several = len(texts) * options.n > 1
    for text, group in zip(texts, groups, strict=True):
        for number, answer in enumerate(group):
            if options.json:
                said = {
                    "prompt": text,
                    "number": number,
                    "text": answer.text,
                    "finish_reason": answer.finish_reason,
                    "tokens": answer.tokens,
                    "logprobs": answer.logprobs,
                    "seed": sampling.seed,
                }
                print(json.dumps(said, ensure_ascii=False), flush=True)
            else:
                if several:
                    print(f"--- {text[:60]!r}, answer {number + 1} of {options.n}")
                print(answer.text, flush=True)
