"""Shared by `postlude generate` and `postlude chat`: the generator, the sampling parameters and the prompt's tokens."""

from __future__ import annotations

import argparse
import logging
import secrets
import sys
from collections.abc import Sequence
from typing import Any

import torch

from postlude.data.chat import Encoder, Prompt
from postlude.data.chat_tokenizer import ChatTokenizer
from postlude.data.turn_encoding import turn_ends
from postlude.generate.generator import Generator
from postlude.generate.sampling_params import SamplingParams
from postlude.hf.load import load_model, load_tokenizer
from postlude.hf.read_model import end_tokens, read_generation_config, read_model
from postlude.model import LanguageModel
from postlude.world.devices import check_device, default_device

LOG = logging.getLogger("postlude")


def load_generator(
    options: argparse.Namespace, limits: Sequence[str] = ("context_length", "max_batch_tokens"), *, empty: bool = False
) -> tuple[Generator, Any]:
    """Returns the generator of MODEL on --device, in --dtype, and its tokenizer; if `empty`, without weights.

    `limits` are options that limit the generator.
    """
    check_device(options.device)
    device = torch.device(options.device or default_device())
    dtype = getattr(torch, options.dtype) if options.dtype else None
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    tokenizer = load_tokenizer(options.model, trust_remote_code=options.trust_remote_code)
    if empty:
        with torch.device("meta"):
            model = LanguageModel(read_model(options.model)[1], dtype=dtype or torch.float32)
        model = model.to_empty(device=device)
    else:
        model = load_model(options.model, dtype=dtype, device=device)
    set_limits = {name: getattr(options, name) for name in limits if getattr(options, name) is not None}
    eos_tokens = end_tokens(read_generation_config(options.model), tokenizer)
    return Generator(model.eval(), tokenizer, eos_tokens=eos_tokens, **set_limits), tokenizer


def warn_of_endless_turns(tokenizer: ChatTokenizer) -> None:
    """Warns if the chat template ends turns with no token, so that a reply may only end at its limit."""
    if not turn_ends(tokenizer):
        LOG.warning(
            "the chat template ends an assistant's turn without a special token, so replies may run on to the limit "
            "of tokens, unless the model writes an end token of generation_config.json. Use a template that ends turns "
            "with a special token, or give stop strings."
        )


def sampling_from_options(options: argparse.Namespace) -> SamplingParams:
    """Returns the sampling parameters of the options. Without --seed, the seed is random."""
    names = ("max_new_tokens", "temperature", "top_k", "top_p", "min_p")
    seed = secrets.randbits(48) if options.seed is None else options.seed
    return SamplingParams(**{name: getattr(options, name) for name in names}, stop=tuple(options.stop or ()), seed=seed)


def read_text(text: str, name: str) -> str:
    """Returns a text of the command line; for "-" a line typed in a terminal, or else all of standard input.

    Raises ValueError if it is empty or not UTF-8.
    """
    if text == "-":
        if sys.stdin.isatty():
            print(f"{name}> ", end="", file=sys.stderr, flush=True)
            text = sys.stdin.readline().removesuffix("\n")
        else:
            text = sys.stdin.read()
        if not text.strip():
            raise ValueError(f"standard input is empty; write the {name} there, or give it with --{name}.")
    try:
        text.encode()
    except UnicodeEncodeError as error:  # bytes that are not UTF-8 became surrogates
        raise ValueError(f"the {name} is not UTF-8 at character {error.start}; convert it.") from error
    return text


def encode(tokenizer: ChatTokenizer, prompt: Prompt) -> list[int]:
    """Returns the tokens of a prompt: of text as it is, of messages formatted by the chat template."""
    return Encoder(tokenizer=tokenizer).prompt(prompt)
