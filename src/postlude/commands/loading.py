"""What the commands that generate have in common: a model's generator, prompts as tokens, and how to sample."""

from __future__ import annotations

import argparse
import secrets
from typing import Any

import torch

from postlude.data.chat import Encoder, Prompt
from postlude.data.chat_tokenizer import ChatTokenizer
from postlude.generate.generator import Generator
from postlude.generate.sampling_params import SamplingParams
from postlude.hf.load import load_model, load_tokenizer
from postlude.hf.read_model import end_tokens, read_generation
from postlude.world.devices import check_device, default_device


def load_generator(options: argparse.Namespace) -> tuple[Generator, Any]:
    """The generator of MODEL on --device, in --dtype, and its tokenizer."""
    check_device(options.device)
    device = torch.device(options.device or default_device())
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    tokenizer = load_tokenizer(options.model)
    model = load_model(options.model, dtype=options.dtype and getattr(torch, options.dtype), device=device)
    limit = {} if options.max_batch_tokens is None else {"max_batch_tokens": options.max_batch_tokens}
    ends = end_tokens(read_generation(options.model), tokenizer.eos_token_id)
    return Generator(model.eval(), tokenizer, eos_tokens=ends, **limit), tokenizer


def sampling_from_options(options: argparse.Namespace) -> SamplingParams:
    """What the options say. Without --seed no two commands draw alike."""
    return SamplingParams(
        max_new_tokens=options.max_new_tokens,
        temperature=options.temperature,
        top_k=options.top_k,
        top_p=options.top_p,
        min_p=options.min_p,
        stop=tuple(options.stop or ()),
        seed=secrets.randbits(48) if options.seed is None else options.seed,
    )


def encode(tokenizer: ChatTokenizer, prompt: Prompt) -> list[int]:
    """The tokens to go on from: text as it is, messages by the chat template."""
    return Encoder(tokenizer=tokenizer).prompt(prompt)
