"""FailureState: which calls of an engine are refused after a failed call or an offload."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch.distributed as dist

OFFLOADED = "this engine's weights and optimizer state are in host memory since offload(): call onload() first."


class FailureState:
    """Refuses calls of an engine that an exception has left unusable.

    An objective that is a mean over an unknown column, or over weights that sum to zero, raises before the pass if it
    has `denominators`, and nothing is lost; else after the pass, and the step's gradients are lost: call `zero_grad`,
    and run all batches of the step again.
    After a failed pass on one rank the engine is usable: its stages are rebuilt around the same parameters. If it was
    a `forward_backward`, the step's gradients are lost until `zero_grad`. With several ranks, the others may be
    anywhere: every later call is refused. Make a new engine on every rank, and load the last checkpoint. Weights that
    were partly written (by a step or a load) are refused until a load succeeds. While everything is `offloaded`, every
    call is refused.
    """

    def __init__(self) -> None:
        self.refusal: str | None = None
        self.load_recovers = False
        self.adapter: str | None = None
        """The active adapter; None for the model alone."""
        self.lost_gradients: dict[str | None, str] = {}
        """Why gradients were lost, by adapter."""
        self.offloaded = False

    def check(self, *, gradients: bool = False, load: bool = False, adapter: str | None = None) -> None:
        """Raises RuntimeError if the engine is unusable or offloaded; with `gradients`, if an adapter's are lost.

        `adapter` is by default the active one. With `load`, it accepts an engine that a load makes usable again.
        """
        self.check_on_device()
        if self.refusal is not None and not (load and self.load_recovers):
            raise RuntimeError(self.refusal)
        reason = self.lost_gradients.get(self.adapter if adapter is None else adapter)
        if gradients and reason is not None:
            raise RuntimeError(reason)

    def check_on_device(self) -> None:
        if self.offloaded:
            raise RuntimeError(OFFLOADED)

    def mark_recovered(self, *, weights: bool = False, adapter: str | None = None) -> None:
        """Records that an adapter's gradients were freed (by default the active one), or all `weights` were loaded."""
        self.lost_gradients.pop(self.adapter if adapter is None else adapter, None)
        if weights:
            self.lost_gradients.clear()
            self.refusal = None

    @contextmanager
    def guard_pass(self, call: str, rebuild: Callable[[], None], *, gradients: bool = False) -> Iterator[None]:
        """Records the failure of a pass through the stages; with `gradients`, of one that adds to gradients."""
        self.check(gradients=gradients)
        try:
            yield
        except BaseException as error:
            if dist.get_world_size() > 1:
                self.refusal = (
                    f"this engine's {call} failed ({_describe(error)}), and other ranks may still be in the middle of "
                    "it: make a new engine on every rank, and load its last checkpoint."
                )
                raise
            try:
                rebuild()
            except Exception as second:  # such as a GPU that does not respond any more
                self.refusal = (
                    f"this engine's {call} failed ({_describe(error)}), and its stages could not be rebuilt "
                    f"({_describe(second)}): make a new engine, and load its last checkpoint."
                )
                raise error from second
            if gradients:
                self._lose_gradients(call, error)
            raise

    def raise_loss_error(self, error: Exception | None, call: str, *, gradients: bool = False) -> None:
        """Raises the error of a loss, if there is one, on every rank. The engine stays usable; `gradients` are lost."""
        if error is None:
            return
        if gradients:
            self._lose_gradients(call, error)
        raise error

    def _lose_gradients(self, call: str, error: BaseException) -> None:
        self.lost_gradients[self.adapter] = (
            f"the gradients of this step were lost when {call} failed ({_describe(error)}): "
            "call zero_grad, and run all batches of the step again."
        )

    @contextmanager
    def guard_write(self, call: str) -> Iterator[None]:
        try:
            yield
        except BaseException as error:
            self.load_recovers = call == "load" or dist.get_world_size() == 1
            fix = "load a checkpoint" if self.load_recovers else "make a new engine, and load its last checkpoint"
            self.refusal = f"this engine's {call} failed ({_describe(error)}) with its weights half written: {fix}."
            raise


def _describe(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
