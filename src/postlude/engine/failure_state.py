"""FailureState: whether an engine is whole after a call that failed, and what it refuses while it is not."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch.distributed as dist


class FailureState:
    """What is left of an engine after an exception, in three kinds.

    A failed pass on one rank leaves it whole: its stages are made anew around the same parameters. If it was a
    `forward_backward`, the step's gradients are lost, and only `zero_grad` makes room for new ones. With more ranks
    nobody knows where the others are: every later call is refused. Weights that were half written (by a step or a load)
    are refused until a load is done.
    """

    def __init__(self) -> None:
        self.refusal: str | None = None
        self.mended_by_load = False
        self.lost_gradients: str | None = None

    def check(self, *, gradients: bool = False, load: bool = False) -> None:
        """Refuse, in a sentence, what needs an engine that is whole, and `gradients` that are."""
        if self.refusal is not None and not (load and self.mended_by_load):
            raise RuntimeError(self.refusal)
        if gradients and self.lost_gradients is not None:
            raise RuntimeError(self.lost_gradients)

    def mended(self, *, weights: bool = False) -> None:
        """Gradients were let go of, or all `weights` written."""
        self.lost_gradients = None
        if weights:
            self.refusal = None

    @contextmanager
    def passing(self, call: str, rebuild: Callable[[], None], *, gradients: bool = False) -> Iterator[None]:
        """Around passes through the stages, which add to the `gradients` or leave them alone."""
        self.check(gradients=gradients)
        try:
            yield
        except BaseException as error:
            if dist.get_world_size() > 1:
                self.refusal = (
                    f"this engine's {call} failed ({_said(error)}), and other ranks may still be in the middle of it: "
                    "make a new engine on every rank, and load its last checkpoint."
                )
                raise
            try:
                rebuild()
            except Exception as another:  # such as a GPU that has stopped answering
                self.refusal = (
                    f"this engine's {call} failed ({_said(error)}), and its stages could not be made anew "
                    f"({_said(another)}): make a new engine, and load its last checkpoint."
                )
                raise error from another
            if gradients:
                self._lose_gradients(call, error)
            raise

    def refuse(self, error: Exception | None, call: str, *, gradients: bool = False) -> None:
        """Raise what all ranks refused once they were through a pass: the engine is whole, its `gradients` are not."""
        if error is None:
            return
        if gradients:
            self._lose_gradients(call, error)
        raise error

    def _lose_gradients(self, call: str, error: BaseException) -> None:
        self.lost_gradients = (
            f"the gradients of this step were lost when {call} failed ({_said(error)}): "
            "call zero_grad, and run all batches of the step again."
        )

    @contextmanager
    def writing(self, call: str) -> Iterator[None]:
        """Around a change of all weights and the optimizer's state."""
        try:
            yield
        except BaseException as error:
            self.mended_by_load = call == "load" or dist.get_world_size() == 1
            mend = "load a checkpoint" if self.mended_by_load else "make a new engine, and load its last checkpoint"
            self.refusal = f"this engine's {call} failed ({_said(error)}) with its weights half written: {mend}."
            raise


def _said(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
