"""`postlude logprobs`: the log-prob of every token of a text."""

from __future__ import annotations

import argparse
from typing import Any

import torch
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from torch import Tensor

from postlude.commands.loading import read_text
from postlude.data import pack
from postlude.hf.load import load_model, load_tokenizer
from postlude.hf.read_model import context_length
from postlude.model import OutputInputs
from postlude.world.devices import check_device, default_device

ROWS_AT_ONCE = 512  # rows of logits in memory at a time


def run(options: argparse.Namespace) -> None:
    """Prints a table of log-prob, entropy and rank of every token."""
    console = Console()
    check_device(options.device)
    device = torch.device(options.device or default_device())
    text = read_text(options.text, "text")
    tokenizer = load_tokenizer(options.model, trust_remote_code=options.trust_remote_code)
    tokens = tokenizer(text)["input_ids"]
    if len(tokens) < 2:
        raise ValueError(
            f"the text has {len(tokens)} token(s), but a log-prob needs one before it; give a longer --text."
        )
    model = load_model(options.model, dtype=options.dtype and getattr(torch, options.dtype), device=device).eval()
    if max(tokens) >= model.config.vocab_size:
        raise ValueError(
            f"the tokenizer gives token {max(tokens)}, but the vocabulary ends at {model.config.vocab_size - 1}; "
            "the two do not belong together."
        )
    limit = options.context_length or context_length(model.config)
    if limit is not None and len(tokens) > limit:
        raise ValueError(
            f"the text has {len(tokens)} tokens, but the context length is {limit}. Shorten it, or raise "
            "--context-length."
        )
    (microbatch,) = pack([tokens], budget=len(tokens))
    with torch.no_grad():
        stats = model(microbatch.to(device), output_processor=_score)
    logprob, entropy, rank = (column.tolist() for column in stats)
    table = Table("#", "token", "log-prob", "entropy", "rank")
    names = [escape(repr(tokenizer.decode([token]))) for token in tokens]
    table.add_row("0", names[0], "", "", "")
    for i, name in enumerate(names[1:]):
        table.add_row(str(i + 1), name, f"{logprob[i]:.4f}", f"{entropy[i]:.4f}", str(rank[i]))
    console.print(table)
    mean = sum(logprob[:-1]) / (len(tokens) - 1)
    console.print(f"mean log-prob {mean:.4f}, perplexity {torch.tensor(-mean).exp().item():.3f}")


def _score(inputs: OutputInputs, context: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Returns log-prob, entropy and rank (1 is the most likely) of the next token at every position, each [T]."""
    targets = inputs.microbatch.targets
    stats = inputs.head.logprobs(inputs.hidden, targets, entropy=True)
    assert stats.entropy is not None
    ranks = []
    for hidden, target in zip(inputs.hidden.split(ROWS_AT_ONCE), targets.split(ROWS_AT_ONCE), strict=True):
        logits = inputs.head.logits(hidden)
        ranks.append((logits > logits.gather(-1, target.clamp_min(0)[:, None])).sum(-1) + 1)
    return stats.logprob, stats.entropy, torch.cat(ranks)
