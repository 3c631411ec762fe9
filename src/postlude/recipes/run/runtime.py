"""Where what a run needs besides its ranks is, and who is shown its steps: this machine and its terminal, or others."""

from __future__ import annotations

from dataclasses import dataclass

from postlude.pool.worker_pool import PoolFactory
from postlude.recipes.report.live import LiveView, ViewFactory
from postlude.serving.launch.launcher import ServerLauncher


@dataclass(frozen=True)
class Runtime:
    """What a recipe is given besides its config, by whoever starts it. It says nothing about what the run is."""

    view: ViewFactory = LiveView
    """Shows the run's steps."""
    pool_factory: PoolFactory | None = None
    """Finds those who judge; none takes processes of the rank's own machine."""
    launcher: ServerLauncher | None = None
    """Starts servers; none is the first rank's own machine."""


LOCAL_RUNTIME = Runtime()
