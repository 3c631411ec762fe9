"""Where what a run needs besides its ranks is, and who is shown its steps: this machine and its terminal, or others."""

from __future__ import annotations

from dataclasses import dataclass

from postlude.recipes.live import LiveView, Viewed
from postlude.rollout.crew import Hire
from postlude.rollout.servers.machine import Machine


@dataclass(frozen=True)
class Where:
    """What a recipe is given besides its config, by whoever starts it. It says nothing about what the run is."""

    view: Viewed = LiveView
    """Shows the run's steps."""
    hire: Hire | None = None
    """Finds those who judge; none takes processes of the rank's own machine."""
    machine: Machine | None = None
    """Starts servers; none is the first rank's own machine."""


HERE = Where()
