"""The driver: starts a run's ranks on a cluster, shows what they show, and starts them again when one is lost."""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Self

from postlude.cluster.actor_pool import ActorPoolFactory
from postlude.cluster.forwarded_view import DriverDisplay, ForwardedViews
from postlude.cluster.message_relay import MessageRelay
from postlude.cluster.rank_actors import RankActors, RankLost, RankResult, RunFailure, failure_of
from postlude.cluster.ray_cluster import LOCAL, ResourceNeeds, connected_to_ray
from postlude.cluster.server_actors import RayLauncher
from postlude.pool.worker_pool import START_LIMIT
from postlude.recipes.config.settings import ClusterSettings
from postlude.recipes.registry import Recipe
from postlude.recipes.rollout_engine import SERVERS
from postlude.recipes.run.directory import RunDirectory
from postlude.recipes.run.lock import wait_for
from postlude.recipes.run.outcome import RunOutcome
from postlude.recipes.run.runtime import Runtime
from postlude.recipes.run.signals import DUPLICATE_SECONDS, stop_message
from postlude.recipes.run.start_mode import StartMode
from postlude.world.failure_report import GRACE, RankError
from postlude.world.launcher import SIGNALS, ending_signals

LOG = logging.getLogger("postlude")
LEAVING = 30.0  # seconds that ranks which were ended may still hold the run's directory
PATIENCE = 300.0  # seconds that ranks have to end after a signal


@dataclass(frozen=True)
class RayJob:
    """A recipe that is to be run, on so many ranks."""

    recipe: Recipe
    config: Any
    device: str
    start_mode: StartMode
    ranks: int
    timeout: float
    """Seconds after which a silent rank, or a place for it, is given up."""

    @property
    def settings(self) -> ClusterSettings:
        """What it takes of a cluster."""
        found: ClusterSettings = self.config.cluster
        return found

    def needs(self, address: str) -> ResourceNeeds:
        """What that comes to."""
        gpus = self.settings.gpus_per_rank if self.device == "cuda" else 0.0
        shared = (os.cpu_count() or 1) // self.ranks if address == LOCAL and not gpus else 1
        # The first rank alone has those who judge and servers; which of them there are, a recipe's config may not say.
        asks = self.config if hasattr(self.config, "environment") else getattr(self.config, "data", None)
        environment, rollout = getattr(asks, "environment", None), getattr(asks, "rollout", None)
        count = getattr(rollout, "count", 0)
        cpus = getattr(environment, "workers", 0) * self.settings.cpus_per_worker + count * getattr(
            rollout, "cpus", 0.0
        )
        own = self.settings.cpus_per_rank or max(1, shared)
        return ResourceNeeds(self.ranks, own, gpus, cpus, count, getattr(rollout, "gpus", 0.0))


class Interrupted(Exception):
    """A signal ended the ranks before they could save."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.number = number


def run_on_ray(job: RayJob, address: str = LOCAL) -> RunOutcome:
    """Run a job on a cluster, and return how it ended, as its first rank says."""
    needs = job.needs(address)
    try:
        with connected_to_ray(address, needs), DriverSignals() as signalled:
            return _restarted(job, needs, signalled, grows=address != LOCAL)
    except Interrupted as ended:
        signal.raise_signal(ended.number)  # now it means what it always means here
        raise SystemExit(128 + ended.number) from None


class DriverSignals:
    """While it is entered, signals that would end this process are kept, for the ranks to hear of."""

    def __init__(self) -> None:
        self.first, self.at = 0, 0.0
        self.over = False
        self._handlers: dict[int, Any] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            self._handlers = {number: signal.signal(number, self._hear) for number in ending_signals(SIGNALS)}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._handlers.items():
            signal.signal(number, handler)

    def check(self) -> None:
        """Go on, unless it is time to end."""
        if self.over or (self.first and time.monotonic() - self.at > PATIENCE):
            raise Interrupted(self.first)

    def check_early(self) -> None:
        """Go on, unless a signal came: nothing has begun that could be saved."""
        if self.first:
            raise Interrupted(self.first)

    def _hear(self, number: int, _: Any) -> None:
        if not self.first:
            self.first, self.at = number, time.monotonic()
            with suppress(OSError):  # a terminal that has hung up takes no words
                os.write(2, stop_message(number))
        elif time.monotonic() - self.at > DUPLICATE_SECONDS:
            self.over = True


def _restarted(job: RayJob, needs: ResourceNeeds, signalled: DriverSignals, *, grows: bool) -> RunOutcome:
    """Run until all ranks have a result, or there is no use in another start. To one that `grows` nodes may come."""
    audience, used, saved = DriverDisplay(), 0, _saved(job)
    allowed = job.settings.max_restarts
    restarted = False
    while True:
        start_mode = replace(job.start_mode, resume_from=None) if audience.began else job.start_mode
        patient = grows or restarted  # a node that was lost may come back
        again = replace(job, start_mode=start_mode)
        answers, found = _started(again, needs, signalled, audience, patient=patient, grows=grows)
        if found is None:
            outcome: RunOutcome = answers[0].value  # type: ignore[union-attr]
            return outcome
        if signalled.first:
            raise Interrupted(signalled.first)
        if not found.again:
            raise found.error
        before, saved = saved, _saved(job)
        used = 1 if saved != before else used + 1
        if used > allowed:
            raise RankError(
                f"{str(found.error).rstrip('.')}. The ranks were started again {allowed} times without a new "
                f"checkpoint (cluster.max_restarts); go on with: {job.start_mode.command}"
            )
        LOG.warning(
            "%s All ranks start again from %s (%d of %d).", found.error, saved or "the beginning", used, allowed
        )
        restarted = True


def _started(
    job: RayJob, needs: ResourceNeeds, signalled: DriverSignals, audience: DriverDisplay, *, patient: bool, grows: bool
) -> tuple[dict[int, RankResult | RankLost], RunFailure | None]:
    """One start of all ranks: what each answered, and why they ended if not all have a value."""
    import ray

    gang = RankActors(needs, signalled.check_early, job.timeout, patient=patient)
    relay = _relay(needs.ranks)  # after that, since nobody ends it where there is no room
    try:
        alone = not grows and len({node["NodeManagerAddress"] for node in ray.nodes() if node["Alive"]}) == 1
        servers = RayLauncher(Path(job.config.run).expanduser().absolute() / SERVERS, alone=alone)
        pool_factory = ActorPoolFactory(job.settings.cpus_per_worker, max(START_LIMIT, job.timeout))
        where = Runtime(view=ForwardedViews(relay), pool_factory=pool_factory, launcher=servers)
        function = partial(_rank, job, where)
        gang.start(function, relay, {"nproc": job.ranks, "timeout": job.timeout, "device": job.device})
        told, failed = False, 0.0
        while not gang.look() and not (failed and time.monotonic() - failed > 2 * GRACE):
            audience.hear(ray.get(relay.take.remote(0.2)))
            signalled.check()
            if signalled.first and not told:
                told = True
                relay.ask.remote(signalled.first)
            if gang.failed and not failed:
                failed = time.monotonic()  # the others may know better why
        audience.hear(ray.get(relay.take.remote(0.0)))
    except ray.exceptions.RayActorError as error:
        return gang.answers, RunFailure(
            RankError(f"the relay of the ranks' words was lost: {type(error).__name__}."), True
        )
    finally:
        audience.leave()
        gang.end()
        ray.kill(relay)
    return gang.answers, failure_of(gang.answers, job.ranks) if gang.failed else None


def _relay(ranks: int) -> Any:
    """Beside the driver, so that it is lost with it alone."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    return (
        ray.remote(MessageRelay).options(num_cpus=0, max_concurrency=2 * ranks + 64, scheduling_strategy=here).remote()
    )


def _rank(job: RayJob, where: Runtime) -> RunOutcome:
    """What each rank does."""
    if os.environ["RANK"] == "0":
        wait_for(job.config.run, LEAVING)
    return job.recipe.run(job.config, job.device, job.start_mode, where)


def _saved(job: RayJob) -> str:
    """The name of the newest checkpoint; empty where there is none."""
    found = RunDirectory(Path(job.config.run)).checkpoints()
    return found[-1].name if found else ""
