"""Split: the tasks that a run holds out and all tasks of its data, stored in its directory.

A resumed run must hold out the same tasks, and an evaluation of its model leaves out those that it trained on.
"""

from __future__ import annotations

import io
import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np

from postlude.data.task_identity import IDENTITY_BYTES, TaskSet, first_different
from postlude.durable_files import write_atomic
from postlude.recipes.run.directory import is_rank0
from postlude.recipes.run.start_mode import CHECKPOINTS
from postlude.rollout.tasks import PAGE, SplitBy, Task, Tasks, task_identity

FILE = "split.npz"
LOG = logging.getLogger("postlude")


@dataclass(frozen=True)
class Split:
    """Which tasks a run does not train on, and which it knows, by their identities."""

    held_out: frozenset[bytes] = frozenset()
    """The tasks of its evaluation, also of evaluation sets."""
    tasks: frozenset[bytes] = frozenset()
    """All tasks of its data; empty where they are generated, or read as a stream."""
    source: str = ""
    """What generates the tasks, where they are generated."""
    split_by: SplitBy = "prompt"

    @classmethod
    def of_tasks(cls, tasks: Tasks, held_out: Iterable[bytes], split_by: SplitBy = "prompt") -> Split:
        if source := getattr(tasks, "source", ""):  # each may take long to generate
            return cls(frozenset(held_out), source=source, split_by=split_by)
        identities = frozenset(task_identity(tasks[index], split_by) for index in range(len(tasks)))
        return cls(frozenset(held_out), identities, split_by=split_by)

    @classmethod
    def read(cls, run: Path) -> Split | None:
        if not (run / FILE).is_file():
            return None
        try:
            with np.load(run / FILE, allow_pickle=False) as arrays:
                held_out, tasks = (frozenset(map(bytes, arrays[name])) for name in ("held_out", "tasks"))
                return cls(held_out, tasks, str(arrays["source"]), "row" if arrays["split_by"] == "row" else "prompt")
        except (OSError, ValueError, KeyError, EOFError) as error:
            raise ValueError(f"{run / FILE} cannot be read ({error}), so the run's held-out tasks are lost.") from error

    def write(self, run: Path) -> None:
        held_out, tasks = (
            np.frombuffer(b"".join(sorted(identities)), np.uint8).reshape(-1, IDENTITY_BYTES)
            for identities in (self.held_out, self.tasks)
        )
        file = io.BytesIO()
        np.savez(file, held_out=held_out, tasks=tasks, source=self.source, split_by=self.split_by)
        write_atomic(run / FILE, file.getvalue())

    def check_same(self, run: Path) -> None:
        """Raises ValueError if a run that is resumed would hold out other tasks than before."""
        stored = Split.read(run)
        if stored is not None and stored.held_out != self.held_out:
            raise ValueError(
                f"{run} holds out {len(stored.held_out)} tasks, but this start would hold out {len(self.held_out)}, of "
                f"which {len(self.held_out - stored.held_out)} may have been trained on. Restore their number "
                "(evaluation.tasks), the data and what generates it, or begin another run (--run)."
            )

    def untrained(self, tasks: Tasks, count: int, model: str) -> Sequence[Task]:
        """Returns the last `count` different tasks that the run of `model` did not train on."""
        known, generated = self._trained, bool(self.source) and self.source == getattr(tasks, "source", "")
        left_out: list[int] = []

        def candidates() -> Iterable[tuple[int, bytes]]:
            for index in reversed(range(len(tasks))):
                identity = task_identity(tasks[index], self.split_by)
                if identity in self._held_out or not (generated or identity in known):
                    yield index, identity
                else:
                    left_out.append(index)
                    if generated and len(left_out) == PAGE:
                        return  # those held out are the last ones

        chosen, _ = first_different(candidates(), count)
        if not chosen:
            raise ValueError(
                f"{model} was trained on all of the {len(tasks)} tasks, so that none is left to evaluate. Give other "
                "tasks, or train with evaluation.tasks (or held_out.rows) above 0."
            )
        if left_out and is_rank0():
            LOG.warning("%d tasks are evaluated: %s was trained on others of them.", len(chosen), model)
        elif not (self.tasks or self.source) and is_rank0():
            LOG.warning("%s was trained on a stream, so that tasks which it was trained on cannot be left out.", model)
        return [tasks[index] for index in sorted(chosen)]

    @cached_property
    def _held_out(self) -> TaskSet:
        return TaskSet(self.held_out)

    @cached_property
    def _trained(self) -> TaskSet:
        return TaskSet(self.tasks)


def split_of_model(model: str) -> Split | None:
    """Returns the split of the run that wrote a model: RUN/model or a checkpoint; None if there is none."""
    path = Path(model).expanduser()
    return Split.read(path.parent.parent if path.parent.name == CHECKPOINTS else path.parent)
