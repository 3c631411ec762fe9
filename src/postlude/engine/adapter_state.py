"""The training state of one adapter in a directory of its own: weights, moments and step counts. Any layout loads it.

It is a checkpoint of an engine whose only adapter it is (`checkpoint.py`), without the states of random generators.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from postlude.engine import checkpoint
from postlude.engine.adapters import AdaptedModel


def save_adapter_state(
    engine: AdaptedModel,
    directory: str | os.PathLike[str],
    *,
    name: str | None = None,
    extra: Mapping[str, Any] | None = None,
) -> None:
    """Writes the training state of an adapter, by default the active one, to a new directory. Every rank calls it."""
    engine.failure_state.check()
    writer = checkpoint.CheckpointWriter()
    writer.save(engine, directory, extra, adapter=engine.training_states[engine.adapters.resolve(name)])
    writer.finish()
    writer.close()


def load_adapter_state(
    engine: AdaptedModel, directory: str | os.PathLike[str], *, name: str | None = None
) -> dict[str, Any]:
    """Restores the training state of an adapter, by default the active one. Returns the saved `extra`.

    The name may be another than it was saved under. If there is no such adapter, it is made as it was saved. Its
    gradients are freed. Other adapters and random generators do not change. Every rank calls it.
    """
    engine.failure_state.check()
    return checkpoint.load(engine, directory, adapter=engine.adapters.resolve_or_new(name))
