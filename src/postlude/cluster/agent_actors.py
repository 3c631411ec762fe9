"""ActorAgent: runs the episodes of an agent in Ray actors, hundreds in each.

An actor is lost with its episodes, which fail. The agent asks for completions at an address of its own node, where the
actor forwards connections to the model's server. So sandboxes need nothing but loopback on every node.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import math
import os
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any
from urllib.parse import urlsplit

from postlude.cluster.actor_pool import ActorPool
from postlude.cluster.ray_cluster import death_reason, leave_process_group
from postlude.pool.worker import to_json
from postlude.pool.worker_pool import CallResult, WorkerPool
from postlude.rollout.agent_programs import LOOPBACK, Agent, AgentClient, AgentLimits
from postlude.rollout.sandboxes.proxy_forwarder import forward
from postlude.world.work_directories import WorkDirectories

MARGIN = 8  # calls of an actor beside its episodes
HUNG_SECONDS = 150.0  # after the limit of time, in which an episode ends in an actor that works
CLOSE_SECONDS = 30.0
WAIT_SECONDS = 1.0  # for workers that start, before those that work are looked at again


@dataclass(frozen=True)
class RayWorkers:
    """Opens pools of reward workers, and agents, on nodes with `cpus` free CPUs for each worker.

    The cluster may take `start_timeout` seconds to have room for one.
    """

    cpus: float
    start_timeout: float
    single_machine: bool
    """Whether all nodes are this machine, so that nothing has to listen beyond loopback."""

    def __call__(self, function: bytes, name: str, count: int, timeout: float) -> WorkerPool:
        return ActorPool(function, name, count, timeout, cpus=self.cpus, start_timeout=self.start_timeout)

    def open_agent(self, make: Callable[[], Agent], name: str, count: int, concurrency: int) -> Agent:
        """Returns the agent that `make` returns in each of `count` actors, with up to `concurrency` episodes."""
        return ActorAgent(make, name, count, concurrency, self)


class AgentActor:
    """An actor that runs episodes. All its methods run in one event loop."""

    def __init__(self) -> None:
        self.agent: Agent | None = None
        self.url = ""
        self.workdirs = WorkDirectories()
        self.running: dict[int, asyncio.Task[CallResult]] = {}

    async def load(self, make: Callable[[], Agent], directory: str, url: str) -> str:
        """Makes the agent, whose model is at `url`. Returns why it cannot, or an empty text."""
        leave_process_group()
        try:
            os.chdir(directory)  # the agent may be named by a relative path
            self.agent = make()
        except Exception as error:  # also of the user's code
            return str(error) or repr(error)
        address = urlsplit(url)
        assert address.hostname is not None
        assert address.port is not None
        if address.hostname != LOOPBACK:
            connect = partial(forward, address=(address.hostname, address.port))
            server = await asyncio.start_server(connect, LOOPBACK, 0)
            url = f"http://{LOOPBACK}:{server.sockets[0].getsockname()[1]}"
        self.url = url
        return ""

    async def run(self, call_id: int, task: Mapping[str, Any], api_key: str, limits: AgentLimits) -> str:
        """Runs an episode in a new work directory. Returns its result in JSON."""
        assert self.agent is not None
        with self.workdirs.temporary() as workdir:
            client = AgentClient(self.url, api_key, workdir)
            episode = asyncio.ensure_future(self.agent.run(task, client, limits))
            self.running[call_id] = episode
            try:
                result = await episode
            except asyncio.CancelledError:
                result = CallResult(failure="died", error="it was ended.")
            finally:
                del self.running[call_id]
        try:
            return json.dumps(asdict(replace(result, value=to_json(result.value))))
        except (TypeError, ValueError) as error:
            message = f"returned {type(result.value).__name__}, which cannot be sent as JSON: {error}"
            return json.dumps(asdict(CallResult(failure="invalid", error=f"{self.agent.name} {message}")))

    async def cancel(self, call_id: int) -> None:
        """Ends an episode, if it has not ended."""
        if (episode := self.running.get(call_id)) is not None:
            episode.cancel()

    async def close(self) -> None:
        """Ends all episodes, and releases what the agent holds."""
        for episode in self.running.values():
            episode.cancel()
        while self.running:
            await asyncio.sleep(0.01)
        self.workdirs.close()
        if self.agent is not None:
            self.agent.close()


@dataclass(eq=False)
class _Worker:
    actor: Any
    loaded: Future[str]
    """Why it cannot make the agent; an empty text if it has."""
    episodes: int = field(default=0, init=False)


class ActorAgent(Agent):
    """An agent whose episodes run in actors. They start with the first episode; one that is lost is replaced."""

    lost_workers: int

    def __init__(self, make: Callable[[], Agent], name: str, count: int, concurrency: int, workers: RayWorkers) -> None:
        import ray

        self.make, self.name, self.count, self.concurrency = make, name, count, concurrency
        self.share = math.ceil(concurrency / count)  # episodes of a worker while others start
        self.options, self.start_seconds, self.lost_workers = workers, workers.start_timeout, 0
        self.host = LOOPBACK if workers.single_machine else ray.util.get_node_ip_address()
        self._workers: list[_Worker] = []
        self._call_ids = itertools.count()

    async def run(self, task: Mapping[str, Any], client: AgentClient, limits: AgentLimits) -> CallResult:
        """Runs an episode in the actor that has the fewest. Its model is at `client.url`; its directory is there."""
        import ray

        worker = await self._idlest_worker(client.url)
        if isinstance(worker, str):
            return CallResult(failure="died", error=worker)
        worker.episodes += 1
        call_id = next(self._call_ids)
        reply = _wrapped(worker.actor.run.remote(call_id, task, client.api_key, limits).future())
        try:
            done, _ = await asyncio.wait([reply], timeout=limits.seconds + HUNG_SECONDS)
        except asyncio.CancelledError:
            worker.actor.cancel.remote(call_id)
            await asyncio.wait([reply], timeout=HUNG_SECONDS)
            raise
        finally:
            worker.episodes -= 1
        if not done:
            self._remove(worker)
            message = f"{self.name} blocked its worker for more than {limits.seconds + HUNG_SECONDS:g} s."
            return CallResult(failure="timed_out", error=message)
        error = reply.exception()
        if isinstance(error, ray.exceptions.RayError) and not isinstance(error, ray.exceptions.RayTaskError):
            self._remove(worker)
            return CallResult(failure="died", error=f"{self.name} was lost with its worker: {death_reason(error)}")
        return CallResult(**json.loads(reply.result()))

    def close(self) -> None:
        import ray

        closed = [worker.actor.close.remote() for worker in self._workers if worker.loaded.done()]
        with contextlib.suppress(Exception):  # the cluster may be gone
            ray.wait(closed, num_returns=len(closed), timeout=CLOSE_SECONDS)
        for worker in self._workers:
            _kill(worker)
        self._workers.clear()

    async def _idlest_worker(self, url: str) -> _Worker | str:
        """Returns the worker with the fewest episodes, or why there is none.

        While others start, a worker takes no more than its share.
        """
        deadline, lost = time.monotonic() + self.start_seconds, ""
        while True:
            self._workers += [self._start(url) for _ in range(self.count - len(self._workers))]
            loaded = [worker for worker in self._workers if worker.loaded.done()]
            failed = {worker: error for worker in loaded if (error := worker.loaded.exception()) is not None}
            ready = [worker for worker in loaded if worker not in failed]
            if problem := next((worker.loaded.result() for worker in ready if worker.loaded.result()), ""):
                return problem
            for worker, error in failed.items():
                lost = death_reason(error)
                self._remove(worker)
            idlest = min(ready, key=lambda worker: worker.episodes, default=None)
            starting = [worker for worker in self._workers if worker not in ready]
            seconds = deadline - time.monotonic()
            if idlest is not None and (not starting or idlest.episodes < self.share or seconds <= 0):
                return idlest
            if seconds <= 0:
                break
            if starting:
                loaded_futures = [_wrapped(worker.loaded) for worker in starting]
                timeout = min(seconds, WAIT_SECONDS)
                await asyncio.wait(loaded_futures, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
        if lost:
            return f"no worker of {self.name} has started in {self.start_seconds:g} s; the last was lost: {lost}"
        return (
            f"the cluster has had no room for a worker of {self.name} for {self.start_seconds:g} s; each takes "
            f"{self.options.cpus:g} CPU(s). Add nodes, or lower cluster.cpus_per_worker or environment.episode_workers."
        )

    def _start(self, url: str) -> _Worker:
        import ray

        actor = (
            ray.remote(AgentActor)
            .options(
                num_cpus=self.options.cpus,
                max_restarts=0,
                max_concurrency=self.concurrency + MARGIN,
                scheduling_strategy="SPREAD",
            )
            .remote()
        )
        return _Worker(actor, actor.load.remote(self.make, os.getcwd(), url).future())

    def _remove(self, worker: _Worker) -> None:
        """Replaces a worker at the next episode. Its other episodes fail."""
        if worker in self._workers:
            self._workers.remove(worker)
            self.lost_workers += 1
            _kill(worker)


def _wrapped(future: Future[Any]) -> asyncio.Future[Any]:
    """Returns a future of this loop, whose exception nobody has to read."""
    wrapped = asyncio.wrap_future(future)
    wrapped.add_done_callback(lambda done: done.cancelled() or done.exception())
    return wrapped


def _kill(worker: _Worker) -> None:
    import ray

    with contextlib.suppress(Exception):  # the cluster may be gone
        ray.kill(worker.actor)
