"""`postlude generate`: completions of prompts."""

from __future__ import annotations

import argparse
import json

from postlude.commands.loading import encode, load_generator, read_text, sampling_from_options, warn_of_endless_turns
from postlude.data.chat import Prompt
from postlude.error_output import for_stdout


def run(options: argparse.Namespace) -> None:
    """Prints `--n` completions of each prompt, as text or as lines of JSON."""
    texts = [read_text(text, "prompt") for text in options.prompt or ["-"]]
    if options.system is not None and options.plain:
        raise ValueError("--system is a message, but --plain gives the prompt without a chat template. Leave one out.")
    sampling = sampling_from_options(options)
    generator, tokenizer = load_generator(options)
    chat = not options.plain and bool(tokenizer.chat_template)
    if options.system is not None and not chat:
        raise ValueError(f"--system needs a chat template, but {options.model} has none.")
    if chat:
        warn_of_endless_turns(tokenizer)
    system = [] if options.system is None else [{"role": "system", "content": options.system}]
    prompts: list[Prompt] = [[*system, {"role": "user", "content": text}] if chat else text for text in texts]
    groups = generator.generate([encode(tokenizer, prompt) for prompt in prompts], sampling, n=options.n)
    several = len(texts) * options.n > 1
    for text, group in zip(texts, groups, strict=True):
        for number, completion in enumerate(group):
            if options.json:
                row = {
                    "prompt": text,
                    "number": number,
                    "text": completion.text,
                    "finish_reason": completion.finish_reason,
                    "tokens": completion.tokens,
                    "logprobs": completion.logprobs,
                    "seed": sampling.seed,
                }
                print(for_stdout(json.dumps(row, ensure_ascii=False)), flush=True)
            else:
                if several:
                    print(f"--- {text[:60]!r}, completion {number + 1} of {options.n}")
                print(for_stdout(completion.text or ""), flush=True)
