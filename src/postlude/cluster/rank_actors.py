"""The ranks of a run as actors of one placement group: they start together, and when one is lost all end.

Each is made a rank by torchrun's variables, so that `postlude.world` knows nothing of Ray.
"""

from __future__ import annotations

import os
import pickle
import signal
import socket
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from postlude.cluster.message_relay import forward_output, forward_signals
from postlude.cluster.ray_cluster import ResourceNeeds, check_capacity, death_reason, missing_capacity
from postlude.world.failure_report import RankError, RankStatus
from postlude.world.launcher import SIGNALS, run_on_ranks
from postlude.world.ports import ReservedPort

LOOKED = 0.5  # seconds between two looks whether ranks have a place
WAITING, SAID = 5.0, 60.0  # seconds without a place after which it is said that ranks wait for one, and again


@dataclass(frozen=True)
class RankResult:
    """What came of a rank: a value, or how it failed."""

    value: Any = None
    word: RankStatus | None = None
    error: BaseException | None = None
    """What it raised, where that can be sent."""
    broken: bool = False
    """Whether its device failed under it, which another may not."""


@dataclass(frozen=True)
class RankLost:
    """A rank whose actor or node is gone, and what Ray says of it."""

    why: str


class RankActor:
    """An actor that becomes a rank. Its methods run in the first thread, where Python hears signals."""

    def where(self, directory: str) -> tuple[str, str, int]:
        """Go to the driver's directory. Returns this rank's node, its address, and a port that is free there."""
        import ray

        try:
            os.chdir(directory)
        except OSError as error:
            raise FileNotFoundError(
                f"{directory}, where the command was given, cannot be used on node {socket.gethostname()} "
                f"({error.strerror}). Nodes must see the same files by the same paths: give it in a shared directory."
            ) from None
        self.port = ReservedPort("")  # for as long as this actor lives
        return ray.get_runtime_context().get_node_id(), ray.util.get_node_ip_address(), self.port.number

    def run(
        self, variables: dict[str, str], threads: int, relay: Any, function: Callable[[], Any], options: dict[str, Any]
    ) -> RankResult:
        """Be a rank: what `run_on_ranks` says of a function. Whatever it raises comes back as an answer."""
        os.environ.update(variables)
        torch.set_num_threads(threads)
        try:
            forward_signals(relay)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
            with forward_output(relay):
                return RankResult(run_on_ranks(function, **options))
        except BaseException as error:
            out_of_memory = isinstance(error, torch.cuda.OutOfMemoryError)
            broken = isinstance(error, torch.AcceleratorError) and not out_of_memory
            return RankResult(word=RankStatus.of(error), error=_sendable(error), broken=broken)


class RankActors:
    """Ranks that have a place. `start` has them run a function, `look` says what came of them, `end` ends all."""

    def __init__(
        self, needs: ResourceNeeds, waits: Callable[[], None], timeout: float, *, patient: bool = False
    ) -> None:
        """Wait for a place, and call `waits` meanwhile. If `patient`, a cluster that is too small may grow."""
        import ray
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        self.needs, self.seats = needs, list[Any]()
        self.answers: dict[int, RankResult | RankLost] = {}
        self.runs: dict[Any, int] = {}
        if not patient:
            check_capacity(needs)
        bundle = {"CPU": needs.cpus} | ({"GPU": needs.gpus} if needs.gpus else {})
        self.group = ray.util.placement_group([bundle] * needs.ranks, strategy="PACK")
        try:
            self._wait(waits, timeout)
            for index in range(needs.ranks):
                place = PlacementGroupSchedulingStrategy(self.group, placement_group_bundle_index=index)
                seat = ray.remote(RankActor).options(
                    num_cpus=needs.cpus, num_gpus=needs.gpus, max_restarts=0, scheduling_strategy=place
                )
                self.seats.append(seat.remote())
        except BaseException:
            self.end()
            raise

    def _wait(self, waits: Callable[[], None], timeout: float) -> None:
        began, say_at = time.monotonic(), WAITING
        while not self.group.wait(LOOKED):
            waits()
            waited = time.monotonic() - began
            if waited > timeout:
                check_capacity(self.needs)
                raise ValueError(
                    f"the cluster had no room for {self.needs} within {timeout:g} s: others use it. Wait for them, or "
                    "raise --timeout."
                )
            if waited > say_at:
                say_at = waited + SAID
                lacks = missing_capacity(self.needs) or f"{self.needs} are asked for, which others use."
                print(f"waiting for room, {timeout - waited:.0f} s more at most (--timeout): {lacks}", file=sys.stderr)

    def start(self, function: Callable[[], Any], relay: Any, options: dict[str, Any]) -> None:
        """Have every rank run the function."""
        import ray

        asked = [seat.where.remote(os.getcwd()) for seat in self.seats]
        where = [self._asked(index, question) for index, question in enumerate(asked)]
        if any(isinstance(each, RankLost) for each in where):
            return
        nodes = [node for node, _, _ in where]
        _, address, port = where[0]
        alone = len(set(nodes)) == 1
        beside, packed = Counter[str](), ray.put(function)
        threads = int(os.environ.get("OMP_NUM_THREADS", self.needs.cpus))
        for index, (seat, node) in enumerate(zip(self.seats, nodes, strict=True)):
            variables = {
                "RANK": str(index),
                "WORLD_SIZE": str(len(nodes)),
                "LOCAL_RANK": str(beside[node]),
                "LOCAL_WORLD_SIZE": str(nodes.count(node)),
                "MASTER_ADDR": "127.0.0.1" if alone else address,
                "MASTER_PORT": str(port),
            }
            beside[node] += 1
            self.runs[seat.run.remote(variables, max(1, threads), relay, packed, options)] = index

    def _asked(self, index: int, question: Any) -> Any:
        import ray

        try:
            return ray.get(question)
        except ray.exceptions.RayTaskError as error:  # what it could not even begin to do, another cannot either
            raise (error.cause or error) from None
        except ray.exceptions.RayError as error:
            self.answers[index] = RankLost(death_reason(error))
            return self.answers[index]

    def look(self) -> bool:
        """Hear which ranks have answered or are lost. True when there is no more to wait for."""
        import ray

        pending = [run for run, index in self.runs.items() if index not in self.answers]
        for run in ray.wait(pending, num_returns=len(pending), timeout=0)[0] if pending else ():
            self.answers[self.runs[run]] = self._asked(self.runs[run], run)
        return len(self.answers) == self.needs.ranks or any(
            isinstance(each, RankLost) for each in self.answers.values()
        )

    @property
    def failed(self) -> bool:
        """Whether a rank has failed or is lost."""
        return any(isinstance(each, RankLost) or each.word is not None for each in self.answers.values())

    def end(self) -> None:
        """End every rank, and give its place back."""
        import ray

        for seat in self.seats:
            ray.kill(seat)
        ray.util.remove_placement_group(self.group)


@dataclass(frozen=True)
class RunFailure:
    """Why ranks ended, and whether others in their place may fare better."""

    error: BaseException
    again: bool


def failure_of(answers: dict[int, RankResult | RankLost], size: int) -> RunFailure:
    """What is to be said of ranks of which some failed or are lost."""
    lost = {rank: each.why for rank, each in answers.items() if isinstance(each, RankLost)}
    told = {rank: each for rank, each in answers.items() if isinstance(each, RankResult) and each.word is not None}
    words = {rank: each.word for rank, each in told.items() if each.word is not None}
    failed = [rank for rank, word in words.items() if word.state == "failed"]
    if failed and (not lost or any(words[rank].mistake for rank in failed)):
        first = min(failed, key=lambda rank: words[rank].time)
        word = words[first]
        named = RankError(f"rank {first} of {size} failed: {word.text}", word.traceback, mistake=word.mistake)
        alone = told[first].error if size == 1 else None  # then it is told as without ranks
        return RunFailure(alone or named, told[first].broken)
    if lost:
        rank, why = min(lost.items())
        return RunFailure(RankError(f"rank {rank} of {size} was lost: {why}"), True)
    stopped = sorted((word.time, word.text, word.traceback) for word in words.values() if word.state == "stopped")
    if stopped:
        return RunFailure(RankError(*stopped[0][1:]), True)
    return RunFailure(RankError(f"rank {min(words)} of {size} ended without a result."), False)


def _sendable(error: BaseException) -> BaseException | None:
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return None
    return error
