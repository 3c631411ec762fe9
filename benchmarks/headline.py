"""Measures the figures of the README and of docs/benchmarks.md on one GPU in one run, each of them in three rounds.

    PYTHONPATH=src python benchmarks/headline.py --seconds 500 --json benchmarks/results/headline_h200.json
    PYTHONPATH=src python benchmarks/headline.py --list                      # groups and the seconds of a round
    PYTHONPATH=src python benchmarks/headline.py --smoke --rounds 1          # tiny, on any machine
    python benchmarks/headline.py --draw benchmarks/results/headline_h200.json docs/benchmarks.md README.md

Each group of cases (headline_cases.py) has a process, so that a peer that changes transformers' classes changes no
other. All start together and compile their kernels, with models of one layer. Then one process at a time measures: a
round is one turn of each group, the most important first. The JSON is written after every case. With `--seconds` a turn
that would end too late, or take the time of a later turn of a more important group, is left out. One that is not
finished in time is ended. What was measured is kept.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import sys
import time
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import headline_table
from headline_table import CaseResult

GRACE = 5.0  # seconds before the limit in which no turn runs
WARM_UP = 180.0  # seconds until all have started and are warm, at most
SLOW = 6.0  # times its estimate after which a turn is given up


def serve(connection: Connection, name: str, device: str) -> None:
    """Runs turns of a group until the other end is closed. Sends each case as a pair, and None after the last."""
    import headline_cases
    from workloads import OUT_OF_MEMORY, free_memory, torch

    group = headline_cases.BY_NAME[name]
    with group.context(device):
        connection.send(None)
        while True:
            try:
                scale = connection.recv()
            except EOFError:
                return
            try:
                for case in group.cases.run(scale):
                    connection.send(case)
            except torch.OutOfMemoryError:
                connection.send(("all", {"failed": OUT_OF_MEMORY}))
            except Exception as error:
                traceback.print_exc()
                connection.send(("all", {"failed": f"{type(error).__name__}: {str(error).splitlines()[0][:200]}"}))
            free_memory(device)
            connection.send(None)


@dataclass
class Worker:
    """A process of one group."""

    name: str
    device: str
    process: Any = None
    connection: Connection | None = None
    end_reason: str = ""

    def start(self) -> None:
        context = multiprocessing.get_context("spawn")
        self.connection, other = context.Pipe()
        self.process = context.Process(target=serve, args=(other, self.name, self.device), daemon=True)
        self.process.start()
        other.close()  # so that the end of the process ends a `recv`

    def request(self, scale: Any) -> None:
        assert self.connection is not None
        try:
            self.connection.send(scale)
        except OSError:
            self.end("its process ended")

    def results(self, deadline: float) -> Iterator[tuple[str, CaseResult]]:
        """Yields what it sends until it has finished, was too slow, or ended, which `end_reason` then says."""
        for _, answer in worker_results([self], deadline):
            yield answer

    def end(self, reason: str = "") -> None:
        if self.connection is not None:
            self.connection.close()
            self.process.kill()
            self.process.join()
        self.connection, self.end_reason = None, reason


def worker_results(workers: Sequence[Worker], deadline: float) -> Iterator[tuple[Worker, tuple[str, CaseResult]]]:
    """Yields what these send, as it comes, until all have finished, were too slow, or ended."""
    busy = {worker.connection: worker for worker in workers if worker.connection is not None}
    while busy:
        ready = wait(list(busy), max(0.0, deadline - time.monotonic()))
        if not ready:
            for worker in busy.values():
                worker.end("not finished in time")
            return
        for connection in ready:
            worker = busy[connection]
            try:
                answer = connection.recv()
            except (EOFError, OSError):
                worker.end("its process ended")
                answer = None
            if answer is None:
                del busy[connection]
            else:
                yield worker, answer


@dataclass
class Run:
    """The figures so far, and the deadline of the measurement."""

    results: Any
    deadline: float
    workers: dict[str, list[Worker]]
    """By group, the process of each round: the same one, or for a group that is `fresh` another one."""
    seconds: dict[str, float]
    """By group, what a turn takes: its estimate, then the least that one took."""

    @property
    def processes(self) -> list[Worker]:
        return list({id(worker): worker for of_rounds in self.workers.values() for worker in of_rounds}.values())

    def turn(self, worker: Worker, number: int, scale: Any) -> None:
        """Measures a group once."""
        began, estimate = time.monotonic(), self.seconds[worker.name]
        limit = min(self.deadline, began + SLOW * max(estimate, 20.0))
        worker.request(scale)
        for case, result in worker.results(limit):
            self.add(worker.name, case, number, result)
        if worker.end_reason:
            self.add(worker.name, "all", number, {"failed": worker.end_reason})
        took = time.monotonic() - began
        self.seconds[worker.name] = took if number == 1 else min(took, estimate)  # the first may still compile
        self.results.turns.append([worker.name, number, round(took, 1)])
        self.results.write()

    def add(self, group: str, case: str, number: int, result: dict[str, Any]) -> None:
        self.results.add({"group": group, "case": case, "round": number} | result)
        print(f"{number} {group:<24} {case:<46} {headline_table.result_line(result)}", flush=True)


def options(words: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--groups", nargs="+", metavar="NAME", help="only these, see --list")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=3600.0, help="of all of it, at most")
    parser.add_argument("--device", choices=["cpu", "cuda"])
    parser.add_argument("--commit", help="of a copy of the tree without its repository")
    parser.add_argument("--json", type=Path, help="written after each case")
    parser.add_argument("--smoke", action="store_true", help="tiny, on any machine")
    parser.add_argument("--list", action="store_true", help="print the groups and their estimated seconds")
    parser.add_argument("--draw", nargs="+", type=Path, metavar="FILE", help="a JSON file, and pages to write it into")
    return parser.parse_args(words)


def main(words: Sequence[str] | None = None) -> list[dict[str, Any]]:
    began = time.monotonic()
    arguments = options(words)
    if arguments.draw:
        headline_table.draw(arguments.draw[0], arguments.draw[1:])
        return []
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "4")  # of each process that compiles
    import headline_cases
    import torch

    for name in arguments.groups or ():
        if name not in headline_cases.BY_NAME:
            raise SystemExit(f"there is no group {name!r}. The groups are {', '.join(headline_cases.BY_NAME)}.")
    groups = [group for group in headline_cases.GROUPS if group.name in (arguments.groups or headline_cases.BY_NAME)]
    if arguments.list:
        print("\n".join(f"{group.seconds:5.0f} s  {group.name}" for group in groups))
        print(f"{sum(group.seconds for group in groups):5.0f} s  a round")
        return []
    device = arguments.device or ("cuda" if torch.cuda.is_available() else "cpu")
    results = results_of(device, arguments)
    rounds = range(arguments.rounds)
    workers = {
        group.name: [Worker(group.name, device) for _ in rounds]
        if group.fresh
        else [Worker(group.name, device)] * len(rounds)
        for group in groups
    }
    estimates = {group.name: group.seconds for group in groups}
    run = Run(results, began + arguments.seconds - GRACE, workers, estimates)
    try:
        measure(run, groups, arguments.rounds, device, arguments.smoke)
    finally:
        for worker in run.processes:
            worker.end(worker.end_reason)
        results.seconds = round(time.monotonic() - began, 1)
        results.write()
    print("\n".join(headline_table.report(headline_table.read(results.to_json()))))
    return list(results.cases)


def results_of(device: str, arguments: argparse.Namespace) -> Any:
    """Returns the results of the other benchmarks, with what this one adds."""
    from workloads import Results

    @dataclass
    class Rounds(Results):
        started: str = datetime.now(UTC).isoformat(timespec="minutes")
        rounds: int = arguments.rounds
        seconds: float = 0.0
        turns: list[list[Any]] = field(default_factory=list)
        left_out: list[list[Any]] = field(default_factory=list)

    return Rounds(" ".join(sys.argv), device, arguments.json, commit=arguments.commit)


def measure(run: Run, groups: Sequence[Any], rounds: int, device: str, tiny: bool) -> None:
    import headline_cases

    began = time.monotonic()
    lasting_workers = [run.workers[group.name][0] for group in groups if not group.fresh]
    for worker in run.processes:
        worker.start()
        if worker in lasting_workers and not tiny:
            worker.request(headline_cases.Scale(device, layers=1))
    for _ in worker_results(run.processes, run.deadline):
        pass
    print(f"started {len(run.processes)} processes in {time.monotonic() - began:.0f} s", flush=True)
    if not tiny:
        for worker, (case, result) in worker_results(lasting_workers, min(run.deadline, began + WARM_UP)):
            run.add(worker.name, case, 0, result | {"warm_after": round(time.monotonic() - began, 1)})
    for worker in run.processes:
        if worker.end_reason:
            run.add(worker.name, "all", 0, {"failed": worker.end_reason})
    print(f"warm in {time.monotonic() - began:.0f} s, {run.deadline - time.monotonic():.0f} s are left", flush=True)
    for number in range(1, rounds + 1):
        for place, group in enumerate(groups):
            worker = run.workers[group.name][number - 1]
            if worker.end_reason:
                continue
            before = [run.seconds[other.name] for other in groups[:place]]
            if time.monotonic() + run.seconds[group.name] + reserved(before, number, rounds) > run.deadline:
                run.results.left_out.append([group.name, number])
                continue
            run.turn(worker, number, headline_cases.Scale(device, tiny))
            if group.fresh:
                worker.end()


def reserved(before: Sequence[float], number: int, rounds: int) -> float:
    """Returns the seconds of later rounds that more important groups need, which come `before` this one.

    Every group gets a first round. A further one is for those that leave enough time for them.
    """
    return (rounds - number) * sum(before) if number > 1 else 0.0


if __name__ == "__main__":
    main()
