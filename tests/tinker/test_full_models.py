"""Models with all weights trained: their limit, access, checkpoints, and failures that end one model only.

`test_worker.py` compares their results with those of adapters and of one rank.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import pytest
import torch.distributed as dist

from postlude.generate.sampling_params import SamplingParams
from postlude.hf.load import load_tokenizer
from postlude.tinker.backend import (
    CloseSampler,
    CreateModel,
    ModelLost,
    OpenSampler,
    OptimStep,
    PassRequest,
    SampleRequest,
    SaveForSampler,
    SnapshotSampler,
)
from postlude.tinker.datums import read_pass
from postlude.tinker.messages import Call, Cancel
from postlude.tinker.rank_models import RankModels, check_memory
from postlude.tinker.settings import WorkerSettings
from tests.conftest import Ranks

from .asgi_client import Client, Reply, running_server
from .fake_backend import BASE
from .test_sampling import sample
from .test_worker import ADAM, SPECS, Calls, Replies, data, run


async def create_full(client: Client, number: int = 0) -> Reply:
    body = {"session_id": client.session, "model_seq_id": number, "base_model": BASE}
    return await client.post("create_model", body)


async def test_full_models_over_limit_are_refused_until_one_ends(tmp_path: Path) -> None:
    async with running_server(tmp_path, full_models=1) as (app, _, _service):
        first, second = await Client(app).open(), await Client(app, "tml-two").open()
        model = (await first.result((await create_full(first)).json["request_id"]))["model_id"]
        assert (await first.post("get_info", {"model_id": model})).json["is_lora"] is False
        refused = await create_full(second)
        assert refused.status == 400
        assert "all weights of 1 models are being trained" in refused.json["error"]
        assert "--max-full-models" in refused.json["error"]
        assert await second.create_model(1)  # adapters are still taken
        assert (await second.post("get_info", {"model_id": model})).status == 404
        await first.post(f"sessions/{first.session}/finish", {"reason": {"type": "success"}})
        async with asyncio.timeout(5):
            while (reply := await create_full(second)).status != 200:
                await asyncio.sleep(0.01)
        assert "model_id" in await second.result(reply.json["request_id"])


async def test_max_full_models_0_refuses_full_models(tmp_path: Path) -> None:
    async with running_server(tmp_path, full_models=0) as (app, _, _service):
        refused = await create_full(await Client(app).open())
        assert (refused.status, "--max-full-models 0" in refused.json["error"]) == (400, True)


async def test_full_model_that_does_not_fit_gives_clear_error_and_frees_its_slot(tmp_path: Path) -> None:
    async with running_server(tmp_path) as (app, backend, _):
        client = await Client(app).open()
        backend.failure = ValueError("training all weights needs 16 GiB")
        failed = await client.result((await create_full(client)).json["request_id"])
        assert failed == {"error": "training all weights needs 16 GiB", "category": "user"}
        async with asyncio.timeout(5):
            while (reply := await create_full(client, 1)).status != 200:
                await asyncio.sleep(0.01)
        assert "model_id" in await client.result(reply.json["request_id"])


def test_full_checkpoint_loads_after_restart_and_not_into_adapter(tmp_path: Path) -> None:
    async def before() -> tuple[str, str]:
        async with running_server(tmp_path) as (app, _, _service):
            client = await Client(app).open()
            model = (await client.result((await create_full(client)).json["request_id"]))["model_id"]
            await client.run_pass(model, 1, 3.0)
            await client.step(model, 2)
            saved = await client.call("save_weights", {"model_id": model, "path": "state", "seq_id": 3})
            return client.session, saved["path"]

    async def after(session: str, path: str) -> None:
        async with running_server(tmp_path) as (app, _, _service):
            client = Client(app)
            client.session = session
            info = (await client.post("weights_info", {"tinker_path": path})).json
            assert (info["base_model"], info["is_lora"], info.get("lora_rank")) == (BASE, False, None)
            body = {"session_id": session, "model_seq_id": 1, "path": path, "optimizer": True}
            loaded = (await client.call("load_weights", body))["model_id"]
            assert (await client.result(await client.step(loaded, 1)))["metrics"]["weight"] == 3.0
            adapter = await client.create_model(2)
            refused = await client.call("load_weights", {"model_id": adapter, "seq_id": 1, "path": path})
            assert "does not fit this model: it has rank None (model: 4)" in refused["error"]

    asyncio.run(after(*asyncio.run(before())))


async def test_oldest_full_model_sampler_is_closed_over_limit(tmp_path: Path) -> None:
    async with running_server(tmp_path, full_snapshots=2) as (app, backend, _):
        client = await Client(app).open()
        model = (await client.result((await create_full(client)).json["request_id"]))["model_id"]
        ids = []
        for number in range(3):
            body = {"model_id": model, "sampling_session_seq_id": number, "seq_id": number + 1}
            ids.append((await client.call("save_weights_for_sampler", body))["sampling_session_id"])
        assert list(backend.samplers) == ids[1:]
        closed = await client.post("asample", sample(ids[0], 0))
        assert closed.status == 410
        assert "2 newer samplers" in closed.json["error"]
        assert isinstance(await client.call("asample", sample(ids[2], 0)), bytes)


SETTINGS = WorkerSettings(name="tiny", source="tiny-dense", budget=64, max_batch_tokens=512, device="cpu")


def failures(group: dist.ProcessGroup) -> list[Any]:
    """Returns the refusal of a rank without memory, then the state after an optimizer step fails half-way."""
    models = RankModels(SETTINGS, load_tokenizer("tiny-dense"))
    with pytest.raises(ValueError, match="Give a lora_config") as refused:
        check_memory(models.engine, free=10 << 20)
    models.create_model("one", SPECS["one"])
    models.create_model("full", SPECS["full"])
    pass_request = PassRequest(data(1), "cross_entropy", {}, forward_only=False)
    request = read_pass(pass_request, vocab_size=264, max_context_length=63)
    for name in ("one", "full"):
        models.run_pass(name, request)

    def fail(*arguments: Any) -> NoReturn:
        raise RuntimeError("no memory for the moments")

    models.models["full"].engine.training_state.optimizer.clipped_step = fail  # type: ignore[method-assign]
    with pytest.raises(ModelLost) as lost:
        models.run(OptimStep("full", ADAM))
    with pytest.raises(ValueError, match="there is no model 'full'"):
        models.run_pass("full", request)
    step = models.run(OptimStep("one", ADAM))
    models.create_model("full", SPECS["full"])  # there is room for another
    assert step is not None
    return [str(refused.value), str(lost.value), models.refusal, step["step"]]


def test_failed_optimizer_step_ends_only_its_model(ranks: Ranks) -> None:
    ((refused, lost, refusal, step),) = ranks(1, failures)
    assert "needs 0.0153 GiB on each rank, but 0.00977 GiB are free" in refused  # 0.82 M parameters, 20 bytes each
    assert lost.startswith("model full is lost: this engine's optimizer_step failed (RuntimeError: no memory for the")
    assert (refusal, step) == (None, 1)


def sample_in_turn(group: dist.ProcessGroup) -> dict[str, Any]:
    """Samples two snapshots of one model and the base concurrently, and closes one."""
    call, results = Calls(), dict[str, Any]()
    request = SampleRequest(
        np.arange(60, 72, dtype=np.int32), SamplingParams(max_new_tokens=6, seed=3, ignore_eos=True)
    )

    def script(replies: Replies) -> Iterator[list[Call | Cancel]]:
        yield [call(CreateModel, model_id="full", spec=SPECS["full"])]
        yield [call(OpenSampler, sampler_id="base", directory=None)]
        for step in range(2):
            yield [call(SnapshotSampler, model_id="full", sampler_id=f"step {step}"), *call.step("full", step)]
        names = ("step 0", "base", "step 1", "step 0", "step 1")
        alone = []
        for name in names:
            alone.append(call.sample(name, request))
            yield [alone[-1]]
        together = [call.sample(name, request) for name in names]
        yield together
        results["alone"], results["together"] = (
            [replies[sample_call.call_id].completions[0].tokens for sample_call in calls] for calls in (alone, together)
        )
        running = call.sample("step 0", request, streamed=True)
        yield [running, call(CloseSampler, sampler_id="step 0"), call.sample("step 1", request)]
        results["closed"] = replies[running.call_id]
        yield [call(SaveForSampler, model_id="full", directory=Path("/proc/nothing"))]
        results["unwritable"] = list(replies.values())[-1]
        results["errors"] = [reply for reply in replies.values() if isinstance(reply, str)]

    assert run(group, "tp=1", script) is not None
    return results


def test_samples_of_swapped_weights_equal_sampling_each_alone(ranks: Ranks) -> None:
    (results,) = ranks(1, sample_in_turn)
    assert results["together"] == results["alone"]
    first, base, second, *_ = results["alone"]
    assert first == base  # before the first step
    assert second != base
    assert results["closed"] == "sampler step 0 was closed."
    assert results["errors"] == [results["closed"], results["unwritable"]]
