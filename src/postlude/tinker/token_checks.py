"""Checks of token ids and sparse tensors that clients send: in passes, prompts and OpenAI's routes. Numpy, no torch."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

MAX_SPARSE = 1 << 27  # values of a sparse tensor once it is dense


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
