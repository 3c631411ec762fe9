"""Limits: how much a server holds for its clients, and for how long; and checks of what they send.

Token ids and sparse tensors are checked in passes, prompts and OpenAI's routes, with numpy and no torch.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

MIB = 1024**2
MAX_SPARSE = 1 << 27  # values of a sparse tensor once it is dense


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Bounds of one server."""

    body_bytes: int = 64 * MIB
    """The largest request, also after decompression."""
    json_bytes: int = 16 * MIB
    """The largest request in JSON, which is read in one go."""
    body_seconds: float = 300.0
    """How long a request may take to arrive."""
    queued_bytes: int = 1024 * MIB
    """Training requests that wait, of all clients."""
    queued_bytes_per_key: int = 512 * MIB
    """Waiting training requests of one key."""
    queued_per_model: int = 1024
    """Training requests of one model that wait."""
    samples_per_key: int = 4096
    """Sampling requests of one key that are not finished; beyond it a client gets 429 and waits."""
    models: int = 64
    """Models that are trained at the same time."""
    models_per_key: int = 64
    """Models among them of one key."""
    full_models: int = 1
    """Models among them of which all weights are trained; 0 allows adapters only."""
    full_snapshots: int = 4
    """Snapshot samplers of such models, whose weights were not saved with a name: each is a copy on disk."""
    samplers: int = 64
    """Samplers in memory. The one unused for longest is closed; one of a saved path is opened again when it is used."""
    sessions_per_key: int = 1024
    """Open sessions of one key, and finished ones that are kept."""
    finished_seconds: float = 7 * 24 * 3600.0
    """How long a finished session is kept, and its models without checkpoints."""
    num_samples: int = 1024
    """Completions of one sampling request."""
    result_bytes: int = 1024 * MIB
    """Results that clients have not fetched, or fetched a short time ago."""
    poll_seconds: float = 30.0
    """How long `retrieve_future` waits for a result. The client gives up after 45 seconds."""
    fetched_seconds: float = 300.0
    """How long a result is kept after it was fetched: the reply may have been lost, and the client asks again."""
    unfetched_seconds: float = 3600.0
    """How long a result is kept that the client does not fetch."""
    session_seconds: float = 1800.0
    """A session without a heartbeat for this long has expired, and its models are freed."""
    gap_seconds: float = 600.0
    """How long a training request waits for an earlier one that has not arrived."""


def check_tokens(tokens: NDArray[Any], name: str, max_length: int, vocab_size: int) -> NDArray[np.int32]:
    """Returns the tokens of a sequence. Raises a ValueError that begins with `name` if the model cannot take them."""
    if not len(tokens):
        raise ValueError(f"{name} is empty: give at least one token.")
    if len(tokens) > max_length:
        raise ValueError(f"{name} has {len(tokens)} tokens, but the longest sequence here is {max_length}. Shorten it.")
    check_vocabulary(tokens, name, vocab_size)
    return tokens.astype(np.int32, copy=False)


def check_vocabulary(ids: NDArray[Any], name: str, vocab_size: int) -> None:
    """Raises a ValueError if one of the ids is not in the vocabulary."""
    low, high = int(ids.min()), int(ids.max())
    if low < 0 or high >= vocab_size:
        worst = low if low < 0 else high
        raise ValueError(f"{name} has token {worst}, but the vocabulary is 0 to {vocab_size - 1}.")


def dense_from_csr(
    values: NDArray[Any],
    starts: NDArray[np.int64],
    columns: NDArray[np.int64],
    shape: tuple[int, ...],
    name: str,
    empty: int = 0,
) -> NDArray[Any]:
    """Returns a sparse matrix in CSR form with `empty` where it has no entry. Raises ValueError if it is none."""
    counts = np.diff(starts)
    is_valid = len(shape) == 2 and len(starts) == shape[0] + 1 and len(columns) == len(values)
    is_valid = is_valid and starts[0] == 0 and starts[-1] == len(values) and bool((counts >= 0).all())
    is_valid = is_valid and (not len(columns) or (columns.min() >= 0 and columns.max() < shape[1]))
    if not is_valid or math.prod(shape) > MAX_SPARSE:
        raise ValueError(f"{name} is not a sparse matrix of shape {list(shape)} with at most {MAX_SPARSE} cells.")
    dense = np.full(shape, empty, values.dtype)
    dense[np.repeat(np.arange(shape[0]), counts), columns] = values
    return dense


def check_prompt(
    prompt: NDArray[Any], max_tokens: int | None, max_context_length: int, vocab_size: int
) -> NDArray[np.int32]:
    """Returns a prompt after which there is room for `max_tokens`, or for one if that is None."""
    tokens = check_tokens(prompt, "the prompt", max_context_length - 1, vocab_size)
    room = max_context_length - len(tokens)
    if max_tokens is not None and max_tokens > room:
        raise ValueError(
            f"max_tokens is {max_tokens}, but after a prompt of {len(tokens)} tokens the context of "
            f"{max_context_length} has room for {room}. Shorten the prompt, or lower max_tokens."
        )
    return tokens
