"""Runtime: starts a run's reward workers and servers, and displays its steps: on this machine or with Ray."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from postlude.pool.worker_pool import PoolFactory
from postlude.recipes.report.live import ViewFactory, open_view
from postlude.serving.launch.launcher import ServerLauncher


@dataclass(frozen=True)
class Runtime:
    """The environment of a run, which does not change what it computes."""

    view: ViewFactory = open_view
    """Shows the run's steps."""
    pool_factory: PoolFactory | None = None
    """Makes the pool of reward workers; None makes processes on rank 0's machine."""
    launcher: ServerLauncher | None = None
    """Starts servers; None starts them on rank 0's machine."""
    on_step: Callable[..., Any] | None = None
    """Called by rank 0 with the number and the metrics of each step. A true value ends the run after it."""


LOCAL_RUNTIME = Runtime()
