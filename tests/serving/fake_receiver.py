"""A server process that receives weights like vLLM's workers, but over gloo, and reports what it received."""

from __future__ import annotations

import hashlib
import json
import math
import os
import sys
import time
import urllib.request
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from threading import Thread
from typing import Any

import torch
import torch.distributed as dist

from postlude.serving.vllm.shared_buffers import open_buffer
from tests.conftest import PATIENCE, SERVER
from tests.serving.fake_vllm import AnswerFunction, FakeVLLM, Refusal, deterministic_completion

Spoil = Callable[["Receiver", str, int], None]
"""Called with a path, and how often it has been asked for before."""


class Receiver(FakeVLLM):
    """The `workers` of one server, each with its own rank in the group; it reports `reported_workers` of them."""

    def __init__(
        self,
        answer: AnswerFunction = deterministic_completion,
        port: int = 0,
        *,
        workers: int = 1,
        reported_workers: int | None = None,
        spoil: Spoil | None = None,
    ) -> None:
        self.workers, self.spoil = workers, spoil
        self.reported_workers = workers if reported_workers is None else reported_workers
        self.groups: list[dist.ProcessGroupGloo] = []
        self.active, self.packed_bytes = False, 0
        self.tensors_by_worker: list[list[tuple[str, str, list[int], str]]] = [[] for _ in range(workers)]
        self.on_tensor: Callable[[str, torch.Tensor], None] = lambda name, tensor: None
        super().__init__(answer, port)

    def reply(self, path: str, body: Any) -> Any:
        if self.spoil is not None:
            self.spoil(self, path, self.calls.count(path) - 1)
        match path:
            case "/get_world_size":
                return {"world_size": self.reported_workers}
            case "/init_weight_transfer_engine":
                self.on_each_worker(self.join, body["init_info"])
            case "/shutdown_weight_transfer_engine":
                if self.active:
                    raise Refusal(500, "Cannot release a trainer connection during a weight update")
                self.groups = []
            case "/start_weight_update":
                if self.active:
                    raise Refusal(500, "start_weight_update called while a weight update is already active")
                self.active, self.tensors_by_worker = True, [[] for _ in range(self.workers)]
            case "/update_weights":
                if not (self.active and (self.groups or "handles" in body["update_info"])):
                    raise Refusal(500, "NCCL weight transfer not initialized")
                self.on_each_worker(self.receive_tensors, body["update_info"])
            case "/finish_weight_update":
                self.active, self.version = False, (body or {}).get("weight_version", self.version)
            case "/received":
                return {"taken": self.tensors_by_worker, "calls": self.calls, "version": self.version}
            case _:
                return super().reply(path, body)
        return {"message": "done"}

    def on_each_worker(self, act: Callable[[int, Any], None], info: Any) -> None:
        threads = [Thread(target=act, args=(worker, info), daemon=True) for worker in range(self.workers)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def join(self, worker: int, info: Any) -> None:
        assert info["packed"]
        self.packed_bytes = info["packed_buffer_size_bytes"]
        store = dist.TCPStore(info["master_address"], info["master_port"], is_master=False)
        rank = worker + info["rank_offset"]
        self.groups.append(dist.ProcessGroupGloo(store, rank, info["world_size"], timedelta(seconds=20)))
        self.groups.sort(key=lambda group: group.rank())

    def receive_tensors(self, worker: int, info: Any) -> None:
        """Receives tensors one after another until a buffer is full, as vLLM cuts them."""
        waiting = list(zip(info["names"], info["dtype_names"], info["shapes"], strict=True))
        self.packed_bytes = sys.maxsize if "handles" in info else self.packed_bytes
        while waiting:
            chunk, size = [], 0
            while waiting and size <= self.packed_bytes:
                name, dtype, shape = waiting.pop(0)
                chunk.append((name, dtype, shape, math.prod(shape) * getattr(torch, dtype).itemsize))
                size += chunk[-1][-1]
            if "handles" in info:
                data = open_buffer(torch.device("cpu"), info["handles"]["cpu"]).data[:size].clone()
            else:
                data = torch.empty(size, dtype=torch.uint8)
                self.groups[worker].broadcast(data, 0).wait()
            for (name, dtype, shape, _), part in zip(chunk, data.split([spec[-1] for spec in chunk]), strict=True):
                self.on_tensor(name, part.view(getattr(torch, dtype)).view(shape))  # in place, which has to be aligned
                self.tensors_by_worker[worker].append((name, dtype, shape, digest(part)))


def digest(data: torch.Tensor) -> str:
    return hashlib.sha256(data.contiguous().view(-1).view(torch.uint8).numpy().tobytes()).hexdigest()


class Dies:
    def __init__(self, path: str, times: int) -> None:
        self.path, self.times = path, times

    def __call__(self, receiver: Receiver, path: str, before: int) -> None:
        if path == self.path and before >= self.times:
            os._exit(1)


class Refuses:
    def __init__(self, path: str, status: int = 400, times: int = 1000) -> None:
        self.path, self.status, self.times = path, status, times

    def __call__(self, receiver: Receiver, path: str, before: int) -> None:
        if path == self.path and before < self.times:
            raise Refusal(self.status, "no")


class Hangs:
    def __init__(self, path: str) -> None:
        self.path = path

    def __call__(self, receiver: Receiver, path: str, before: int) -> None:
        if path == self.path:
            time.sleep(60)


class RemoteReceiver:
    """A receiver in another process, for the duration of the context."""

    def __init__(self, workers: int = 1, reported_workers: int | None = None, spoil: Spoil | None = None) -> None:
        self.options = {"workers": workers, "reported_workers": reported_workers, "spoil": spoil}

    def __enter__(self) -> RemoteReceiver:
        parent_pipe, child_pipe = SERVER.Pipe()
        self.process = SERVER.Process(target=_run, args=(child_pipe, self.options), daemon=True)
        self.process.start()
        child_pipe.close()
        assert parent_pipe.poll(PATIENCE)
        self.url: str = parent_pipe.recv()
        return self

    def received(self) -> Any:
        with urllib.request.urlopen(f"{self.url}/received", timeout=300) as answer:
            return json.load(answer)

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.join()


def _run(reported_workers: Connection, options: dict[str, Any]) -> None:
    torch.set_num_threads(1)
    reported_workers.send(Receiver(**options).url)
    time.sleep(600)
