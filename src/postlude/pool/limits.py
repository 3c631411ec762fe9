"""WorkerLimits: what worker processes may use; and which names stand for secrets, which they do not get.

Such are names of settings, environment variables, arguments and parts of a URL.
"""

from __future__ import annotations

import os
import re
import resource
import sys
from collections.abc import Iterable
from dataclasses import dataclass

GIB = 1 << 30
SECRET_WORDS = frozenset(
    {"key", "apikey", "token", "secret", "secrets", "password", "passwords", "passwd", "passphrase"}
)


@dataclass(frozen=True)
class WorkerLimits:
    """What each worker process, and what it starts, may use. They limit mistakes; workers are no sandbox."""

    memory_gib: float | None = None
    """Gibibytes of memory of each process; none is half of the machine's."""
    file_gib: float = 16.0
    """Largest file that a process may write, in gibibytes."""
    processes: int = 256
    """Maximum number of processes of a worker at a time. More end the call."""
    reply_mib: float = 16.0
    """Largest result of a call, in mebibytes of JSON."""
    secrets: tuple[str, ...] = ()
    """Environment variables with secrets, such as OPENAI_API_KEY, that workers get. They get no other variable whose
    name ends as that of a secret."""

    def __post_init__(self) -> None:
        for name in ("memory_gib", "file_gib", "processes", "reply_mib"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ValueError(f"{name} is {value}, but a worker needs more than 0.")

    def apply(self) -> None:
        """Limits this process, for good, and all that it starts. Only Linux has all limits."""
        if sys.platform == "linux":
            half = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2
            _limit(resource.RLIMIT_DATA, half if self.memory_gib is None else int(self.memory_gib * GIB))
        _limit(resource.RLIMIT_FSIZE, int(self.file_gib * GIB))
        _limit(resource.RLIMIT_CORE, 0)

    def removed(self, variables: Iterable[str]) -> frozenset[str]:
        """Returns which environment variables workers do not get. Raises if one that they should get is missing."""
        names = set(variables)
        if missing := [name for name in self.secrets if name not in names]:
            raise ValueError(
                f"worker_limits.secrets has {missing[0]}, but there is no such environment variable. Set it, or leave "
                "it out."
            )
        return frozenset(name for name in names - set(self.secrets) if is_secret_name(name))


DEFAULT_LIMITS = WorkerLimits()


def _limit(kind: int, value: int) -> None:
    hard = resource.getrlimit(kind)[1]
    value = value if hard == resource.RLIM_INFINITY else min(value, hard)
    resource.setrlimit(kind, (value, value))


SECRET_WORDS |= {
    "credential",
    "credentials",
    "auth",
    "authorization",
    "bearer",
    "cookie",
    "cookies",
    "signature",
    "sig",
}
PLURALS = frozenset({"keys", "tokens"})  # of anything: a secret only after one of these words
OF_SECRETS = frozenset(["api", "access", "auth", "bearer", "hf", "private", "refresh", "secret"])


def is_secret_name(name: str) -> bool:
    """Returns whether the name stands for a secret, by its last words: api_key, hfToken, X-API-Keys; not max_tokens."""
    words = re.split(r"[^a-z0-9]+", re.sub(r"([a-z0-9])([A-Z])", r"\1_\2", name).lower())
    return words[-1] in SECRET_WORDS or (words[-1] in PLURALS and len(words) > 1 and words[-2] in OF_SECRETS)
