"""A pass that is sent ahead is decoded while others run, and gives the same results."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import signal
import threading
from collections.abc import Iterator
from dataclasses import replace
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import pytest

from postlude.tinker import worker_process
from postlude.tinker.backend import AdamParams, ForwardBackward, ModelLost, OptimStep, PassRequest
from postlude.tinker.engine_backend import EngineBackend
from postlude.tinker.messages import RAN, RESULT, Call, Cancel, StagePass
from postlude.tinker.rank_connection import RankConnection, StagedPasses
from tests.conftest import SERVER

from .test_worker import SPECS, data

PASS = PassRequest(data(1), "cross_entropy", {}, forward_only=True)


@pytest.fixture
def connection_pair() -> Iterator[tuple[Connection, Connection]]:
    """Both ends of a connection."""
    connection, child_connection = multiprocessing.Pipe()
    with connection, child_connection:
        yield connection, child_connection


def test_calls_keep_order_and_earlier_passes_are_staged(connection_pair: tuple[Connection, Connection]) -> None:
    readers = list[str]()

    def read(request: PassRequest) -> Any:
        readers.append(threading.current_thread().name)
        if request.loss_fn == "unknown":
            raise ValueError("the loss is unknown.")
        return request.loss_fn

    staged, first, second = StagedPasses(read), Call(3, ForwardBackward("m", 0)), Call(4, ForwardBackward("m", 1))
    connection_pair[1].send(
        [StagePass(0, PASS), StagePass(1, replace(PASS, loss_fn="unknown")), StagePass(2, PASS), first]
    )
    connection_pair[1].send([StagePass(2, None), second])
    connection_pair[1].send([Cancel(4), None])
    with RankConnection(connection_pair[0], staged) as connection:
        assert connection.recv() == first
        assert staged.take(0) == "cross_entropy"
        with pytest.raises(ValueError, match="the loss is unknown"):
            staged.take(1)
        assert connection.poll(10)
        assert connection.poll()
        assert connection.recv() == second
        with pytest.raises(KeyError):
            staged.take(2)
        assert connection.recv() == Cancel(4)
        assert connection.recv() is None
        assert not connection.poll(0.01)
        connection.send_at_once((RAN, 0, None))
        assert connection_pair[1].recv() == [(RAN, 0, None)]
        for number in range(100):
            connection.send((RESULT, number, "result"))
    assert readers == ["tinker calls"] * 3
    received = list[Any]()
    while connection_pair[1].poll():
        received += connection_pair[1].recv()
    assert received == [(RESULT, number, "result") for number in range(100)]  # the last ones too


def test_call_stream_ends_when_http_process_exits(connection_pair: tuple[Connection, Connection]) -> None:
    with RankConnection(connection_pair[0], StagedPasses(Any)) as connection:
        connection_pair[1].send([Call(1, OptimStep("m", AdamParams()))])
        connection_pair[1].close()
        assert connection.recv() == Call(1, OptimStep("m", AdamParams()))
        assert connection.recv() is None
        connection.send((RESULT, 1, {}))


def test_message_that_cannot_be_unpickled_raises(connection_pair: tuple[Connection, Connection]) -> None:
    with RankConnection(connection_pair[0], StagedPasses(Any)) as connection:
        connection_pair[1].send_bytes(b"no pickle")
        with pytest.raises(Exception, match=r"pickle|load key"):
            connection.recv()


def test_result_that_cannot_be_pickled_raises(connection_pair: tuple[Connection, Connection]) -> None:
    with RankConnection(connection_pair[0], StagedPasses(Any)) as connection:
        connection.send((RESULT, 1, threading.Lock()))  # cannot be pickled
        assert connection.poll(60)
        with pytest.raises(Exception, match="pickle"):
            connection.recv()


@pytest.mark.slow  # ranks start twice: the second time after a kill
async def test_staged_passes_equal_unstaged_and_are_lost_with_their_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    others = multiprocessing.active_children()
    backend = EngineBackend(["tiny=tiny-dense"], device="cpu", budget=64, max_batch_tokens=512)
    await backend.start()
    try:
        await backend.create_model("one", SPECS["one"])
        expected = logprobs(await backend.train(ForwardBackward("one", PASS)))
        backend.stage("one", PASS)
        backend.unstage(PASS)
        assert np.array_equal(logprobs(await backend.train(ForwardBackward("one", PASS))), expected)
        requests = [PASS, replace(PASS, loss_fn="unknown"), replace(PASS, data=data(2)), replace(PASS)]
        monkeypatch.setattr(worker_process, "STAGED_BYTES", 3 * PASS.size)
        for request in requests:
            backend.stage("one", request)  # the last one is beyond the limit
        backend.unstage(requests[2])
        assert np.array_equal(logprobs(await backend.train(ForwardBackward("one", requests[0]))), expected)
        with pytest.raises(ValueError, match="loss_fn is 'unknown', but the losses here are"):
            await backend.train(ForwardBackward("one", requests[1]))
        assert np.array_equal(logprobs(await backend.train(ForwardBackward("one", requests[3]))), expected)
        backend.stage("one", requests[2])  # there is room again
        (process,) = (child for child in multiprocessing.active_children() if child not in others)
        os.kill(process.pid or 0, signal.SIGSTOP)  # so that it is killed before it can reply
        running = asyncio.create_task(backend.train(ForwardBackward("one", PASS)))
        await asyncio.sleep(0)
        os.kill(process.pid or 0, signal.SIGKILL)
        for lost in (running, backend.train(ForwardBackward("one", requests[2]))):
            with pytest.raises(ModelLost, match="its process was killed"):
                await lost
        backend.stage("one", PASS)  # which is lost
        monkeypatch.setattr(multiprocessing, "get_context", lambda _: SERVER)  # the second start is a faster one
        await backend.create_model("two", SPECS["one"])
        for request in requests[:2]:
            backend.stage("two", request)
        assert np.array_equal(logprobs(await backend.train(ForwardBackward("two", PASS))), expected)
    finally:
        await backend.stop()


def logprobs(result: Any) -> Any:
    return np.concatenate([output["logprobs"] for output in result.loss_fn_outputs])
