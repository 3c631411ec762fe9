"""`postlude generate` and `postlude chat`: completions of prompts, and of messages in the terminal."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import replace
from typing import Any

from postlude.commands.loading import encode, load_generator, read_text, sampling_from_options, warn_of_endless_turns
from postlude.data.chat import Prompt
from postlude.error_output import for_stdout
from postlude.generate.generator import Generator
from postlude.generate.protocol import Request
from postlude.generate.sampling_params import SamplingParams
from postlude.generate.session import Session
from postlude.generate.text_stream import TextStream


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


HELP = "/reset clears the conversation, /exit or ctrl-D ends it, ctrl-C stops a reply."


def run_chat(options: argparse.Namespace) -> None:
    """Reads messages line by line, and prints replies as they are generated."""
    sampling = sampling_from_options(options)
    generator, tokenizer = load_generator(options)
    warn_of_endless_turns(tokenizer)
    conversation = Conversation(generator, tokenizer, sampling, options.system)
    interactive = sys.stdin.isatty()
    if interactive:
        print(f"{options.model}: {HELP}")
    while True:
        try:
            message = input("> " if interactive else "").strip()
        except EOFError:
            break
        except KeyboardInterrupt:  # discards the line
            print(f"\n({HELP})")
            continue
        if message == "/exit":
            break
        if message == "/reset":
            conversation.reset()
        elif message.startswith("/"):
            print(f"{message} is not a command: {HELP}")
        elif message:
            try:
                conversation.reply(message)
            except ValueError as error:
                print(f"({error} /reset starts a new conversation.)")
    if interactive:
        print()


class Conversation:
    """The messages so far. For a tokenizer without a chat template, the plain one of `data/chat.py` is used."""

    def __init__(self, generator: Generator, tokenizer: Any, sampling: SamplingParams, system: str | None) -> None:
        self.generator, self.tokenizer, self.sampling = generator, tokenizer, sampling
        self._first = [] if system is None else [{"role": "system", "content": system}]
        self.messages: list[dict[str, str]] = list(self._first)
        self._session = Session(generator)

    def reset(self) -> None:
        self.messages = list(self._first)

    def reply(self, message: str) -> str:
        """Prints the reply to a message as it is generated, and adds both. After ctrl-C, the partial reply is added."""
        messages = [*self.messages, {"role": "user", "content": message}]
        tokens = encode(self.tokenizer, messages)
        sampling = replace(self.sampling, seed=self.sampling.seed + len(messages))  # another seed for each turn
        request_id = self._session.add(Request(tuple(tokens), sampling))
        (state,) = self._session.unfinished(request_id).values()
        text, printed = TextStream(self.tokenizer, sampling.stop), 0
        try:
            while self._session.busy:
                final_text = None
                for finished in self._session.step():
                    if finished.completion is None:
                        raise ValueError(f"the reply failed: {finished.error}")
                    final_text = finished.completion.text
                print(for_stdout(text.add(state.tokens[printed:], final_text)), end="", flush=True)
                printed = len(state.tokens)
        except KeyboardInterrupt:
            self._session = Session(self.generator)  # the old one may be in the middle of a step
            self.generator.release()
            print(" …", end="")
        print()
        self.messages = [*messages, {"role": "assistant", "content": text.text}]
        return text.text
