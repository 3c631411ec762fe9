"""Models that share a base equal each trained alone, in every layout; sampling and training agree."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch.distributed as dist

from postlude.generate.protocol import SamplingUsage
from postlude.generate.sampling_params import SamplingParams
from postlude.hf.load import load_tokenizer
from postlude.layout import Layout
from postlude.tinker.backend import (
    AdamParams,
    CloseSampler,
    CreateModel,
    Datum,
    ForwardBackward,
    LoadState,
    LoRAConfig,
    ModelSpec,
    OpenSampler,
    OptimStep,
    PassRequest,
    RemoveModel,
    SampleCommand,
    SampleRequest,
    SampleResult,
    SaveForSampler,
    SaveState,
    SnapshotSampler,
)
from postlude.tinker.messages import ERROR, PROGRESS, RAN, USAGE, Call, Cancel
from postlude.tinker.rank_models import to_lora
from postlude.tinker.rank_sampler import SampleEvents, SamplerWeights
from postlude.tinker.settings import WorkerSettings, parse_model
from postlude.tinker.worker import RankWorker, Worker
from postlude.world.agreement import Rank0Controller
from tests.conftest import Ranks
from tests.equality import TOLERANCE

ADAM = AdamParams(learning_rate=5e-3, eps=1e-4)
SPECS = {
    "one": ModelSpec("tiny", LoRAConfig(4, seed=1)),
    "two": ModelSpec("tiny", LoRAConfig(8, seed=2, train_mlp=False)),
    "full": ModelSpec("tiny", None),
}
Replies = dict[int, Any]
Script = Callable[[Replies], Iterator[list[Call | Cancel]]]


class ScriptedConnection:
    """Feeds the worker a script of messages: each list at once, after all earlier messages are handled."""

    def __init__(self, script: Script) -> None:
        self.replies: Replies = {}
        self.order: list[int] = []
        self.progress: list[tuple[int, Any]] = []
        self.usage: list[SamplingUsage] = []
        self._script = script(self.replies)
        self._waiting: list[Call | Cancel] = []

    def poll(self, seconds: float = 0.0) -> bool:
        return bool(self._waiting)

    def recv(self) -> Call | Cancel | None:
        if not self._waiting:
            with suppress(StopIteration):
                self._waiting = list(next(self._script))
        return self._waiting.pop(0) if self._waiting else None

    def send_at_once(self, message: tuple[str, int, Any]) -> None:
        kind, call_id, _ = message
        assert kind == RAN
        assert call_id not in self.replies  # which come later

    def send(self, message: tuple[str, int, Any]) -> None:
        kind, call_id, value = message
        if kind == PROGRESS:
            self.progress.append((call_id, value))
            return
        if kind == USAGE:
            self.usage.append(value)
            return
        assert call_id not in self.replies
        self.order.append(call_id)
        self.replies[call_id] = str(value) if kind == ERROR else value


class Calls:
    """Makes calls with increasing numbers."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, command: Callable[..., Any], **arguments: Any) -> Call:
        self.count += 1
        return Call(self.count, command(**arguments))

    def step(self, model_id: str, seed: int) -> list[Call]:
        """Two passes, which add up, and an optimizer step."""
        passes = [self.forward_backward(model_id, seed), self.forward_backward(model_id, seed + 100)]
        return [*passes, self(OptimStep, model_id=model_id, adam=ADAM)]

    def forward_backward(self, model_id: str, seed: int, **changes: Any) -> Call:
        request = PassRequest(data(seed), "cross_entropy", {}, forward_only=False)
        return self(ForwardBackward, model_id=model_id, request=replace(request, **changes))

    def sample(self, sampler_id: str, request: SampleRequest, streamed: bool = False) -> Call:
        return self(SampleCommand, sampler_id=sampler_id, request=request, streamed=streamed)


def data(seed: int) -> list[Datum]:
    generator, rows = np.random.default_rng(seed), []
    for length in (12, 5, 9):
        tokens = generator.integers(0, 256, length + 1)
        inputs = {"target_tokens": tokens[1:], "weights": np.ones(length, np.float32)}
        rows.append(Datum(tokens[:-1].astype(np.int32), inputs))
    return rows


def run(group: dist.ProcessGroup, layout: str, script: Script) -> ScriptedConnection | None:
    """Runs a script on all ranks; rank 0 returns what the worker sent."""
    settings = WorkerSettings(
        name="tiny", source="tiny-dense", layout=Layout.parse(layout), budget=64, max_batch_tokens=512, device="cpu"
    )
    rank = RankWorker(settings, load_tokenizer("tiny-dense"))
    controller: Rank0Controller[Any, Any] = Rank0Controller(rank.run)
    connection = ScriptedConnection(script)

    def serve() -> None:
        with tempfile.TemporaryDirectory() as scratch:
            Worker(settings, rank, controller, Path(scratch)).serve(connection)  # type: ignore[arg-type]

    controller.on_rank0(serve)
    controller.close()
    return connection if dist.get_rank() == 0 else None


def losses(replies: Mapping[int, Any]) -> list[float]:
    return [reply.metrics["loss:sum"] for reply in replies.values() if hasattr(reply, "loss_fn_outputs")]


def train(group: dist.ProcessGroup, layout: str, models: tuple[str, ...], disturbed: bool) -> list[Any]:
    """Trains models alternately; with `disturbed`, also sends invalid calls, forward-only passes and samples."""
    call = Calls()

    def script(replies: Replies) -> Iterator[list[Call | Cancel]]:
        yield [call(CreateModel, model_id=name, spec=SPECS[name]) for name in models]
        yield [call(OpenSampler, sampler_id="base", directory=None)]
        for step in range(3):
            for name in models:
                first, second, update = call.step(name, step)
                yield [first]
                if disturbed:
                    yield [
                        call.forward_backward(name, 7, forward_only=True),
                        call.forward_backward(name, 7, loss_fn="unknown"),
                        call.forward_backward("three", 7),
                        call.sample(
                            "base", SampleRequest(np.arange(5, dtype=np.int32), SamplingParams(max_new_tokens=3))
                        ),
                        call(SnapshotSampler, model_id=name, sampler_id=f"{name}-{step}"),
                    ]
                yield [second]
                yield [update]
        yield [call.forward_backward(name, 50, forward_only=True) for name in models]

    connection = run(group, layout, script)
    if connection is None:
        return []
    last = list(connection.replies.values())[-len(models) :]
    return [[output["logprobs"] for output in reply.loss_fn_outputs] for reply in last]


def test_alternating_models_equal_each_trained_alone_bit_exactly(ranks: Ranks) -> None:
    (together,) = ranks(1, train, "tp=1", ("one", "two", "full"), True)
    for name, shared in zip(("one", "two", "full"), together, strict=True):
        ((alone,),) = ranks(1, train, "tp=1", (name,), False)
        assert all(np.array_equal(a, b) for a, b in zip(shared, alone, strict=True)), name
    assert not np.array_equal(together[0][0], together[1][0])
    assert not np.array_equal(together[0][0], together[2][0])


def run_all_calls(group: dist.ProcessGroup, layout: str, directory: Path, name: str = "one") -> dict[str, Any]:
    """Trains, samples, saves and loads."""
    call, prompt = Calls(), np.arange(60, 72, dtype=np.int32)
    sample_request = SampleRequest(
        prompt,
        SamplingParams(max_new_tokens=6, seed=3, ignore_eos=True),
        num_samples=3,
        prompt_logprobs=True,
        topk_prompt_logprobs=2,
        topk_sample_logprobs=1,
        target_prompt_tokens=np.stack([prompt[1:], np.full(11, -1)], 1),
    )
    results: dict[str, Any] = {}

    def script(replies: Replies) -> Iterator[list[Call | Cancel]]:
        yield [call(CreateModel, model_id=name, spec=SPECS[name])]
        yield [call(OpenSampler, sampler_id="base", directory=None)]
        yield call.step(name, 1)
        yield [call(SnapshotSampler, model_id=name, sampler_id="first")]
        (directory / "state").mkdir(exist_ok=True), (directory / "sampler").mkdir(exist_ok=True)
        yield [call(SaveState, model_id=name, directory=directory / "state")]
        yield [call(SaveForSampler, model_id=name, directory=directory / "sampler")]
        scored = call.forward_backward(name, 0, forward_only=True, data=[_score(prompt)])
        yield [scored]
        results["trained"] = replies[scored.call_id].loss_fn_outputs[0]["logprobs"]
        update = call.step(name, 2)
        yield update
        yield [call(OpenSampler, sampler_id="saved", directory=directory / "sampler")]
        requests = {sampler: call.sample(sampler, sample_request) for sampler in ("first", "saved", "base")}
        yield [*requests.values(), call.forward_backward(name, 9, forward_only=True)]  # all at once
        results["samples"] = {sampler: replies[request.call_id] for sampler, request in requests.items()}
        yield [call(CreateModel, model_id="loaded", spec=SPECS[name])]
        yield [call(LoadState, model_id="loaded", directory=directory / "state", optimizer=True)]
        resumed = call.step("loaded", 2)
        yield resumed
        pair = [call.forward_backward(model, 5, forward_only=True) for model in (name, "loaded")]
        yield pair
        results["resumed"] = [replies[pass_call.call_id].loss_fn_outputs[0]["logprobs"] for pass_call in pair]
        results["losses"] = losses(replies)
        results["errors"] = [reply for reply in replies.values() if isinstance(reply, str)]
        yield [call(CloseSampler, sampler_id="first"), call(RemoveModel, model_id="loaded")]
        failing = [call.sample("first", sample_request), call.forward_backward("loaded", 5)]
        yield failing
        results["gone"] = [replies[pass_call.call_id] for pass_call in failing]

    return results if run(group, layout, script) is not None else {}


def _score(tokens: Any) -> Datum:
    inputs = {"target_tokens": tokens[1:].astype(np.int64), "weights": np.zeros(len(tokens) - 1, np.float32)}
    return Datum(tokens[:-1], inputs)


@pytest.fixture(scope="module", params=["one", "full"])
def one_rank(request: pytest.FixtureRequest, ranks: Ranks, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Results on one rank of a model with adapters, and of one with all weights trained."""
    (results,) = ranks(1, run_all_calls, "tp=1", tmp_path_factory.mktemp("tinker"), request.param)
    return {"model": request.param, **results}


def test_snapshot_prompt_logprobs_equal_trainer_before_later_steps(one_rank: dict[str, Any]) -> None:
    sampled: SampleResult = one_rank["samples"]["first"]
    assert sampled.prompt.logprobs is not None
    assert np.isnan(sampled.prompt.logprobs[0])
    np.testing.assert_allclose(sampled.prompt.logprobs[1:], one_rank["trained"], rtol=1e-5, atol=1e-5)
    assert not np.allclose(one_rank["samples"]["base"].prompt.logprobs[1:], one_rank["trained"], atol=1e-3)


def test_saved_weights_sample_like_the_snapshot(one_rank: dict[str, Any]) -> None:
    first, saved = one_rank["samples"]["first"], one_rank["samples"]["saved"]
    for sequence, saved_sequence in zip(first.completions, saved.completions, strict=True):
        assert sequence.tokens == saved_sequence.tokens
        assert sequence.finish_reason == "length"
        assert np.array_equal(sequence.logprobs, saved_sequence.logprobs)
    assert len({tuple(sequence.tokens) for sequence in first.completions}) == 3  # each sample has a seed of its own


def test_topk_and_target_logprobs_agree_with_prompt_logprobs(one_rank: dict[str, Any]) -> None:
    sampled: SampleResult = one_rank["samples"]["first"]
    assert sampled.prompt.top is not None
    assert sampled.prompt.targets is not None
    assert (sampled.prompt.top.tokens[0] == 0).all()
    assert (sampled.prompt.top.logprobs[0] == -99999).all()
    np.testing.assert_allclose(sampled.prompt.targets[:, 0], sampled.prompt.logprobs[1:], rtol=1e-5)
    assert np.isnan(sampled.prompt.targets[:, 1]).all()
    best = sampled.prompt.top.logprobs[1:]
    assert (best[:, 0] >= best[:, 1]).all()
    assert (best[:, 0] >= sampled.prompt.logprobs[1:] - 1e-5).all()
    for sequence, topk in zip(sampled.completions, sampled.topk_samples, strict=True):
        assert topk.logprobs.shape == (6, 1)
        assert (topk.logprobs[:, 0] >= np.array(sequence.logprobs) - 1e-4).all()


def test_loaded_model_continues_like_the_saved_one_bit_exactly(one_rank: dict[str, Any]) -> None:
    assert np.array_equal(*one_rank["resumed"])
    assert one_rank["errors"] == []
    assert one_rank["gone"] == [
        "there is no sampler 'first': open it first.",
        "there is no model 'loaded': create it first.",
    ]


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["tp=2", pytest.param("pp=2", marks=pytest.mark.thorough)])
def test_layout_equals_one_rank(ranks: Ranks, one_rank: dict[str, Any], layout: str, tmp_path: Path) -> None:
    results, _ = ranks(2, run_all_calls, layout, tmp_path, one_rank["model"])
    np.testing.assert_allclose(results["losses"], one_rank["losses"], rtol=10 * TOLERANCE)  # after optimizer steps
    for name, sampled in results["samples"].items():
        for sequence, expected_sequence in zip(sampled.completions, one_rank["samples"][name].completions, strict=True):
            assert sequence.tokens == expected_sequence.tokens
            np.testing.assert_allclose(sequence.logprobs, expected_sequence.logprobs, rtol=1e-4, atol=1e-4)


def sample_base_model(group: dist.ProcessGroup) -> dict[str, Any]:
    """Returns requests of the base model and their results."""
    call, prompt = Calls(), np.frombuffer(b"abc", np.uint8).astype(np.int32)
    tokenizer = load_tokenizer("tiny-dense")
    requests: dict[str, Call] = {}

    def sample_call(name: str, number: int = 1, streamed: bool = False, tokens: Any = prompt, **params: Any) -> Call:
        request = SampleRequest(tokens, SamplingParams(**({"max_new_tokens": 8, "seed": 1} | params)), number)
        requests[name] = call.sample("base", request, streamed)
        return requests[name]

    def script(replies: Replies) -> Iterator[list[Call | Cancel]]:
        yield [call(OpenSampler, sampler_id="base", directory=None)]
        yield [
            sample_call("plain", ignore_eos=True),
            sample_call("greedy", temperature=0.0),
            sample_call("again", ignore_eos=True),
        ]
        plain = replies[requests["plain"].call_id].completions[0].tokens
        text = tokenizer.decode(plain[3:5])
        yield [
            sample_call("stop token", stop_tokens=(plain[2],), ignore_eos=True),
            sample_call("stop string", stop=(text,), ignore_eos=True),
            sample_call("one choice", top_k=1),
            sample_call("another seed", seed=2, max_new_tokens=30, ignore_eos=True),
            sample_call("streamed", streamed=True, ignore_eos=True),
            sample_call("cancelled", max_new_tokens=60, ignore_eos=True),
            Cancel(requests["cancelled"].call_id),
            sample_call("all that fit", max_new_tokens=3, ignore_eos=True, tokens=np.zeros(60, np.int32)),
        ]
        yield [
            sample_call("long", max_new_tokens=61),
            sample_call("no prompt", tokens=np.zeros(0, np.int32)),
            sample_call("not in the vocabulary", tokens=np.array([999], np.int32)),
        ]

    connection = run(group, "tp=1", script)
    assert connection is not None
    replies_by_name = {name: connection.replies.get(request.call_id) for name, request in requests.items()}
    last = connection.usage[-1]
    assert (last.running, last.waiting, last.cache_tokens) == (0, 0, 512)
    replies_by_name["progress"] = [progress.tokens for _, progress in connection.progress]
    return replies_by_name


def test_sampling_parameters_are_applied(ranks: Ranks) -> None:
    (replies,) = ranks(1, sample_base_model)

    def tokens(name: str) -> list[int]:
        return list(replies[name].completions[0].tokens)

    plain = tokens("plain")
    assert len(plain) == 8
    assert tokens("again") == plain
    assert tokens("greedy") == tokens("one choice")
    assert tokens("stop token") == plain[: plain.index(plain[2]) + 1]
    assert replies["stop token"].completions[0].finish_reason == "stop"
    assert replies["stop string"].completions[0].finish_reason == "stop"
    assert len(tokens("stop string")) <= 5
    assert tokens("another seed")[:8] != plain
    assert replies["cancelled"] is None
    assert len(tokens("all that fit")) == 3  # of a context of 63
    streamed = [token for piece in replies["progress"] for token in piece]
    assert streamed == plain[: len(streamed)]
    assert len(streamed) >= 7
    for name, sentence in (
        ("long", "max_tokens is 61, but after a prompt of 3 tokens the context of 63 has room for 60."),
        ("no prompt", "the prompt is empty"),
        ("not in the vocabulary", "the prompt has token 999, but the vocabulary is 0 to 263."),
    ):
        assert sentence in replies[name]


class LateConnection(ScriptedConnection):
    """Provides one call from `late` each time the worker waits for more."""

    def __init__(self, script: Script, late: list[Call]) -> None:
        super().__init__(script)
        self.late = late
        self.received: list[int] = []
        self.waited_after: set[int] = set()

    def poll(self, seconds: float = 0.0) -> bool:
        if seconds > 0:
            self.waited_after.add(self.received[-1])
            self._waiting += self.late[:1]
            del self.late[:1]
        return super().poll()

    def recv(self) -> Call | Cancel | None:
        message = super().recv()
        if message is not None:
            self.received.append(message.call_id)
        return message


def test_burst_of_samples_is_batched_and_streamed_sample_starts_immediately(tmp_path: Path) -> None:
    batches = list[list[int]]()

    def run_command(command: Any) -> list[SampleEvents]:
        batches.append([call.call_id for call in command.keywords["calls"]])
        return [SampleEvents(dict.fromkeys(batches[-1], SampleResult([])), [], busy=False)]

    call, request = Calls(), SampleRequest(np.arange(5, dtype=np.int32), SamplingParams(max_new_tokens=3))
    first, second, third = (call.sample("base", request) for _ in range(3))
    streamed, last = call.sample("base", request, streamed=True), call.sample("base", request)
    connection = LateConnection(lambda _: iter([[first], [streamed], [last]]), [second, third])
    engine = SimpleNamespace(config=SimpleNamespace(vocab_size=264))
    worker = Worker(
        WorkerSettings(name="tiny", source="tiny-dense"),
        SimpleNamespace(models=SimpleNamespace(engine=engine)),  # type: ignore[arg-type]
        SimpleNamespace(group=None, call_all=run_command),  # type: ignore[arg-type]
        tmp_path,
    )
    worker.samplers["base"] = SamplerWeights()
    worker.serve(connection)  # type: ignore[arg-type]
    assert batches == [[1, 2, 3], [4], [5]]
    assert connection.waited_after == {1, 2, 3, 5}


def test_layer_flags_select_adapted_layers() -> None:
    groups = {"attention", "mlp", "none"}
    assert to_lora(LoRAConfig(4), groups).targets == ("attention", "mlp")
    assert to_lora(LoRAConfig(4, train_mlp=False), groups).targets == ("attention",)
    assert to_lora(LoRAConfig(4), {*groups, "head"}).targets == ("attention", "mlp", "lm_head")
    assert to_lora(LoRAConfig(4, train_unembed=False), {*groups, "head"}).targets == ("attention", "mlp")
    with pytest.raises(ValueError, match="train_mlp is False, and train_unembed is True with a head that takes no"):
        to_lora(LoRAConfig(4, train_mlp=False, train_attn=False), groups)


def test_model_can_be_served_under_another_name() -> None:
    assert parse_model("tiny-dense") == ("tiny-dense", "tiny-dense")
    assert parse_model("org/model=/data/model") == ("org/model", "/data/model")
    with pytest.raises(ValueError, match="write NAME=MODEL"):
        parse_model("=x")
