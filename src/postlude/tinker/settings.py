"""WorkerSettings: what the ranks of one base model are started with."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from postlude.layout import Layout


@dataclass(frozen=True, kw_only=True)
class WorkerSettings:
    """A base model and how its ranks train and sample it."""

    name: str
    """As clients name it."""
    source: str
    """A model directory, a GGUF file or a built-in name."""
    layout: Layout = field(default_factory=Layout)
    trust_remote_code: bool = False
    """Whether Python files of the model's directory may run as its tokenizer."""
    dtype: str | None = None
    """The compute dtype, such as "bfloat16"; by default bfloat16 on a GPU and float32 on the CPU."""
    device: str | None = None
    budget: int = 8192
    """The most tokens of a microbatch, and of a sequence, in training."""
    max_batch_tokens: int = 65_536
    """The size of the KV cache in sampling."""
    max_sequences: int = 256
    """The most completions that run at once."""
    scratch: Path | None = None
    """Where rank 0 keeps snapshots of all weights of a model; by default the directory of temporary files."""
    ray: str | None = None
    """The address of the Ray cluster that the ranks run on, "local" for a new one; None runs them without Ray."""
    timeout: float = 600.0
    """Seconds after which a collective of the ranks fails, or a wait for the cluster's resources."""


def parse_model(text: str) -> tuple[str, str]:
    """Returns the name and the source of MODEL, or of NAME=MODEL."""
    name, equals, source = text.partition("=")
    if equals and not (name and source):
        raise ValueError(f"{text!r} lacks a name or a model: write NAME=MODEL, or MODEL alone.")
    return (name, source) if equals else (text, text)
