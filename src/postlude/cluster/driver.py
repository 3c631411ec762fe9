"""The driver: starts a run's ranks on a Ray cluster, shows their output, and restarts them when one is lost.

`run_service_on_ray` starts ranks that serve, not a recipe: one function on all of them, until all return.

`ForwardedView` is a rank's progress view, which the driver shows; `DriverDisplay` is the driver's side.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Self

from postlude.cluster.agent_actors import RayWorkers
from postlude.cluster.message_relay import MessageRelay
from postlude.cluster.rank_actors import RankActors, RankLost, RankResult, RunFailure, failure_of
from postlude.cluster.ray_cluster import LOCAL, ResourceNeeds, connected_to_ray
from postlude.cluster.server_actors import RayLauncher
from postlude.pool.worker_pool import START_LIMIT
from postlude.recipes.config.rollout import rollout_of
from postlude.recipes.config.settings import ClusterSettings
from postlude.recipes.registry import Recipe
from postlude.recipes.report.live import ProgressView, open_view
from postlude.recipes.rollouts.engine import SERVERS
from postlude.recipes.run.directory import RunDirectory, is_rank0
from postlude.recipes.run.files import flatten
from postlude.recipes.run.lock import wait_for
from postlude.recipes.run.outcome import RunOutcome
from postlude.recipes.run.runtime import Runtime
from postlude.recipes.run.signals import DUPLICATE_SECONDS, StopRequested, announce_stop
from postlude.recipes.run.start_mode import StartMode
from postlude.world.devices import default_device
from postlude.world.failure_report import GRACE, RankError
from postlude.world.signals import SIGNALS, ending_signals

LOG = logging.getLogger("postlude")
LOCK_TIMEOUT = 30.0  # seconds that ranks which were stopped may still hold the run's directory
STOP_TIMEOUT = 300.0  # seconds that ranks have to end after a signal


class ForwardedView:
    """Sends rank 0's progress to the driver's `LiveView`. On other ranks it does nothing."""

    def __init__(self, relay: Any, total: int, **settings: Any) -> None:
        self.relay, self.silent = relay, not is_rank0()
        self.total, self.settings = total, {"total": total, **settings}

    def __enter__(self) -> Self:
        self._send("start of view", self.settings)
        return self

    def __exit__(self, *_: object) -> None:
        self._send("end of view")

    def set_phase(self, phase: str) -> None:
        self._send("phase", phase)

    def update(self, step: int, metrics: Mapping[str, Any]) -> None:
        numbers = {name: value for name, value in flatten(metrics).items() if isinstance(value, int | float)}
        self._send("update", step, self.total, numbers)

    def show_notice(self, notice: str) -> bool:
        """Returns false: the panel is the driver's."""
        return False

    def _send(self, *message: Any) -> None:
        if not self.silent:
            self.relay.send.remote(*message)


class DriverDisplay:
    def __init__(self) -> None:
        self.view: ProgressView | None = None
        self.run_started = False
        """Whether a view was shown: the run has started or resumed."""

    def show(self, messages: list[tuple[Any, ...]]) -> None:
        for message in messages:
            match message:
                case ("output", stream, text):
                    print(text, end="", flush=True, file=sys.stderr if stream == "stderr" else sys.stdout)
                case ("start of view", settings):
                    self.close_view()
                    self.run_started = True
                    self.view = open_view(**settings, silent=False).__enter__()
                case ("phase", phase) if self.view is not None:
                    self.view.set_phase(phase)
                case ("update", step, total, metrics) if self.view is not None:
                    self.view.total = total
                    self.view.update(step, metrics)
                case ("end of view",):
                    self.close_view()

    def show_notice(self, notice: str) -> bool:
        return self.view is not None and self.view.show_notice(notice)

    def close_view(self) -> None:
        """Closes the progress view, as its ranks have finished or are lost."""
        if self.view is not None:
            self.view.__exit__()
            self.view = None


@dataclass(frozen=True)
class RayJob:
    """A recipe to run on a number of ranks."""

    recipe: Recipe
    config: Any
    device: str
    start_mode: StartMode
    ranks: int
    timeout: float
    """Seconds until a silent rank, or a wait for resources, fails."""

    @property
    def settings(self) -> ClusterSettings:
        settings: ClusterSettings = self.config.cluster
        return settings

    def needs(self, address: str) -> ResourceNeeds:
        gpus = self.settings.gpus_per_rank if self.device == "cuda" else 0.0
        shared = (os.cpu_count() or 1) // self.ranks if address == LOCAL and not gpus else 1
        # Only rank 0 has reward workers and servers. Some recipes have none, and some hold them in `data`.
        holder = self.config if hasattr(self.config, "environment") else getattr(self.config, "data", None)
        environment, rollout = getattr(holder, "environment", None), rollout_of(self.config)
        servers = getattr(rollout, "count", 0)
        workers = getattr(environment, "workers", 0) + getattr(environment, "episode_workers", 0)
        worker_cpus = workers * self.settings.cpus_per_worker
        other_cpus = worker_cpus + servers * getattr(rollout, "cpus", 0.0)
        cpus = self.settings.cpus_per_rank or max(1, shared)
        return ResourceNeeds(self.ranks, cpus, gpus, other_cpus, servers, getattr(rollout, "gpus", 0.0))


def run_on_ray(job: RayJob, address: str = LOCAL) -> RunOutcome:
    """Runs a job on a cluster. Returns the outcome of rank 0."""
    needs = job.needs(address)
    try:
        with connected_to_ray(address, needs), DriverSignals() as signals:
            return _run_with_restarts(job, needs, signals, can_grow=address != LOCAL)
    except StopRequested as interrupted:
        signal.raise_signal(interrupted.number)  # with the usual handler
        raise SystemExit(128 + interrupted.number) from None


class DriverSignals:
    """Within the block, signals that would end this process are kept and forwarded to the ranks."""

    def __init__(self) -> None:
        self.first, self.received_at = 0, 0.0
        self.stop_now = False
        self.show_notice: Callable[[str], bool] = lambda notice: False
        self._handlers: dict[int, Any] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            self._handlers = {number: signal.signal(number, self._receive) for number in ending_signals(SIGNALS)}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._handlers.items():
            signal.signal(number, handler)

    def check(self) -> None:
        """Raises `StopRequested` after a second signal, or if ranks took too long to stop."""
        if self.stop_now or (self.first and time.monotonic() - self.received_at > STOP_TIMEOUT):
            raise StopRequested(self.first)

    def check_before_start(self) -> None:
        """Raises `StopRequested` after a signal: there is nothing to save yet."""
        if self.first:
            raise StopRequested(self.first)

    def _receive(self, number: int, _: Any) -> None:
        if not self.first:
            self.first, self.received_at = number, time.monotonic()
            announce_stop(number, self.show_notice)
        elif time.monotonic() - self.received_at > DUPLICATE_SECONDS:
            self.stop_now = True


def _run_with_restarts(job: RayJob, needs: ResourceNeeds, signals: DriverSignals, *, can_grow: bool) -> RunOutcome:
    """Runs until all ranks have a result or restarts are used up. Nodes may join a cluster that `can_grow`."""
    display, attempts, saved = DriverDisplay(), 0, _newest_checkpoint(job)
    signals.show_notice = display.show_notice
    allowed = job.settings.max_restarts
    restarted = False
    while True:
        start_mode = replace(job.start_mode, resume_from=None) if display.run_started else job.start_mode
        wait_for_nodes = can_grow or restarted  # a lost node may come back
        results, failure = _run_ranks(
            replace(job, start_mode=start_mode),
            needs,
            signals,
            display,
            wait_for_nodes=wait_for_nodes,
            can_grow=can_grow,
        )
        if failure is None:
            outcome: RunOutcome = results[0].value  # type: ignore[union-attr]
            return outcome
        if signals.first:
            raise StopRequested(signals.first)
        if not failure.can_restart:
            raise failure.error
        before, saved = saved, _newest_checkpoint(job)
        attempts = 1 if saved != before else attempts + 1
        if attempts > allowed:
            raise RankError(
                f"{str(failure.error).rstrip('.')}. The ranks were started again {allowed} times without a new "
                f"checkpoint (cluster.max_restarts); go on with: {job.start_mode.command}"
            )
        LOG.warning(
            "%s All ranks start again from %s (%d of %d).",
            *(failure.error, saved or "the beginning", attempts, allowed),
        )
        restarted = True


def _run_ranks(
    job: RayJob,
    needs: ResourceNeeds,
    signals: DriverSignals,
    display: DriverDisplay,
    *,
    wait_for_nodes: bool,
    can_grow: bool,
) -> tuple[dict[int, RankResult | RankLost], RunFailure | None]:
    """Starts all ranks once. Returns the result of each, and the failure if there was one."""
    import ray

    ranks = RankActors(needs, signals.check_before_start, job.timeout, wait_for_nodes=wait_for_nodes)

    def function_for(relay: Any) -> Callable[[], RunOutcome]:
        addresses = {node["NodeManagerAddress"] for node in ray.nodes() if node["Alive"]}
        single_machine = not can_grow and len(addresses) == 1
        logs = Path(job.config.run).expanduser().absolute() / SERVERS
        runtime = Runtime(
            view=partial(ForwardedView, relay),
            pool_factory=RayWorkers(job.settings.cpus_per_worker, max(START_LIMIT, job.timeout), single_machine),
            launcher=RayLauncher(logs, single_machine=single_machine),
        )
        return partial(_run_rank, job, runtime)

    options = {"nproc": job.ranks, "timeout": job.timeout, "device": job.device}
    try:
        _run_until_ended(ranks, function_for, options, signals, display)
    except ray.exceptions.RayActorError as error:
        lost = RankError(f"the relay of the ranks' output was lost: {type(error).__name__}.")
        return ranks.results, RunFailure(lost, can_restart=True)
    return ranks.results, failure_of(ranks.results, job.ranks) if ranks.failed else None


def _run_until_ended(
    actors: RankActors,
    function_for: Callable[[Any], Callable[[], Any]],
    options: dict[str, Any],
    signals: DriverSignals,
    display: DriverDisplay,
) -> None:
    """Runs on all ranks the function for their relay. Shows their messages, forwards a signal, and ends them."""
    import ray

    relay = start_relay(options["nproc"])  # after the ranks have resources, since only the block below ends it
    try:
        actors.start(function_for(relay), relay, options)
        signal_sent, failed_at = False, 0.0
        while not actors.poll() and not (failed_at and time.monotonic() - failed_at > 2 * GRACE):
            display.show(ray.get(relay.take.remote(0.2)))
            signals.check()
            if signals.first and not signal_sent:
                signal_sent = True
                relay.send_signal.remote(signals.first)
            if actors.failed and not failed_at:
                failed_at = time.monotonic()  # other ranks may report the cause
        display.show(ray.get(relay.take.remote(0.0)))
    finally:
        display.close_view()
        actors.stop()
        ray.kill(relay)


def start_relay(ranks: int) -> Any:
    """Starts the relay on the driver's node, so that it is lost only with the driver."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    on_this_node = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    options = {"num_cpus": 0, "max_concurrency": 2 * ranks + 64, "scheduling_strategy": on_this_node}
    return ray.remote(MessageRelay).options(**options).remote()


def _run_rank(job: RayJob, runtime: Runtime) -> RunOutcome:
    if os.environ["RANK"] == "0":
        wait_for(job.config.run, LOCK_TIMEOUT)
    return job.recipe.run(job.config, job.device, job.start_mode, runtime)


def _newest_checkpoint(job: RayJob) -> str:
    """Returns the name of the newest checkpoint; empty if there is none."""
    checkpoints = RunDirectory(Path(job.config.run)).checkpoints()
    return checkpoints[-1].name if checkpoints else ""


def node_address() -> str:
    from ray.util import get_node_ip_address

    return str(get_node_ip_address())


def run_service_on_ray(
    function: Callable[..., Any], *args: Any, address: str, ranks: int, timeout: float, device: str | None
) -> None:
    """Runs function(*args) on ranks of a cluster, and prints their output. Raises the error of the first that fails.

    It waits `timeout` seconds for resources: a GPU for each rank on "cuda", and a CPU. A signal is forwarded to the
    ranks. When one is lost, the others are ended.
    """
    device = device or default_device()
    cpus = max(1, (os.cpu_count() or 1) // ranks) if address == LOCAL and device == "cpu" else 1
    needs = ResourceNeeds(ranks, cpus, 1.0 if device == "cuda" else 0.0)
    with connected_to_ray(address, needs), DriverSignals() as signals:
        actors = RankActors(needs, signals.check_before_start, timeout, wait_for_nodes=address != LOCAL)
        options = {"nproc": ranks, "timeout": timeout, "device": device}
        _run_until_ended(actors, lambda relay: partial(function, *args), options, signals, DriverDisplay())
        if actors.failed:
            raise failure_of(actors.results, ranks).error
