"""SyncedGenerator: every layout gives the same completions, with the engine's log-probs."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from postlude import Batch, Engine, Layout
from postlude.engine import AdamW
from postlude.generate import distributed
from postlude.generate.distributed import ReplicatedGenerator, SyncedGenerator
from postlude.generate.protocol import Request
from postlude.generate.sampling_params import SamplingParams
from postlude.hf.builtin import BUILTIN
from postlude.hf.load import byte_tokenizer, load_model
from postlude.lora import LoRA
from postlude.objectives import SFT
from tests.meshes import mesh

PROMPTS = [list(b"one"), list(b"and two"), list(b"three and more"), list(b"4"), list(b"five?")]


def results(group: Any, layout: Layout) -> tuple[list[Any], float]:
    config = BUILTIN["tiny-dense"]()
    config.initializer_range = 0.1
    engine = Engine(config, mesh=mesh(layout), budget=64)
    generator = SyncedGenerator(engine, byte_tokenizer())
    engine.forward_backward(Batch(PROMPTS[:3]), SFT())
    engine.optimizer_step()
    samplings = [SamplingParams(max_new_tokens=6, seed=place, ignore_eos=True) for place in range(len(PROMPTS))]
    completions = generator.generate(PROMPTS, samplings, n=2)
    worst = 0.0
    batch = [prompt + answer.tokens for prompt, group in zip(PROMPTS, completions, strict=True) for answer in group]
    scores = iter(engine.logprobs(Batch(batch)).logprob)
    for completion_group in completions:
        for answer in completion_group:
            own_scores = next(scores)[-len(answer.tokens) :]
            worst = max(worst, float((own_scores - torch.tensor(answer.logprobs)).abs().max()))
    return [[answer.tokens for answer in group] for group in completions], worst


def synced_adapter(group: Any) -> tuple[bool, bool, float]:
    """Returns whether a second sync left the model's weights in place, and the log-prob difference to the engine."""
    engine = Engine(BUILTIN["tiny-dense"](), mesh=mesh(Layout()), budget=64, lora=LoRA(rank=4), optimizer=AdamW(lr=0.1))
    generator = SyncedGenerator(engine, byte_tokenizer())
    generator.sync_weights()
    before = {name: (tensor.data_ptr(), tensor.clone()) for name, tensor in generator.model.state_dict().items()}
    engine.forward_backward(Batch(PROMPTS[:3]), SFT())
    engine.optimizer_step()
    weight = generator.model.get_parameter("layers.0.mlp.up_proj.weight")
    weight.data[0, 0] += 1.0  # what a copy of the model would undo
    generator.sync_weights()
    base_unchanged = bool(weight[0, 0] == before["layers.0.mlp.up_proj.weight"][1][0, 0] + 1.0)
    weight.data[0, 0] -= 1.0
    in_place = all(
        tensor.data_ptr() == before[name][0] and torch.allclose(tensor, before[name][1])
        for name, tensor in generator.model.state_dict().items()
    )
    sampling = SamplingParams(max_new_tokens=6, seed=1, ignore_eos=True)
    ((answer,),) = generator.generate(PROMPTS[:1], [sampling])
    scores = engine.logprobs(Batch([PROMPTS[0] + answer.tokens])).logprob[0][-6:]
    return base_unchanged, in_place, float((scores - torch.tensor(answer.logprobs)).abs().max())


def test_only_the_adapter_is_copied_after_the_first_sync(ranks: Any) -> None:
    ((base_unchanged, in_place, off),) = ranks(1, synced_adapter)
    assert base_unchanged
    assert in_place
    assert off < 1e-4


@pytest.mark.parametrize("layout", [Layout(pp=2), Layout(tp=2), pytest.param(Layout(cp=2), marks=pytest.mark.slow)])
@pytest.mark.slow
def test_every_layout_gives_the_same_completions(ranks: Any, layout: Layout) -> None:
    (alone, off), *_ = ranks(1, results, Layout())
    assert off < 1e-4
    for actual, worst in ranks(layout.world_size, results, layout):
        assert actual == alone
        assert worst < 1e-4


class StepGenerator(ReplicatedGenerator):
    """Samples one token of each completion in every poll."""

    def __init__(self, *, fixed_order: bool) -> None:
        super().__init__(load_model("tiny-dense"), byte_tokenizer())
        self.fixed_order = fixed_order


def late_request(group: Any) -> list[Any]:
    """Returns how a short request that joins two long ones ends: the ids in order of their end, and its completion."""
    outcomes: list[Any] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(distributed, "POLL_SECONDS", 0.0)
        for fixed_order in (True, False):
            engine = StepGenerator(fixed_order=fixed_order)

            def sample(engine: StepGenerator = engine) -> list[Any]:
                ids = [engine.submit(request(prompt, 12)) for prompt in PROMPTS[:2]]
                finished = [*engine.poll(), *engine.poll()]
                ids.append(engine.submit(request(PROMPTS[2], 3)))
                while len(finished) < 6:
                    finished += engine.poll()
                assert engine.poll(None) == []
                completions = {(entry.request_id, entry.index): entry.completion for entry in finished}
                return [
                    list(dict.fromkeys(ids.index(entry.request_id) for entry in finished)),
                    [[completions[request_id, index] for index in range(2)] for request_id in ids],
                ]

            outcomes.append(engine.controller.on_rank0(sample))
    together = [engine.generator.generate([list(request.prompt)], request.sampling, 2) for request in requests()]
    return [outcomes, [group for (group,) in together]]


def request(prompt: list[int], length: int) -> Request:
    return Request(tuple(prompt), SamplingParams(max_new_tokens=length, seed=length, ignore_eos=True), n=2)


def requests() -> list[Request]:
    return [request(PROMPTS[0], 12), request(PROMPTS[1], 12), request(PROMPTS[2], 3)]


@pytest.mark.parametrize("count", [1, 2])
def test_a_late_request_joins_unless_the_order_is_fixed(ranks: Any, count: int) -> None:
    """And its completion is that of a call of its own: to the bit where it ran alone, in a fixed order."""
    for outcomes, alone in ranks(count, late_request):
        (fixed_ends, fixed_completions), (ends, completions) = outcomes
        assert (fixed_ends[-1], ends[0]) == (2, 2)
        assert fixed_completions[2] == alone[2]
        tokens = [[completion.tokens for completion in group] for group in alone]
        for sampled in (fixed_completions, completions):
            assert [[completion.tokens for completion in group] for group in sampled] == tokens


def sampled_after_an_error(group: Any) -> bool:
    engine = ReplicatedGenerator(load_model("tiny-dense"), byte_tokenizer())

    def fail() -> None:
        engine.submit(request(PROMPTS[0], 50))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(distributed, "POLL_SECONDS", 0.0)
            engine.poll()
        raise KeyError

    with pytest.raises(KeyError):
        engine.controller.on_rank0(fail)
    engine.sync_weights()
    return bool(engine.controller.on_rank0(engine.poll))


def test_requests_that_an_error_left_are_dropped(ranks: Any) -> None:
    assert ranks(2, sampled_after_an_error) == [False, False]


def results_beside_cancelled_requests(group: Any) -> Any:
    """Returns the completions of a request beside others that are cancelled, or refused, and what is left."""
    engine = StepGenerator(fixed_order=False)

    def sample() -> Any:
        runs, kept, waits = (engine.submit(request(prompt, 12)) for prompt in PROMPTS[:3])
        engine.cancel(waits)
        finished = engine.poll()
        engine.cancel(runs)
        engine.cancel(runs)
        refused = engine.submit(Request((10**6,), SamplingParams(), n=2))
        while len(finished) < 3:
            finished += engine.poll()
        engine.cancel(kept)
        assert engine.poll(None) == []
        assert [entry.request_id for entry in finished] == [refused, kept, kept]
        assert isinstance(finished[0].error, ValueError)
        return [entry.completion.tokens for entry in finished[1:] if entry.completion is not None]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(distributed, "POLL_SECONDS", 0.0)
        sampled = engine.controller.on_rank0(sample)
    ((*alone,),) = engine.generator.generate([PROMPTS[1]], request(PROMPTS[1], 12).sampling, 2)
    return sampled == [completion.tokens for completion in alone], engine._session.busy


def test_a_cancelled_or_refused_request_leaves_the_others_as_they_are(ranks: Any) -> None:
    assert ranks(2, results_beside_cancelled_requests) == [(True, False)] * 2
