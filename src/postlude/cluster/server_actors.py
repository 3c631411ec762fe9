"""The cluster's nodes as a machine to start servers on: beside each server an actor, which is lost with its node."""

from __future__ import annotations

import os
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from postlude.cluster.ray_cluster import death_reason
from postlude.serving.launch.launcher import STOPPED_WITHIN, LocalLauncher, ServerCommand, ServerProcess

LOOKED = 0.2  # seconds between two looks at a server


class RayLauncher:
    """Wherever the cluster has the CPUs and GPUs that a server wants. The N-th writes to `logs`/N.

    Servers listen at their node's address for the others, or, where all of it is this machine, at its loopback.
    """

    def __init__(self, logs: Path, *, alone: bool = False) -> None:
        self.logs, self.alone = logs, alone
        self._started = 0

    def start(self, program: ServerCommand) -> ServerProcess:
        """Have one started, once a node has room for it."""
        import ray

        made = ray.remote(ServerActor).options(
            num_cpus=program.cpus,
            num_gpus=program.gpus,
            max_restarts=0,
            max_concurrency=4,
            scheduling_strategy="SPREAD",
        )
        logs = self.logs / str(self._started)
        self._started += 1
        return _Hosted(made.remote(), program, logs, alone=self.alone)


class ServerActor:
    """An actor that starts a server on its node and waits for it."""

    def __init__(self) -> None:
        self.running: ServerProcess | None = None

    def start(self, program: ServerCommand, logs: str, directory: str, alone: bool) -> str:
        """Start it; returns its address."""
        import ray

        os.chdir(directory)
        launcher = (
            LocalLauncher(Path(logs)) if alone else LocalLauncher(Path(logs), host=ray.util.get_node_ip_address())
        )
        self.running = launcher.start(replace(program, gpus=0.0))  # which GPUs it sees, Ray has said already
        return self.running.url

    def wait(self) -> str:
        """How it ended, when it has."""
        assert self.running is not None
        while (how := self.running.ended()) is None:
            time.sleep(LOOKED)
        return how

    def stop(self) -> None:
        """End it."""
        if self.running is not None:
            self.running.stop()


class _Hosted:
    """A server, by the actor beside it. It has an address once a node has room for it."""

    def __init__(self, actor: Any, program: ServerCommand, logs: Path, *, alone: bool) -> None:
        self.actor, self.program, self.url = actor, program, ""
        self._placed = actor.start.remote(program, str(logs), os.getcwd(), alone)
        self._end: Any = None
        self._how: str | None = None

    def ended(self) -> str | None:
        """As the actor says, or as Ray says of the actor."""
        import ray

        if self._how is None and self._end is None and ray.wait([self._placed], timeout=0)[0]:
            try:
                self.url, self._end = ray.get(self._placed), self.actor.wait.remote()
            except ray.exceptions.RayError as error:
                self._how = f"could not be started: {death_reason(error).rstrip('.')}"
        if self._how is None and self._end is not None and ray.wait([self._end], timeout=0)[0]:
            try:
                self._how = ray.get(self._end)
            except ray.exceptions.RayError as error:
                self._how = f"was lost with the actor beside it: {death_reason(error).rstrip('.')}"
        return self._how

    def stop(self) -> None:
        """End it, and give its room back."""
        import ray

        if self.ended() is None and self._end is None:
            self._how = (
                f"found no room on the cluster, of {self.program.cpus:g} CPU(s) and {self.program.gpus:g} GPU(s). Add "
                "nodes, or lower rollout.count, cpus or gpus"
            )
        elif self._how is None:
            with suppress(ray.exceptions.RayError):
                ray.get(self.actor.stop.remote(), timeout=STOPPED_WITHIN + 5.0)
        ray.kill(self.actor)
