"""What many agents at a time cost beside sampling: the time of each call over its sampler's, and memory.

A service in another process runs scripted agents, which ask for completions one after the other over one connection
each. The sampler is a clock: it completes a request after a random time, which the completion's text states. What a
call took beyond that, as its client sees it, is the overhead of the proxy, the chat template, the tokenizer and the
transcripts. Rounds called `floor` have the same clients and a server that reads the request, waits for such a time and
replies: its overhead is that of HTTP, the clients and the machine.

In `--rounds` episodes begin one after the other, and agents work for some time between calls. In the last one all
episodes begin at once and do not pause: it shows how long a burst of calls waits for the processor. `chrt` gives the
processes precedence over others of the machine. `collections_*` are the pauses of garbage collections.

    OMP_NUM_THREADS=1 chrt -r 1 taskset -c 0,1 python benchmarks/agents.py --out benchmarks/results/agents_cpu.json
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import heapq
import itertools
import json
import multiprocessing
import os
import random
import socket
import threading
import time
from collections.abc import Sequence
from contextlib import closing, nullcontext
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request as HTTPRequest
from starlette.responses import JSONResponse
from starlette.routing import Route

from postlude.data.chat import Encoder
from postlude.generate.protocol import Completion, FinishedCompletion, Request
from postlude.generate.sampling_params import SamplingParams
from postlude.hf.load import byte_tokenizer
from postlude.recipes.rollouts.sampler import short_collections
from postlude.rollout.agent_programs import AgentLimits, ServiceAgent
from postlude.rollout.agents import AgentEnvironment, AgentOptions
from postlude.rollout.conversations import Conversations, PromptSource, TrajectoryGroup
from postlude.rollout.tasks import Task

BUDGET = 16_384
KEEP_SECONDS = 5.0  # that agents' clients keep a connection without a request


class ClockEngine:
    """Completes each request after a random time."""

    fixed_order = False

    def __init__(self, seconds: float) -> None:
        self.seconds, self.tokenizer, self.ids = seconds, byte_tokenizer(), itertools.count()
        self.due: list[tuple[float, int, str]] = []
        self.cancelled: set[int] = set()

    def submit(self, request: Request) -> int:
        """Starts a request."""
        request_id = next(self.ids)
        delay = random.Random(request.sampling.seed).uniform(0.5, 1.5) * self.seconds
        heapq.heappush(self.due, (time.monotonic() + delay, request_id, f"{delay:09.6f}"))
        return request_id

    def cancel(self, request_id: int) -> None:
        """Ends a request."""
        self.cancelled.add(request_id)

    def poll(self, timeout: float | None = 0.0) -> list[FinishedCompletion]:
        """Returns what is complete."""
        finished = []
        while self.due and self.due[0][0] <= time.monotonic():
            _, request_id, text = heapq.heappop(self.due)
            tokens = list(text.encode())
            completion = Completion(tokens, [-1.0] * len(tokens), [-1.0] * len(tokens), "stop", text)
            if request_id not in self.cancelled:
                finished.append(FinishedCompletion(request_id, 0, completion))
        return finished


async def _read(reader: asyncio.StreamReader) -> Any:
    """Returns the JSON of a request or a reply."""
    head = await reader.readuntil(b"\r\n\r\n")
    length = next(int(line[15:]) for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:"))
    return json.loads(await reader.readexactly(length))


def _message(start: str, body: Any) -> bytes:
    content = json.dumps(body).encode()
    head = f"{start}\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: {len(content)}\r\n\r\n"
    return head.encode() + content


async def _episode(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Runs an episode, and replies with the overhead of each call, in milliseconds."""
    body = await _read(reader)
    task, key, address = body["task"], body["environment"]["OPENAI_API_KEY"], urlsplit(body["url"])
    connection, used = None, 0.0
    start = f"POST /v1/chat/completions HTTP/1.1\r\nAuthorization: Bearer {key}"
    messages, overheads = [{"role": "system", "content": "x" * task["characters"]}], {}
    for call in range(task["calls"]):
        if task["pause"]:
            await asyncio.sleep(random.Random(f"{task['prompt']} {call}").uniform(0.5, 1.5) * task["pause"])
        messages.append({"role": "user", "content": f"{task['prompt']} {call}"})
        request = _message(start, {"model": "any", "messages": messages})
        if connection is not None and time.monotonic() - used > KEEP_SECONDS:
            connection[1].close()
            connection = None
        began = time.monotonic()
        connection = connection or await asyncio.open_connection(address.hostname, address.port)
        connection[1].write(request)
        reply = (await _read(connection[0]))["choices"][0]["message"]
        overheads[f"ms_{call}"] = ((used := time.monotonic()) - began - float(reply["content"])) * 1e3
        messages.append({"role": "assistant", "content": reply["content"]})
    if connection is not None:
        connection[1].close()
    writer.write(_message("HTTP/1.1 200 OK", {"reward": 1.0, **overheads}))
    await writer.drain()
    writer.close()


def _serve(port: Any) -> None:
    async def serve() -> None:
        server = await asyncio.start_server(_episode, "127.0.0.1", 0, backlog=4096)
        port.send(server.sockets[0].getsockname()[1])
        await server.serve_forever()

    asyncio.run(serve())


class CollectionPauses:
    """The processor time of each garbage collection, in milliseconds: all threads wait meanwhile."""

    def __init__(self) -> None:
        self.began, self.pauses = 0.0, list[float]()
        gc.callbacks.append(self._add)

    def take(self) -> dict[str, float]:
        """Returns the sum and the longest of the pauses since the last call."""
        pauses, self.pauses = self.pauses or [0.0], []
        return {"collections_sum_ms": sum(pauses), "collections_max_ms": max(pauses)}

    def _add(self, phase: str, info: dict[str, int]) -> None:
        if phase == "start":
            self.began = time.thread_time()
        else:
            self.pauses.append((time.thread_time() - self.began) * 1e3)


def resident_mib() -> float:
    """Returns the memory of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20


def percentile(numbers: Sequence[float], share: float) -> float:
    """Returns the number that this share of the numbers is not above."""
    return sorted(numbers)[min(len(numbers) - 1, int(share * len(numbers)))]


async def _wait_and_reply(request: HTTPRequest) -> JSONResponse:
    """Replies after a sampler's time, and computes nothing."""
    await request.json()
    delay = random.uniform(0.5, 1.5) * request.app.state.seconds
    await asyncio.sleep(delay)
    return JSONResponse({"choices": [{"message": {"content": f"{delay:09.6f}"}}]})


def measure_floor(address: str, options: argparse.Namespace) -> dict[str, float | str]:
    """Returns the figures of a round of episodes whose model is a server that only waits."""
    app = Starlette(routes=[Route("/v1/chat/completions", _wait_and_reply, methods=["POST"])])
    app.state.seconds = options.seconds
    server = uvicorn.Server(uvicorn.Config(app, log_level="error", access_log=False))
    listening = socket.create_server(("127.0.0.1", 0), backlog=4096)
    thread = threading.Thread(target=lambda: asyncio.run(server.serve([listening])), daemon=True)
    thread.start()
    url, service = f"http://127.0.0.1:{listening.getsockname()[1]}", urlsplit(address)
    interval = (options.seconds + options.pause) / options.episodes

    async def episode(index: int) -> list[float]:
        await asyncio.sleep(index * interval)
        reader, writer = await asyncio.open_connection(service.hostname, service.port)
        task = dict(_task(index, options, options.pause).example)
        body = {"task": task, "url": url, "environment": {"OPENAI_API_KEY": "any"}}
        writer.write(_message("POST / HTTP/1.1", body))
        reply = await _read(reader)
        writer.close()
        return [value for name, value in reply.items() if name.startswith("ms_")]

    async def episodes() -> list[float]:
        return list(itertools.chain(*await asyncio.gather(*map(episode, range(options.episodes)))))

    began, processor = time.monotonic(), time.process_time()
    times = asyncio.run(episodes())
    figures = _figures(times, time.monotonic() - began, time.process_time() - processor)
    server.should_exit = True
    thread.join()
    print({"arrivals": "floor", **{name: round(value, 2) for name, value in figures.items()}})
    return {"arrivals": "floor", **figures}


def measure(address: str, options: argparse.Namespace) -> list[dict[str, float | str]]:
    """Returns the figures of each round of episodes."""
    environment = AgentEnvironment([_task(0, options, 0.0)], ServiceAgent(address), _agent_options(options))
    engine, rounds, pauses = ClockEngine(options.seconds), list[dict[str, float | str]](), CollectionPauses()
    with (
        short_collections() if options.short_collections else nullcontext(),
        closing(environment),
        closing(Conversations(engine, budget=BUDGET, background=True)) as conversations,
    ):
        _round(conversations, environment, options, "warm-up", 0)
        for number in range(1, options.rounds + options.bursts + 1):
            arrivals = "spread" if number <= options.rounds else "burst"
            pauses.take()
            figures = _round(conversations, environment, options, arrivals, number)
            rounds.append({"arrivals": arrivals, **figures, **pauses.take()})
            print({name: round(value, 2) if isinstance(value, float) else value for name, value in rounds[-1].items()})
    return rounds


def _round(
    conversations: Conversations, environment: AgentEnvironment, options: argparse.Namespace, arrivals: str, number: int
) -> dict[str, float]:
    """Runs all episodes once, and returns the figures. A warm-up has one episode."""
    episodes = 1 if arrivals == "warm-up" else options.episodes
    pause = options.pause if arrivals == "spread" else 0.0
    interval = (options.seconds + pause) / episodes if arrivals == "spread" else 0.0
    source, done = PromptSource(environment, Encoder(tokenizer=byte_tokenizer())), list[TrajectoryGroup]()
    began, processor = time.monotonic(), time.process_time()
    for index in range(episodes):
        sampling = SamplingParams(max_new_tokens=16, seed=number * episodes + index)
        conversations.start(TrajectoryGroup.of(_task(index, options, pause), index, (), sampling, 1, source))
        if interval:
            done += conversations.poll(0.0)
            time.sleep(max(0.0, began + (index + 1) * interval - time.monotonic()))
    while len(done) < episodes:
        done += conversations.poll(1.0)
    seconds, processor = time.monotonic() - began, time.process_time() - processor
    trajectories = [trajectory for group in done for trajectory in group.trajectories]
    errors = [entry.score.error for entry in trajectories if entry.score and entry.score.error]
    assert not errors, errors[0]
    sampled = sum(sum(transcript.mask) for entry in trajectories for transcript in entry.transcripts)
    assert sampled == episodes * options.calls * len("01.000000")
    times = [value for entry in trajectories for value in entry.components.values()]
    return _figures(times, seconds, processor)


def _figures(times: Sequence[float], seconds: float, processor: float) -> dict[str, float]:
    return {
        "seconds": seconds,
        "calls_per_second": len(times) / seconds,
        "cpu_ms_per_call": processor / len(times) * 1e3,
        **{f"overhead_p{share}_ms": percentile(times, share / 100) for share in (50, 90, 99)},
        "overhead_max_ms": max(times),
        "resident_mib": resident_mib(),
    }


def _task(index: int, options: argparse.Namespace, pause: float) -> Task:
    row = {"prompt": f"task {index}", "calls": options.calls, "characters": options.characters, "pause": pause}
    return Task(str(row["prompt"]), row, f"row {index}")


def _agent_options(options: argparse.Namespace) -> AgentOptions:
    return AgentOptions(AgentLimits(), concurrency=options.episodes)


def main() -> None:
    """Measures, and writes the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--episodes", type=int, default=500, help="at a time")
    parser.add_argument("--calls", type=int, default=3, help="of an episode")
    parser.add_argument("--seconds", type=float, default=7.0, help="of the sampler for a call, on average")
    parser.add_argument("--pause", type=float, default=3.0, help="of an agent before each call, on average, in seconds")
    parser.add_argument("--characters", type=int, default=1000, help="of the first message, each a token")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--bursts", type=int, default=1, help="rounds whose episodes begin at once")
    parser.add_argument(
        "--short-collections",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="garbage collections as in a run of agents",
    )
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    receiver, sender = multiprocessing.Pipe(duplex=False)
    service = multiprocessing.get_context("spawn").Process(target=_serve, args=(sender,), daemon=True)
    service.start()
    load = os.getloadavg()[0]
    address = f"http://127.0.0.1:{receiver.recv()}/"
    rounds = [measure_floor(address, options), *measure(address, options), measure_floor(address, options)]
    service.terminate()
    settings = {name: value for name, value in vars(options).items() if name != "out"}
    if options.out:
        machine = {"cores": len(os.sched_getaffinity(0)), "load_before": load}
        options.out.write_text(
            json.dumps({"settings": settings, "machine": machine, "rounds": rounds}, indent=1) + "\n"
        )


if __name__ == "__main__":
    main()
