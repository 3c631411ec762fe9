"""`postlude chat`: a conversation with a model in the terminal."""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace
from typing import Any

from postlude.commands.loading import encode, load_generator, sampling_from_options
from postlude.generate.generator import Generator
from postlude.generate.protocol import Request
from postlude.generate.sampling_params import SamplingParams
from postlude.generate.session import Session
from postlude.generate.text_stream import TextStream

HELP = "/reset forgets the conversation, /exit or ctrl-D ends it, ctrl-C ends an answer."


def run(options: argparse.Namespace) -> None:
    """Read what the user says, line by line, and print answers as they come."""
    sampling = sampling_from_options(options)
    generator, tokenizer = load_generator(options)
    talk = Conversation(generator, tokenizer, sampling, options.system)
    shows = sys.stdin.isatty()
    if shows:
        print(f"{options.model}: {HELP}")
    while True:
        try:
            said = input("> " if shows else "").strip()
        except EOFError:
            break
        except KeyboardInterrupt:  # at the prompt there is nothing to end but the line
            print(f"\n({HELP})")
            continue
        if said == "/exit":
            break
        if said == "/reset":
            talk.reset()
        elif said.startswith("/"):
            print(f"{said} is no command: {HELP}")
        elif said:
            try:
                talk.answer(said)
            except ValueError as error:
                print(f"({error} /reset begins anew.)")
    if shows:
        print()


class Conversation:
    """Messages so far. A tokenizer without a chat template gets the plain one of `data/chat.py`."""

    def __init__(self, generator: Generator, tokenizer: Any, sampling: SamplingParams, system: str | None) -> None:
        self.generator, self.tokenizer, self.sampling = generator, tokenizer, sampling
        self._first = [] if system is None else [{"role": "system", "content": system}]
        self.messages: list[dict[str, str]] = list(self._first)
        self._session = Session(generator)

    def reset(self) -> None:
        """Forget all that was said."""
        self.messages = list(self._first)

    def answer(self, said: str) -> str:
        """Print the answer as it comes, and keep it; of one that ctrl-C ends, what there was."""
        asked = [*self.messages, {"role": "user", "content": said}]
        tokens = encode(self.tokenizer, asked)
        sampling = replace(self.sampling, seed=self.sampling.seed + len(asked))  # turns do not repeat each other
        ticket = self._session.add(Request(tuple(tokens), sampling))
        (going_on,) = self._session.progress(ticket).values()
        text, heard = TextStream(self.tokenizer, sampling.stop), 0
        try:
            while self._session.busy:
                done = self._session.step()
                whole = None
                for each in done:
                    if each.completion is None:
                        raise ValueError(f"the answer failed: {each.error}")
                    whole = each.completion.text
                print(text.add(going_on.tokens[heard:], whole), end="", flush=True)
                heard = len(going_on.tokens)
        except KeyboardInterrupt:
            self._session = Session(self.generator)  # a step may have been left in the middle
            self.generator.release()
            print(" …", end="")
        print()
        self.messages = [*asked, {"role": "assistant", "content": text.text}]
        return text.text
