"""Training requests run in order and once each, models alternate, and no step uses a part of its data."""

from __future__ import annotations

import asyncio
import gc
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from postlude.tinker import model_requests, wire
from postlude.tinker.app import PROTOBUF
from postlude.tinker.backend import AdamParams, ModelLost
from postlude.tinker.training import PREPARED
from postlude.tinker.wire import ForwardBackwardOutput

from .asgi_client import Client, pass_body, running_server
from .fake_backend import BASE, OTHER, FakeBackend


async def until(reached: Callable[[], Any]) -> None:
    """Waits for a state, and a little longer: so that what comes after it and should not is seen."""
    async with asyncio.timeout(60):
        while not reached():
            await asyncio.sleep(0.01)
    await asyncio.sleep(0.1)


async def test_requests_run_in_order_of_seq_id(tmp_path: Path) -> None:
    async with running_server(tmp_path) as (app, backend, _):
        client = await Client(app).open()
        model = await client.create_model()
        ids = {}
        for seq in (3, 2, 5):
            ids[seq] = await client.run_pass(model, seq, float(seq))
        ids[4] = await client.step(model, 4)
        await asyncio.sleep(0.05)
        assert [call[0] for call in backend.calls] == ["create"]  # 1 is missing
        ids[1] = await client.run_pass(model, 1, 1.0)
        metrics = await client.result(ids[4])
        await client.result(ids[5])
        assert [call[2] for call in backend.calls if call[0] == "pass"] == [1.0, 2.0, 3.0, 5.0]
        assert [call[0] for call in backend.calls] == ["create", "pass", "pass", "pass", "step", "pass"]
        assert metrics["metrics"]["weight"] == 1.0 + 2.0 + 3.0


async def test_a_retried_request_runs_once_and_gets_the_same_result(tmp_path: Path) -> None:
    async with running_server(tmp_path) as (app, backend, _):
        client = await Client(app).open()
        model = await client.create_model()
        assert await client.create_model() == model
        first = await client.run_pass(model, 1, 3.0)
        assert await client.run_pass(model, 1, 3.0) == first  # while it runs
        step = await client.step(model, 2)
        result = await client.result(step)
        assert await client.step(model, 2) == step  # after it has run
        assert await client.result(step) == result
        assert result["metrics"]["weight"] == 3.0
        assert [call[0] for call in backend.calls] == ["create", "pass", "step"]
        other = await client.post("optim_step", {"model_id": model, "seq_id": 1})
        assert other.status == 400
        assert "was a forward_backward" in other.json["error"]


async def test_repeated_number_with_other_content_is_refused(tmp_path: Path) -> None:
    """Two clients of one model count alike: neither gets the other's results."""
    async with running_server(tmp_path) as (app, backend, _):
        client = await Client(app).open()
        model = await client.create_model()
        await client.result(await client.run_pass(model, 1, 3.0))
        await client.result(await client.step(model, 2))
        save = {"model_id": model, "seq_id": 3, "path": "a"}
        await client.call("save_weights", save)
        create = {"session_id": client.session, "model_seq_id": 0, "base_model": BASE, "lora_config": {"rank": 8}}
        for path, body in (
            ("forward_backward", pass_body(model, 1, 4.0)),
            ("forward_backward", pass_body(model, 1, *[3.0 / 2**15] * 2**15)),  # read by a thread
            ("optim_step", {"model_id": model, "seq_id": 2, "adam_params": {"learning_rate": 2.0}}),
            ("save_weights", save | {"path": "b"}),
            ("create_model", create),
        ):
            refused = await client.post(
                path, body, content_type=PROTOBUF if path == "forward_backward" else "application/json"
            )
            assert refused.status == 400
            assert "another client has used this number" in refused.json["error"]
        assert [call[0] for call in backend.calls] == ["create", "pass", "step", "save_state"]


async def test_skipped_step_is_reported_in_numbers_that_json_has(tmp_path: Path) -> None:
    class Overflowing(FakeBackend):
        async def optim_step(self, model_id: str, adam: AdamParams) -> dict[str, float]:
            return {"grad_norm": math.inf, "step": 0.0, "skipped": 1.0}

    async with running_server(tmp_path, Overflowing()) as (app, _, _service):
        client = await Client(app).open()
        result = await client.result(await client.step(await client.create_model(), 1))
        assert result["metrics"] == {"step": 0.0, "skipped": 1.0}
        assert "their norm is inf" in result["reason"]


async def test_models_of_one_base_alternate_with_separate_weights(tmp_path: Path) -> None:
    async with running_server(tmp_path) as (app, backend, _):
        first_client, second_client = await Client(app).open(), await Client(app).open()
        first, second = await first_client.create_model(), await second_client.create_model()
        other = await second_client.create_model(1, OTHER)
        backend.calls.clear()
        backend.gate.clear()
        ids = [await first_client.run_pass(first, seq, 1.0) for seq in range(1, 7)]
        ids += [await second_client.run_pass(second, seq, 10.0) for seq in range(1, 4)]
        third = await second_client.run_pass(other, 1, 100.0)
        backend.gate.set()
        await second_client.result(third)
        for request_id in ids:
            await (first_client if request_id.startswith(first) else second_client).result(request_id)
        turns = [call[1] for call in backend.calls if call[1] != other]
        assert turns == [first, second, first, second, first, second, first, first, first]
        assert (await first_client.result(await first_client.step(first, 7)))["metrics"]["weight"] == 6.0
        assert (await second_client.result(await second_client.step(second, 4)))["metrics"]["weight"] == 30.0


async def test_forward_only_does_not_change_gradients(tmp_path: Path) -> None:
    async with running_server(tmp_path) as (app, _, _service):
        client = await Client(app).open()
        model = await client.create_model()
        await client.run_pass(model, 1, 5.0, forward_only=True)
        await client.run_pass(model, 2, 2.0)
        assert (await client.result(await client.step(model, 3)))["metrics"]["weight"] == 2.0


async def test_failed_pass_fails_its_step_and_next_step_is_complete(tmp_path: Path) -> None:
    async with running_server(tmp_path) as (app, backend, _):
        client = await Client(app).open()
        model = await client.create_model()
        good = await client.run_pass(model, 1, 1.0)
        bad = await client.run_pass(model, 2, 2.0, loss="unheard_of")
        late = await client.run_pass(model, 3, 4.0)
        step = await client.step(model, 4)
        assert isinstance(await client.result(good), bytes)
        refused = await client.result(step)
        assert refused["category"] == "user"
        assert "was not run" in refused["error"]
        assert "'unheard_of' is not supported; there are cross_entropy" in refused["error"]
        assert "was not run" in (await client.result(late))["error"]
        assert "unheard_of" in (await client.result(bad))["error"]
        await client.run_pass(model, 5, 8.0)
        assert (await client.result(await client.step(model, 6)))["metrics"]["weight"] == 8.0
        assert ("discard", model) in backend.calls


def test_large_requests_are_staged_ahead_and_errors_reported_in_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The next `PREPARED` requests are staged, in the backend too. Staged data of requests that do not run is freed."""
    read = list[int]()

    def read_pass_request(message: Any, *limits: int) -> Any:
        read.append(message.seq_id)
        return wire.read_pass_request(message, *limits)

    monkeypatch.setattr(model_requests, "LARGE", 0)
    monkeypatch.setattr(model_requests, "read_pass_request", read_pass_request)

    async def run() -> None:
        async with running_server(tmp_path) as (app, backend, _):
            client = await Client(app).open()
            model = await client.create_model()
            ids = {seq: await client.run_pass(model, seq, float(seq)) for seq in range(2, PREPARED + 4) if seq != 3}
            ids[3] = await client.run_pass(model, 3)  # without data
            await until(lambda: len(read) > PREPARED and len(backend.staged) == PREPARED)
            assert sorted(read) == list(range(2, PREPARED + 3))
            assert len(backend.staged) == PREPARED  # not the one without data
            assert [call[0] for call in backend.calls] == ["create"]
            ids[1] = await client.run_pass(model, 1, 1.0)
            for seq in (1, 2):
                assert isinstance(await client.result(ids[seq]), bytes)
            assert "got no data" in (await client.result(ids[3]))["error"]
            assert "was not run" in (await client.result(ids[PREPARED + 3]))["error"]
            assert not backend.staged
            assert [call[2] for call in backend.calls if call[0] == "pass"] == [1.0, 2.0]
            for weights in [(), (1.0,)]:
                await client.run_pass(model, PREPARED + 6 + len(weights), *weights)  # the ones before never come
            await until(lambda: PREPARED + 6 in read and backend.staged)
            assert sorted(read)[-2:] == [PREPARED + 6, PREPARED + 7]
            assert len(backend.staged) == 1
            await client.post(f"sessions/{client.session}/finish", {"reason": {"type": "success"}})
            assert not backend.staged

    asyncio.run(run())
    gc.collect()
    assert "never retrieved" not in caplog.text


async def test_request_is_staged_once_few_requests_are_ahead(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_requests, "LARGE", 0)

    def weights(backend: FakeBackend) -> set[float]:
        return {staged.data[0].loss_fn_inputs["weights"].sum() for staged in backend.staged}

    async with running_server(tmp_path) as (app, backend, _):
        client = await Client(app).open()
        model = await client.create_model()
        backend.gate.clear()
        ids = [await client.run_pass(model, seq, float(seq)) for seq in range(1, PREPARED + 3)]
        await until(lambda: weights(backend) == {2, 3, 4, 5})
        assert weights(backend) == {2, 3, 4, 5}
        backend.gate.set(), backend.gate.clear()  # the first one ends, and the second waits
        await client.result(ids[0])
        await until(lambda: weights(backend) == {3, 4, 5, 6})
        assert weights(backend) == {3, 4, 5, 6}
        backend.gate.set()


async def test_next_request_runs_before_result_of_previous_pass_arrives(tmp_path: Path) -> None:
    async with running_server(tmp_path) as (app, backend, _):
        client = await Client(app).open()
        first, second = await client.create_model(0), await client.create_model(1)
        backend.results = asyncio.Event()
        passed = await client.run_pass(first, 1, 2.0)
        assert (await client.result(await client.step(first, 2)))["metrics"]["weight"] == 2.0
        waiting = await client.post("retrieve_future", {"request_id": passed})
        assert waiting.status == 408
        backend.results.set()
        assert ForwardBackwardOutput.FromString(await client.result(passed)).metrics["loss:sum"] == 2.0
        backend.results.clear()
        passed = await client.run_pass(first, 3, 4.0)
        assert (await client.result(await client.step(first, 4)))["metrics"]["weight"] == 6.0
        backend.failure = RuntimeError("out of memory")
        backend.results.set()  # the result is lost after the step was made of it, so the model ends
        assert "out of memory" in (await client.result(passed))["error"]
        ended = await client.post("optim_step", {"model_id": first, "seq_id": 5})
        assert (ended.status, "the result of a forward_backward" in ended.json["error"]) == (410, True)
        await client.run_pass(second, 1, 1.0)
        assert (await client.result(await client.step(second, 2)))["metrics"]["weight"] == 1.0


async def test_client_can_resend_step_after_seeing_failure(tmp_path: Path) -> None:
    async with running_server(tmp_path) as (app, _, _service):
        client = await Client(app).open()
        model = await client.create_model()
        await client.run_pass(model, 1, 1.0)
        assert "error" in await client.result(await client.run_pass(model, 2, 2.0, loss="unheard_of"))
        await client.run_pass(model, 3, 4.0)
        assert (await client.result(await client.step(model, 4)))["metrics"]["weight"] == 4.0  # not 1 + 4


async def test_what_was_sent_before_the_client_fetched_the_failure_fails_too(tmp_path: Path) -> None:
    async with running_server(tmp_path) as (app, backend, _service):
        client = await Client(app).open()
        model = await client.create_model()
        bad = await client.run_pass(model, 1, 2.0, loss="unheard_of")
        await until(lambda: ("discard", model) in backend.calls)  # it has failed, but its client does not know
        late = await client.run_pass(model, 2, 4.0)
        step = await client.step(model, 3)
        assert "was not run" in (await client.result(late))["error"]
        assert "was not run" in (await client.result(step))["error"]
        assert "unheard_of" in (await client.result(bad))["error"]


async def test_lost_model_gives_clear_error_and_others_continue(tmp_path: Path) -> None:
    async with running_server(tmp_path) as (app, backend, _):
        client = await Client(app).open()
        first, second = await client.create_model(0), await client.create_model(1)
        saved = await client.call("save_weights", {"model_id": first, "path": "good", "seq_id": 1})
        backend.failure = ModelLost("rank 1 died.")
        lost = await client.result(await client.run_pass(first, 2, 1.0))
        assert lost["category"] == "server"
        assert lost["error"].startswith("rank 1 died. What was saved last is " + saved["path"])
        after = await client.post("optim_step", {"model_id": first, "seq_id": 3})
        assert after.status == 410
        assert "rank 1 died" in after.json["error"]
        await client.run_pass(second, 1, 2.0)
        assert (await client.result(await client.step(second, 2)))["metrics"]["weight"] == 2.0


async def test_too_many_requests_get_429_except_the_next_in_order(tmp_path: Path) -> None:
    async with running_server(tmp_path, queued_per_model=3) as (app, _, _service):
        client = await Client(app).open()
        model = await client.create_model()
        ids = [await client.run_pass(model, seq, 1.0) for seq in (2, 3, 4)]
        flood = await client.post("forward_backward", pass_body(model, 5, 1.0), content_type="application/x-protobuf")
        assert flood.status == 429
        assert "retry-after" in flood.headers
        await client.run_pass(model, 1, 1.0)
        for request_id in ids:
            assert isinstance(await client.result(request_id), bytes)
        assert isinstance(await client.result(await client.run_pass(model, 5, 1.0)), bytes)


@pytest.mark.parametrize("compressed", [False, True])
async def test_too_large_request_gets_413_and_does_not_block_later_ones(tmp_path: Path, compressed: bool) -> None:
    import zstandard

    async with running_server(tmp_path, body_bytes=20_000) as (app, _, _service):
        client = await Client(app).open()
        model = await client.create_model()
        body = pass_body(model, 1, *[1.0] * 1000)
        headers = {"content_type": "application/x-protobuf"}
        if compressed:
            body, headers["content_encoding"] = zstandard.compress(body), "zstd"
            assert len(body) < 20_000
        refused = await client.post("forward_backward", body, **headers)
        assert refused.status == 413
        assert "20000 bytes" in refused.json["error"]
        step = await client.result(await client.step(model, 2))
        assert "was not run" in step["error"]
        await client.run_pass(model, 3, 2.0)
        assert (await client.result(await client.step(model, 4)))["metrics"]["weight"] == 2.0


async def test_zstd_compressed_request_is_read(tmp_path: Path) -> None:
    import zstandard

    async with running_server(tmp_path) as (app, _, _service):
        client = await Client(app).open()
        model = await client.create_model()
        body = zstandard.compress(pass_body(model, 1, 3.0, 4.0))
        kind = "application/x-protobuf"
        reply = await client.post("forward_backward", body, content_type=kind, content_encoding="zstd")
        output = ForwardBackwardOutput.FromString(await client.result(reply.json["request_id"]))
        assert output.metrics["loss:sum"] == 7.0
        wrong = await client.post("forward_backward", b"plain", content_type=kind, content_encoding="zstd")
        assert wrong.status == 400
        other = await client.post("forward_backward", b"plain", content_type=kind, content_encoding="gzip")
        assert (other.status, "send identity or zstd" in other.json["error"]) == (415, True)


async def test_requests_after_missing_seq_id_time_out_and_model_continues(tmp_path: Path) -> None:
    async with running_server(tmp_path, gap_seconds=0.2) as (app, _, _service):
        client = await Client(app).open()
        model = await client.create_model()
        await client.result(await client.run_pass(model, 1, 1.0))
        lone = await client.result(await client.run_pass(model, 3, 1.0))
        assert "request 2 of" in lone["error"]
        await client.run_pass(model, 4, 2.0)
        assert (await client.result(await client.step(model, 5)))["metrics"]["weight"] == 2.0


async def test_invalid_optim_step_is_refused_and_model_continues(tmp_path: Path) -> None:
    async with running_server(tmp_path) as (app, _, _service):
        client = await Client(app).open()
        model = await client.create_model()
        body = {"model_id": model, "seq_id": 1, "adam_params": {"learning_rate": -1.0}}
        wrong = await client.post("optim_step", body)
        assert wrong.status == 400
        assert "learning_rate is -1.0" in wrong.json["error"]
        body = {"model_id": model, "seq_id": 2, "optimizer_params": {"type": "dimuon", "learning_rate": 0.1}}
        assert "'dimuon' is not supported" in (await client.call("optim_step", body))["error"]
        await client.run_pass(model, 3, 2.0)
        assert (await client.result(await client.step(model, 4)))["metrics"]["weight"] == 2.0


async def test_poll_of_pending_request_reports_queue_state(tmp_path: Path) -> None:
    backend = FakeBackend()
    async with running_server(tmp_path, backend, poll_seconds=0.2) as (app, _, _service):
        client = await Client(app).open()
        first_model, second_model = await client.create_model(0), await client.create_model(1)
        backend.gate.clear()
        first, second = await client.run_pass(first_model, 1, 1.0), await client.run_pass(second_model, 1, 1.0)
        await until(lambda: "pass" in [call[0] for call in backend.calls])
        loop = asyncio.get_running_loop()
        start = loop.time()
        running = await client.post("retrieve_future", {"request_id": first})
        assert loop.time() - start >= 0.2
        assert running.status == 408
        assert running.json["type"] == "try_again"
        assert running.json["queue_state"] == "active"
        waiting = await client.post("retrieve_future", {"request_id": second})
        assert waiting.json["queue_state"] == "paused_capacity"
        assert "take turns" in waiting.json["queue_state_reason"]
        backend.gate.set()
        assert isinstance(await client.result(second), bytes)


async def test_open_polls_return_when_server_stops(tmp_path: Path) -> None:
    async with running_server(tmp_path, poll_seconds=60.0) as (app, backend, service):
        client = await Client(app).open()
        model = await client.create_model()
        backend.gate.clear()
        request_id = await client.run_pass(model, 1, 1.0)
        polls = [asyncio.create_task(client.post("retrieve_future", {"request_id": request_id})) for _ in range(2)]
        await asyncio.sleep(0.05)
        async with asyncio.timeout(30):
            service.futures.close()
            polls.append(asyncio.create_task(client.post("retrieve_future", {"request_id": request_id})))
            assert [reply.status for reply in await asyncio.gather(*polls)] == [408] * 3
