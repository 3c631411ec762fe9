"""The batch-invariant mode: each row of a result has the same bits, whatever rows are computed with it.

Inside `batch_invariant(True)` every sum has an order that depends on neither the number of rows nor their place:
products (`ops/linear.py`), attention (`ops/attention.py` and its forms for decoding) and the output head. A token's
results then do not depend on its batch, and those of decoding equal those of the trainer's forward. Norms, rotary
embedding and activations compute each row by itself anyway.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any, TypeVar

Result = TypeVar("Result")
# Read in forwards only: backwards run in other threads, and their sums may have any order.
_enabled: ContextVar[bool] = ContextVar("batch_invariant", default=False)


@contextlib.contextmanager
def batch_invariant(enabled: bool) -> Iterator[None]:
    """Selects the mode of the operations inside."""
    token = _enabled.set(enabled)
    try:
        yield
    finally:
        _enabled.reset(token)


def is_batch_invariant() -> bool:
    """Whether operations are batch-invariant here."""
    return _enabled.get()


def bind_batch_invariant(function: Callable[..., Result]) -> Callable[..., Result]:
    """Returns the function bound to the current mode: an activation is recomputed with the bits that it had."""
    enabled = _enabled.get()

    def run(*arguments: Any) -> Result:
        with batch_invariant(enabled):
            return function(*arguments)

    return run


def with_batch_invariance_of_model(forward: Callable[..., Result]) -> Callable[..., Result]:
    """Decorates a method of a model: operations in it are batch-invariant if the model's `batch_invariant` is True."""

    @functools.wraps(forward)
    def run(self: Any, *arguments: Any, **options: Any) -> Result:
        with batch_invariant(self.batch_invariant):
            return forward(self, *arguments, **options)

    return run
