"""Load on a Tinker server: many clients, each of which trains and samples in small requests. Prints latencies.

    python benchmarks/tinker_load.py                        the HTTP half alone: a backend that computes nothing
    python benchmarks/tinker_load.py --model tiny-dense     a server of this model
    python benchmarks/tinker_load.py http://127.0.0.1:PORT  a server that runs

A client repeats: one pass of 4 sequences, an optimizer step, and 4 samples at once. A latency is the time from the
request to its fetched result. Errors are counted, and the memory of the server is measured before and after. The time
of the backend alone is that of one client without HTTP (of a sample: 4 at once). `--flood` has the first client send
samples without waiting, to see it slowed and not the others.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))

from postlude.generate.sampling_params import SamplingParams
from postlude.tinker.app import PROTOBUF
from postlude.tinker.backend import (
    AdamParams,
    Datum,
    ForwardBackward,
    LoRAConfig,
    ModelSpec,
    OptimStep,
    PassRequest,
    SampleRequest,
    TinkerBackend,
)
from postlude.tinker.engine_backend import EngineBackend
from postlude.tinker.limits import Limits
from postlude.tinker.server import run_server, serve
from postlude.tinker.state import StateDirectory
from postlude.tinker.wire import ForwardBackwardRequest

Latencies = dict[str, list[float]]
BASE = "fake/base"
SEQUENCES, LENGTH, SAMPLES, PROMPT, NEW_TOKENS = 4, 64, 4, 32, 8


class HTTPClient:
    """Keeps connections open and reuses them."""

    def __init__(self, url: str, key: str) -> None:
        split = urlsplit(url)
        self._address, self._key = (split.hostname, split.port), key
        self._idle: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = []

    async def post(self, path: str, body: Any) -> tuple[int, bytes]:
        raw = body if isinstance(body, bytes) else json.dumps(body).encode()
        kind = PROTOBUF if isinstance(body, bytes) else "application/json"
        head = f"POST /api/v1/{path} HTTP/1.1\r\nHost: localhost\r\nX-API-Key: {self._key}\r\nContent-Type: {kind}\r\n"
        reader, writer = self._idle.pop() if self._idle else await asyncio.open_connection(*self._address)
        writer.write(f"{head}Content-Length: {len(raw)}\r\n\r\n".encode() + raw)
        answer = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
        length = int(answer.partition("content-length: ")[2].partition("\r\n")[0] or 0)
        content = await reader.readexactly(length)
        self._idle.append((reader, writer))
        return int(answer.split(" ", 2)[1]), content

    async def call(self, path: str, body: Any) -> bytes:
        """Submits a request and fetches its result, as the real client does; 429 is waited out."""
        while True:
            status, content = await self.post(path, body)
            if status == 200:
                break
            assert status == 429, (path, status, content)
            await asyncio.sleep(1.0)
        request_id = json.loads(content)["request_id"]
        while True:
            status, content = await self.post("retrieve_future", {"request_id": request_id})
            if status == 200:
                assert b'"error"' not in content[:10], content
                return content
            assert status == 408, (status, content)


def pass_body(model_id: str, seq_id: int, length: int = LENGTH) -> bytes:
    message = ForwardBackwardRequest(model_id=model_id, seq_id=seq_id, loss_fn="cross_entropy")
    for _ in range(SEQUENCES):
        datum = message.data.add()
        datum.model_input.add().encoded_text.tokens = np.ones(length, "<i4").tobytes()
        for name, kind, values in (
            ("target_tokens", 2, np.ones(length, "<i8")),
            ("weights", 1, np.ones(length, "<f4")),
        ):
            tensor = datum.loss_fn_inputs[name]
            tensor.dense, tensor.dtype = values.tobytes(), kind
            tensor.shape.append(length)
    raw: bytes = message.SerializeToString()
    return raw


async def client(url: str, base: str, number: int, until: float, latencies: Latencies, *, flood: bool) -> None:
    http = HTTPClient(url, f"tml-load-{number}")
    session = json.loads((await http.post("create_session", {"sdk_version": "load"}))[1])["session_id"]
    body: Any = {"session_id": session, "sampling_session_seq_id": 0, "base_model": base}
    sampler = json.loads((await http.post("create_sampling_session", body))[1])["sampling_session_id"]
    body = {"session_id": session, "model_seq_id": 0, "base_model": base, "lora_config": {"rank": 4}}
    model = json.loads(await http.call("create_model", body))["model_id"]
    samples, seq = 0, 0

    async def timed(kind: str, path: str, request: Any) -> None:
        start = time.perf_counter()
        await http.call(path, request)
        latencies[kind].append(time.perf_counter() - start)

    def sample() -> Any:
        nonlocal samples
        samples += 1
        prompt = {"chunks": [{"type": "encoded_text", "tokens": [1] * PROMPT}]}
        return {
            "sampling_session_id": sampler,
            "seq_id": samples,
            "prompt": prompt,
            "sampling_params": {"max_tokens": NEW_TOKENS},
            "num_samples": 1,
        }

    while time.perf_counter() < until:
        if flood:
            await asyncio.gather(*(timed("flood", "asample", sample()) for _ in range(256)))
            continue
        seq += 2
        await asyncio.gather(
            timed("pass", "forward_backward", pass_body(model, seq - 1)),
            timed("step", "optim_step", {"model_id": model, "seq_id": seq, "adam_params": {}}),
        )
        await asyncio.gather(*(timed("sample", "asample", sample()) for _ in range(SAMPLES)))


def make_backend(model: str | None) -> TinkerBackend:
    """Returns the backend of a model; without one, a backend that computes nothing."""
    if model is not None:
        return EngineBackend([f"{BASE}={model}"], device="cpu")
    from tests.tinker.fake_backend import FakeBackend

    return FakeBackend()


def start_server(model: str | None, state: str, pipe: Any) -> None:
    limits = Limits(samples_per_key=64, models=1024)
    directory = StateDirectory(Path(state))
    serving = serve(make_backend(model), directory, host="127.0.0.1", port=0, keys=None, limits=limits, ready=pipe.send)
    run_server(serving)


async def time_backend(model: str | None, rounds: int = 10) -> dict[str, float]:
    """Returns the median seconds of a pass, a step and 4 samples at once, with one client and without HTTP."""
    backend, seconds = make_backend(model), defaultdict[str, list[float]](list)
    await backend.start()
    await backend.create_model("one", ModelSpec(BASE, LoRAConfig(4)))
    await backend.open_sampler("base", BASE, None)
    inputs = {"target_tokens": np.ones(LENGTH, np.int64), "weights": np.ones(LENGTH, np.float32)}
    rows = [Datum(np.ones(LENGTH, np.int32), inputs)] * SEQUENCES
    request = SampleRequest(np.ones(PROMPT, np.int32), SamplingParams(max_new_tokens=NEW_TOKENS))
    for _ in range(rounds):
        start = time.perf_counter()
        await backend.train(ForwardBackward("one", PassRequest(rows, "cross_entropy", {}, forward_only=False)))
        passed = time.perf_counter()
        await backend.train(OptimStep("one", AdamParams()))
        stepped = time.perf_counter()
        await asyncio.gather(*(backend.sample("base", request) for _ in range(SAMPLES)))
        for kind, duration in zip(
            ("pass", "step", "sample"), np.diff([start, passed, stepped, time.perf_counter()]), strict=True
        ):
            seconds[kind].append(float(duration))
    await backend.stop()
    return {kind: float(np.median(values)) for kind, values in seconds.items()}


def resident_mib(pid: int) -> float:
    """Returns the memory of a process and of all that it started."""
    lines = subprocess.check_output(["ps", "-e", "-o", "pid=,ppid=,rss="], text=True).splitlines()
    rows = [tuple(map(int, line.split())) for line in lines]
    tree = {pid}
    while new := {child for child, parent, _ in rows if parent in tree} - tree:
        tree |= new
    return sum(size for child, _, size in rows if child in tree) / 1024


async def run(url: str, options: argparse.Namespace, errors: list[str]) -> Latencies:
    latencies: Latencies = defaultdict(list)
    until = time.perf_counter() + options.seconds

    async def guarded(number: int) -> None:
        try:
            await client(url, options.base, number, until, latencies, flood=options.flood and number == 0)
        except (AssertionError, OSError, EOFError) as error:
            errors.append(f"client {number}: {error!r}")

    await asyncio.gather(*(guarded(number) for number in range(options.clients)))
    return latencies


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("url", nargs="?", help="a server that runs; else one is started")
    parser.add_argument("--model", help="the model of the server that is started; else its backend computes nothing")
    parser.add_argument("--base", default=BASE, help="the name of the base model")
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=120.0)
    parser.add_argument("--flood", action="store_true")
    options = parser.parse_args()
    errors: list[str] = []
    alone = asyncio.run(time_backend(options.model)) if options.url is None else {}
    with tempfile.TemporaryDirectory() as state:
        process, memory = None, [0.0, 0.0]
        if options.url is None:
            receiving, sending = multiprocessing.Pipe(duplex=False)
            process = multiprocessing.get_context("spawn").Process(
                target=start_server, args=(options.model, state, sending)
            )
            process.start()
            options.url = receiving.recv()
            memory[0] = resident_mib(process.pid or 0)
        start = time.perf_counter()
        result = asyncio.run(run(options.url, options, errors))
        elapsed = time.perf_counter() - start
        if process is not None:
            memory[1] = resident_mib(process.pid or 0)
            process.terminate()
            process.join()
    print(f"{options.clients} clients, {elapsed:.0f} s, {len(errors)} errors", *errors[:5], sep="\n")
    if process is not None:
        print(f"memory of the server: {memory[0]:.0f} MiB at the start, {memory[1]:.0f} MiB at the end")
    busy = 0.0
    for kind, latencies in result.items():
        p50, p99 = np.percentile(latencies, [50, 99])
        rate = len(latencies) / elapsed
        line = f"{kind:6} {len(latencies):7} requests {rate:7.0f}/s  p50 {1e3 * p50:6.0f} ms  p99 {1e3 * p99:6.0f} ms"
        if kind in alone:
            busy += alone[kind] * len(latencies) / (SAMPLES if kind == "sample" else 1)
            line += f"  backend alone {1e3 * alone[kind]:6.1f} ms"
        print(line)
    if alone:
        print(f"the backend alone needs {busy:.1f} s for these requests, one after another: {busy / elapsed:.0%}")


if __name__ == "__main__":
    main()
