"""Ranks on Ray train and sample like local ranks; if an actor is killed, clients get an error and ranks restart."""

from __future__ import annotations

import asyncio
import importlib.util
import os
import signal
import subprocess
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import pytest

from postlude.generate.sampling_params import SamplingParams
from postlude.layout import Layout
from postlude.tinker.backend import ForwardBackward, ModelLost, OptimStep, PassRequest, SampleRequest, SnapshotSampler
from postlude.tinker.engine_backend import EngineBackend

from .test_worker import ADAM, SPECS, data

pytestmark = [
    pytest.mark.slow,
    pytest.mark.thorough,  # three times two ranks start, and Ray: a minute on two cores
    pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="needs ray: pip install 'postlude[ray]'"),
]


async def train(backend: EngineBackend, name: str) -> list[Any]:
    """Returns log-probs and samples after one step."""
    await backend.create_model(name, SPECS["one"])
    await backend.train(ForwardBackward(name, PassRequest(data(1), "cross_entropy", {}, forward_only=False)))
    await backend.train(OptimStep(name, ADAM))
    scored = await backend.train(ForwardBackward(name, PassRequest(data(2), "cross_entropy", {}, forward_only=True)))
    await backend.train(SnapshotSampler(name, f"{name}-sampler"))
    request = SampleRequest(
        np.arange(60, 72, dtype=np.int32), SamplingParams(max_new_tokens=6, seed=3, ignore_eos=True)
    )
    sampled = await backend.sample(f"{name}-sampler", request)
    return [
        np.concatenate([output["logprobs"] for output in scored.loss_fn_outputs]),
        sampled.completions[0].tokens,
    ]


async def use_until_lost(backend: EngineBackend, name: str) -> NoReturn:
    while True:
        try:
            await backend.train(ForwardBackward(name, PassRequest(data(1), "cross_entropy", {}, forward_only=True)))
        except ModelLost:
            raise
        except RuntimeError:  # of the call that ran when the rank was killed: its connection to the others ended
            await asyncio.sleep(0.1)


def rank_actor_processes() -> list[int]:
    """Returns the rank actors among the descendants of this process."""
    lines = subprocess.check_output(["ps", "-eww", "-o", "pid=,ppid=,args="], text=True).splitlines()
    processes = [(int(pid), int(parent), name) for pid, parent, name in (line.split(None, 2) for line in lines)]
    descendants = {os.getpid()}
    while new := {pid for pid, parent, _ in processes if parent in descendants} - descendants:
        descendants |= new
    return [pid for pid, _, name in processes if pid in descendants and "ray::RankActor" in name]


def test_ray_ranks_equal_local_ranks_and_restart_after_kill(tmp_path: Path) -> None:
    async def run(ray: str | None) -> list[Any]:
        settings: dict[str, Any] = {"layout": Layout(tp=2), "device": "cpu", "budget": 64, "max_batch_tokens": 512}
        backend = EngineBackend(["tiny=tiny-dense"], ray=ray, scratch=tmp_path, **settings)
        await backend.start()
        try:
            results = await train(backend, "first")
            if ray is not None:
                before = set(rank_actor_processes())
                os.kill(max(before), signal.SIGKILL)
                with pytest.raises(ModelLost, match=r"rank \d of 2 was lost"):
                    await use_until_lost(backend, "first")
                results += await train(backend, "second")
                assert not before & set(rank_actor_processes())
            return results
        finally:
            await backend.stop()

    logprobs, tokens = asyncio.run(run(None))
    first, sampled, second, sampled_again = asyncio.run(run("local"))
    for actual, expected in ((first, sampled), (second, sampled_again)):
        np.testing.assert_allclose(actual, logprobs, rtol=1e-5)
        assert expected == tokens
    assert rank_actor_processes() == []
