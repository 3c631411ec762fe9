"""RankActors: the ranks of a run as actors of one placement group. They start together and end together.

Each actor becomes a rank by torchrun's environment variables, so `postlude.world` does not depend on Ray.
"""

from __future__ import annotations

import os
import socket
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from postlude.cluster.message_relay import forward_output, forward_signals
from postlude.cluster.ray_cluster import (
    ResourceNeeds,
    check_capacity,
    death_reason,
    leave_process_group,
    missing_capacity,
)
from postlude.json_log import LOG_FORMAT
from postlude.world.agreement import if_picklable
from postlude.world.failure_report import RankError, RankStatus, first_failure, first_stopped
from postlude.world.launcher import run_on_ranks
from postlude.world.ports import ReservedPort

POLL_SECONDS = 0.5
FIRST_WARNING, WARN_SECONDS = 5.0, 60.0  # seconds without resources until the first message, and between two


@dataclass(frozen=True)
class RankResult:
    value: Any = None
    status: RankStatus | None = None
    error: BaseException | None = None
    """The exception, if it can be pickled."""
    device_failed: bool = False
    """Whether its device failed: another device may work."""


@dataclass(frozen=True)
class RankLost:
    """A rank whose actor or node is gone, and Ray's reason."""

    reason: str


class RankActor:
    """An actor that becomes a rank. Its methods run in the main thread, where Python handles signals."""

    def prepare(self, directory: str) -> tuple[str, str, int]:
        """Changes to the driver's directory. Returns this rank's node, its address, and a free port there."""
        import ray

        try:
            os.chdir(directory)
        except OSError as error:
            raise FileNotFoundError(
                f"{directory}, where the command was given, cannot be used on node {socket.gethostname()} "
                f"({error.strerror}). Nodes must see the same files by the same paths: give it in a shared directory."
            ) from None
        self.port = ReservedPort("")  # as long as this actor lives
        return ray.get_runtime_context().get_node_id(), ray.util.get_node_ip_address(), self.port.number

    def run(
        self, variables: dict[str, str], threads: int, relay: Any, function: Callable[[], Any], options: dict[str, Any]
    ) -> RankResult:
        """Runs a function as a rank. Its exception is returned, not raised."""
        os.environ.update(variables)
        torch.set_num_threads(threads)
        try:
            forward_signals(relay)
            leave_process_group()
            with forward_output(relay):
                return RankResult(run_on_ranks(function, **options))
        except BaseException as error:
            out_of_memory = isinstance(error, torch.cuda.OutOfMemoryError)
            device_failed = isinstance(error, torch.AcceleratorError) and not out_of_memory
            return RankResult(status=RankStatus.of(error), error=if_picklable(error), device_failed=device_failed)


class RankActors:
    """All ranks. `start` runs a function on them, `poll` collects results, `stop` ends them."""

    def __init__(
        self, needs: ResourceNeeds, while_waiting: Callable[[], None], timeout: float, *, wait_for_nodes: bool = False
    ) -> None:
        """Waits for resources, and calls `while_waiting` meanwhile. With `wait_for_nodes`, nodes may still join."""
        import ray
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        self.needs, self.actors = needs, list[Any]()
        self.results: dict[int, RankResult | RankLost] = {}
        self.runs: dict[Any, int] = {}
        if not wait_for_nodes:
            check_capacity(needs)
        bundle = {"CPU": needs.cpus} | ({"GPU": needs.gpus} if needs.gpus else {})
        self.group = ray.util.placement_group([bundle] * needs.ranks, strategy="PACK")
        try:
            self._wait(while_waiting, timeout)
            for index in range(needs.ranks):
                strategy = PlacementGroupSchedulingStrategy(self.group, placement_group_bundle_index=index)
                actor = ray.remote(RankActor).options(
                    num_cpus=needs.cpus, num_gpus=needs.gpus, max_restarts=0, scheduling_strategy=strategy
                )
                self.actors.append(actor.remote())
        except BaseException:
            self.stop()
            raise

    def _wait(self, while_waiting: Callable[[], None], timeout: float) -> None:
        start, next_warning = time.monotonic(), FIRST_WARNING
        while not self.group.wait(POLL_SECONDS):
            while_waiting()
            waited = time.monotonic() - start
            if waited > timeout:
                check_capacity(self.needs)
                raise ValueError(
                    f"the cluster had no room for {self.needs} within {timeout:g} s: others use it. Wait for them, or "
                    "raise --timeout."
                )
            if waited > next_warning:
                next_warning = waited + WARN_SECONDS
                lacks = missing_capacity(self.needs) or f"{self.needs} are needed, which others use."
                print(f"waiting for room, {timeout - waited:.0f} s more at most (--timeout): {lacks}", file=sys.stderr)

    def start(self, function: Callable[[], Any], relay: Any, options: dict[str, Any]) -> None:
        import ray

        calls = [actor.prepare.remote(os.getcwd()) for actor in self.actors]
        prepared = [self._get(index, call) for index, call in enumerate(calls)]
        if any(isinstance(result, RankLost) for result in prepared):
            return
        nodes = [node for node, _, _ in prepared]
        _, address, port = prepared[0]
        single_node = len(set(nodes)) == 1
        local_ranks, packed = Counter[str](), ray.put(function)
        threads = int(os.environ.get("OMP_NUM_THREADS", self.needs.cpus))
        for index, (actor, node) in enumerate(zip(self.actors, nodes, strict=True)):
            variables = {
                "RANK": str(index),
                "WORLD_SIZE": str(len(nodes)),
                "LOCAL_RANK": str(local_ranks[node]),
                "LOCAL_WORLD_SIZE": str(nodes.count(node)),
                "MASTER_ADDR": "127.0.0.1" if single_node else address,
                "MASTER_PORT": str(port),
                LOG_FORMAT: os.environ.get(LOG_FORMAT, ""),
            }
            local_ranks[node] += 1
            self.runs[actor.run.remote(variables, max(1, threads), relay, packed, options)] = index

    def _get(self, index: int, call: Any) -> Any:
        import ray

        try:
            return ray.get(call)
        except ray.exceptions.RayTaskError as error:  # an error that another start would meet again
            raise (error.cause or error) from None
        except ray.exceptions.RayError as error:
            self.results[index] = RankLost(death_reason(error))
            return self.results[index]

    def poll(self) -> bool:
        """Collects results. Returns whether there is nothing more to wait for."""
        import ray

        pending = [run for run, index in self.runs.items() if index not in self.results]
        for run in ray.wait(pending, num_returns=len(pending), timeout=0)[0] if pending else ():
            self.results[self.runs[run]] = self._get(self.runs[run], run)
        any_lost = any(isinstance(result, RankLost) for result in self.results.values())
        return len(self.results) == self.needs.ranks or any_lost

    @property
    def failed(self) -> bool:
        return any(isinstance(result, RankLost) or result.status is not None for result in self.results.values())

    def stop(self) -> None:
        import ray

        for actor in self.actors:
            ray.kill(actor)
        ray.util.remove_placement_group(self.group)


@dataclass(frozen=True)
class RunFailure:
    """Why the ranks ended, and whether a restart may help."""

    error: BaseException
    can_restart: bool


def failure_of(results: dict[int, RankResult | RankLost], size: int) -> RunFailure:
    lost = {rank: result.reason for rank, result in results.items() if isinstance(result, RankLost)}
    ended = {rank: result for rank, result in results.items() if isinstance(result, RankResult)}
    statuses = {rank: result.status for rank, result in ended.items() if result.status is not None}
    failed = {rank: status for rank, status in statuses.items() if status.state == "failed"}
    if failed and (not lost or any(status.user_error for status in failed.values())):
        first = min(failed, key=lambda rank: (failed[rank].time, rank))
        original = ended[first].error if size == 1 else None  # a single rank needs no name
        named = first_failure(failed, size)
        assert named is not None
        return RunFailure(original or named, ended[first].device_failed)
    if lost:
        rank, reason = min(lost.items())
        return RunFailure(RankError(f"rank {rank} of {size} was lost: {reason}"), can_restart=True)
    if stopped := first_stopped(statuses):
        return RunFailure(stopped, can_restart=True)
    return RunFailure(RankError(f"rank {min(statuses)} of {size} ended without a result."), can_restart=False)
