"""RowSource: the rows of each step. A new kind of source is one class."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, Generic, TypeVar

Row = TypeVar("Row")


class RowSource(ABC, Generic[Row]):
    """Rows without end, epoch after epoch, and rows that are held out. Every rank gets the same ones."""

    @property
    @abstractmethod
    def size(self) -> int | None:
        """Rows of an epoch, without those held out; None if that is unknown."""

    @property
    @abstractmethod
    def identities(self) -> set[bytes]:
        """The identities of the tasks of all rows; empty if they are not known before they are read."""

    @property
    @abstractmethod
    def held_out(self) -> Sequence[Row]:
        """The rows that are never trained on."""

    @property
    @abstractmethod
    def held_out_identities(self) -> set[bytes]:
        """The identities of the held-out rows' tasks."""

    @property
    @abstractmethod
    def progress(self) -> float:
        """Epochs done, with the fraction of the current one."""

    @abstractmethod
    def take(self, count: int) -> list[Row]:
        """Returns the next rows."""

    @abstractmethod
    def exclude(self, identities: set[bytes]) -> None:
        """Leaves out rows of these tasks, which another dataset holds out."""

    @abstractmethod
    def state(self) -> dict[str, Any]:
        """Returns its position as JSON."""

    @abstractmethod
    def restore(self, state: Mapping[str, Any]) -> None:
        """Continues from a state."""

    def metrics(self) -> dict[str, float]:
        """Returns what a step reports about the rows so far."""
        return {}
