"""RayLauncher: starts servers on a cluster's nodes. Each server has an actor, which is lost with its node."""

from __future__ import annotations

import os
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from postlude.cluster.ray_cluster import death_reason, leave_process_group
from postlude.serving.launch.launcher import STOP_TIMEOUT, LocalLauncher, ServerCommand, ServerProcess

POLL_SECONDS = 0.2


class RayLauncher:
    """Starts servers on nodes that have the CPUs and GPUs they need. The N-th writes its logs to `logs`/N.

    Servers listen at their node's address; with `single_machine`, at the loopback address.
    """

    def __init__(self, logs: Path, *, single_machine: bool = False) -> None:
        self.logs, self.single_machine = logs, single_machine
        self._started = 0

    def start(self, command: ServerCommand) -> ServerProcess:
        import ray

        actor = ray.remote(ServerActor).options(
            num_cpus=command.cpus,
            num_gpus=command.gpus,
            max_restarts=0,
            max_concurrency=4,
            scheduling_strategy="SPREAD",
        )
        logs = self.logs / str(self._started)
        self._started += 1
        return _RayProcess(actor.remote(), command, logs, single_machine=self.single_machine)


class ServerActor:
    """An actor that starts a server on its node and waits for its end."""

    def __init__(self) -> None:
        self.process: ServerProcess | None = None

    def start(self, command: ServerCommand, logs: str, directory: str, single_machine: bool) -> tuple[str, str]:
        import ray

        leave_process_group()
        os.chdir(directory)
        host = "127.0.0.1" if single_machine else ray.util.get_node_ip_address()
        launcher = LocalLauncher(Path(logs), host=host)
        self.process = launcher.start(replace(command, gpus=0.0))  # Ray has set CUDA_VISIBLE_DEVICES
        return self.process.url, self.process.key

    def is_listening(self) -> bool:
        return self.process is not None and self.process.is_listening()

    def wait(self) -> str:
        assert self.process is not None
        while (reason := self.process.exit_reason()) is None:
            time.sleep(POLL_SECONDS)
        return reason

    def stop(self) -> None:
        if self.process is not None:
            self.process.stop()


class _RayProcess:
    """A server and its actor. It has an address once a node has room for it."""

    def __init__(self, actor: Any, command: ServerCommand, logs: Path, *, single_machine: bool) -> None:
        self.actor, self.command, self.url, self.key = actor, command, "", ""
        self._started = actor.start.remote(command, str(logs), os.getcwd(), single_machine)
        self._ended: Any = None
        self._reason: str | None = None

    def exit_reason(self) -> str | None:
        import ray

        if self._reason is None and self._ended is None and ray.wait([self._started], timeout=0)[0]:
            try:
                self.url, self.key = ray.get(self._started)
                self._ended = self.actor.wait.remote()
            except ray.exceptions.RayError as error:
                self._reason = f"could not be started: {death_reason(error).rstrip('.')}"
        if self._reason is None and self._ended is not None and ray.wait([self._ended], timeout=0)[0]:
            try:
                self._reason = ray.get(self._ended)
            except ray.exceptions.RayError as error:
                self._reason = f"was lost with its actor: {death_reason(error).rstrip('.')}"
        return self._reason

    def is_listening(self) -> bool:
        import ray

        try:
            return bool(ray.get(self.actor.is_listening.remote()))
        except ray.exceptions.RayError:  # `exit_reason` says why
            return False

    def stop(self) -> None:
        import ray

        if self.exit_reason() is None and self._ended is None:
            self._reason = (
                f"found no node with {self.command.cpus:g} free CPU(s) and {self.command.gpus:g} GPU(s). Add nodes, or "
                "lower rollout.count, cpus or gpus"
            )
        elif self._reason is None:
            with suppress(ray.exceptions.RayError):
                ray.get(self.actor.stop.remote(), timeout=STOP_TIMEOUT + 5.0)
        ray.kill(self.actor)
