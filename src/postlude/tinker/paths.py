"""TinkerPath: `tinker://RUN/KIND/NAME`, checked so that it never leads out of the state directory."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal, get_args

PREFIX = "tinker://"
Kind = Literal["weights", "sampler_weights", "external_weights"]
CHECKPOINT_TYPES = {"weights": "training", "sampler_weights": "sampler", "external_weights": "external"}
NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.:+=@-]{0,199}")  # neither "/" nor a leading dot


def check_name(name: str, kind: str = "name") -> str:
    """Returns a name that is safe as one part of a path. Refuses others."""
    if not NAME.fullmatch(name):
        raise ValueError(
            f"the {kind} {name[:60]!r} is not allowed: use 1 to 200 letters, digits and _ . : + = @ -, beginning with "
            "a letter, a digit or _."
        )
    return name


@dataclass(frozen=True)
class TinkerPath:
    run_id: str
    kind: Kind
    name: str

    def __post_init__(self) -> None:
        check_name(self.run_id, "training run")
        if self.kind not in get_args(Kind):
            raise ValueError(
                f"a path has weights, sampler_weights or external_weights, but this one {self.kind!r:.60}."
            )
        check_name(self.name)

    @classmethod
    def parse(cls, text: str) -> TinkerPath:
        """Reads a path. Raises a ValueError with a sentence if it is none."""
        parts = text.removeprefix(PREFIX).split("/")
        if not text.startswith(PREFIX) or len(parts) != 3:
            raise ValueError(f"{text[:120]!r} is not a path: give {PREFIX}RUN/weights/NAME (or sampler_weights).")
        return cls(parts[0], parts[1], parts[2])  # type: ignore[arg-type]  # checked in __post_init__

    @property
    def checkpoint_id(self) -> str:
        """The name within its run, as clients use it."""
        return f"{self.kind}/{self.name}"

    def __str__(self) -> str:
        return f"{PREFIX}{self.run_id}/{self.checkpoint_id}"
