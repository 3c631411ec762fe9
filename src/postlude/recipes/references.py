"""The reference model of a policy: weights that it had, kept on disk for a resume, or another model."""

from __future__ import annotations

import shutil
from typing import Any

from postlude.engine import Engine
from postlude.optimizer import AdamW
from postlude.recipes.run.directory import RunDirectory, checkpoint_step

REFERENCE = "reference"
"""Subdirectory of the run with the weights of the reference; with updates, one for each: reference-000010."""


def reference_name(step: int, every: int) -> str:
    """Returns the subdirectory of the reference that `step` trains with, counted from the first rollout."""
    return f"{REFERENCE}-{step // every * every:06d}" if every else REFERENCE


def prune_references(run: RunDirectory, warm_start_steps: int, every: int) -> None:
    """Deletes references that no checkpoint of the run needs any more. Rank 0 calls it."""
    checkpoints = [checkpoint_step(path) - warm_start_steps - 1 for path in run.checkpoints()]
    trained = [step for step in checkpoints if step >= 0]
    if every and trained:
        oldest = reference_name(min(trained), every)
        for path in run.path.glob(f"{REFERENCE}-*"):
            if path.name < oldest:
                shutil.rmtree(path)


def open_frozen_model(source: str, policy: Engine) -> Engine:
    """Returns a second model in the policy's layout, which is not trained."""
    options = policy.options.for_other_model()
    training: dict[str, Any] = {"optimizer": AdamW(), "weights": "fp32", "overlap": False, "gather_once": False}
    return Engine(source, **vars(options) | training | {"offload_activations": False})
