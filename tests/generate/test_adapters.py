"""A generator with named adapters equals a model built with them, and the merged model."""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from postlude import LanguageModel, ModelConfig, pack
from postlude.generate.adapters import NamedAdapters
from postlude.generate.generator import Generator
from postlude.generate.protocol import Completion, Request
from postlude.generate.sampling_params import SamplingParams
from postlude.generate.session import Session, SessionTask
from postlude.hf.linear_layers import adapter_configs
from postlude.layout import Layout
from postlude.lora import AdapterConfig, LoRA
from postlude.model.adapters import is_adapter
from postlude.model.context import ForwardContext
from postlude.model.parallel import fuse_weights
from postlude.ops.norm import Norm
from tests.equality import assert_equal
from tests.generate.test_generator import prompts, teacher_forced
from tests.generate.test_scheduler import EagerGenerator, GraphGenerator, assert_alike
from tests.meshes import mesh
from tests.model.small import VOCABULARY, small_config

GREEDY = SamplingParams(max_new_tokens=6, temperature=0.0, ignore_eos=True)
PATTERNS = ["[*-][S-]", "[*E]", "[M-]", "[G-]", "[+-][*E]"]
BOTH = pytest.mark.parametrize("generator_type", [EagerGenerator, GraphGenerator], ids=["stepped", "recorded"])


def adapted(config: ModelConfig, lora: LoRA, seed: int = 1) -> LanguageModel:
    """Returns a model with adapters whose B is not zero."""
    model = LanguageModel(config, adapters=adapter_configs(lora, config, None))
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        if is_adapter(name):
            parameter.data.normal_(0, 0.4, generator=generator)
    return model


def named(model: LanguageModel, lora: LoRA) -> tuple[Mapping[str, AdapterConfig], dict[str, tuple[Tensor, Tensor]]]:
    configs, tensors = adapter_configs(lora, model.config, None), model.state_dict()
    return configs, {name: (tensors[f"{name}.adapter.a"], tensors[f"{name}.adapter.b"]) for name in configs}


def base_of(model: LanguageModel) -> LanguageModel:
    base = LanguageModel(model.config)
    base.load_state_dict({name: tensor for name, tensor in model.state_dict().items() if not is_adapter(name)})
    return base


def logprob_difference(model: LanguageModel, prompt_list: list[list[int]], answered: list[list[Completion]]) -> float:
    """Returns the largest difference between log-probs of completions and a forward of `model`."""
    expected = teacher_forced(model, prompt_list, answered)
    completions = [completion for group in answered for completion in group]
    return max(
        float((torch.tensor(completion.logprobs) - logprobs).abs().max())
        for completion, logprobs in zip(completions, expected, strict=True)
    )


@pytest.mark.parametrize(
    ("pattern", "experts"),
    [(pattern, "shared_outer") for pattern in PATTERNS]
    + [(pattern, "per_expert") for pattern in PATTERNS if "E" in pattern],
)
def test_log_probs_equal_a_model_built_with_the_adapter(pattern: str, experts: Any) -> None:
    lora = LoRA(rank=3, alpha=5.0, experts=experts, ranks={} if "*" not in pattern else {"q_proj": 5})
    model = adapted(small_config(pattern), lora)
    prompt_list = prompts(VOCABULARY, (5, 1, 9))
    for generator_type in (EagerGenerator, GraphGenerator) if "+" in pattern else (Generator,):
        generator = generator_type(base_of(model))
        generator.load_adapter("one", *named(model, lora))
        answered = generator.generate(prompt_list, GREEDY, adapter="one")
        assert logprob_difference(model, prompt_list, answered) < 1e-5
        assert logprob_difference(generator.model, prompt_list, answered) > 1e-2


@BOTH
def test_routers_embedding_and_head_have_adapters_too(generator_type: type[Generator]) -> None:
    for target in ("router", "embedding", "head", "all,router,embedding,head"):
        lora = LoRA(rank=3, alpha=5.0, targets=target)
        model = adapted(small_config("[*E][*-]"), lora)
        generator, prompt_list = generator_type(base_of(model)), prompts(VOCABULARY, (5, 1, 9))
        generator.load_adapter("one", *named(model, lora))
        answered = generator.generate(prompt_list, GREEDY, adapter="one")
        assert logprob_difference(model, prompt_list, answered) < 1e-5
        assert logprob_difference(generator.model, prompt_list, answered) > 1e-4, target


@BOTH
def test_each_call_selects_its_adapter_and_the_base_is_unchanged(generator_type: type[Generator]) -> None:
    """Adapters of different rank, targets and scale; one is replaced, one removed."""
    config = small_config("[*-][*E]")
    loras = {
        "all": LoRA(rank=4, alpha=8.0),
        "other": LoRA(rank=2, alpha=1.0),
        "attention": LoRA(rank=20, targets="attention"),
    }
    models = {name: adapted(config, lora, seed) for seed, (name, lora) in enumerate(loras.items())}
    base = base_of(models["all"])
    before = {name: (tensor.data_ptr(), tensor.clone()) for name, tensor in base.state_dict().items()}
    generator, prompt_list = generator_type(base), prompts(VOCABULARY, (5, 1, 9))
    for name, lora in loras.items():
        generator.load_adapter(name, *named(models[name], lora))
    plain = generator.generate(prompt_list, GREEDY)
    moved = {name: tensor.data_ptr() for name, tensor in base.state_dict().items()}  # a first call may fuse weights
    for name in ("all", "attention", "other", "all"):
        assert (
            logprob_difference(models[name], prompt_list, generator.generate(prompt_list, GREEDY, adapter=name)) < 1e-5
        )
    assert generator.generate(prompt_list, GREEDY) == plain

    replacement = adapted(config, loras["all"], seed=7)
    slot = generator.adapters._loaded["all"].slot
    address = slot.values.data_ptr()
    generator.load_adapter("all", *named(replacement, loras["all"]))
    assert generator.adapters._loaded["all"].slot is slot
    assert slot.values.data_ptr() == address
    assert logprob_difference(replacement, prompt_list, generator.generate(prompt_list, GREEDY, adapter="all")) < 1e-5
    generator.remove_adapter("other")
    with pytest.raises(ValueError, match="adapter 'other' is not loaded; there are 'all', 'attention'"):
        generator.generate(prompt_list, GREEDY, adapter="other")
    assert generator.generate(prompt_list, GREEDY) == plain
    for name, tensor in base.state_dict().items():
        assert torch.equal(tensor, before[name][1])
        assert tensor.data_ptr() == moved[name]


def test_an_adapter_of_the_same_shape_uses_the_same_memory() -> None:
    """A captured CUDA graph that reads it stays valid."""
    config, lora = small_config("[*-]"), LoRA(rank=4)
    generator = Generator(base_of(adapted(config, lora)))
    for name, rank in (("one", 4), ("two", 7), ("wider", 17)):
        changed = LoRA(rank=rank)
        generator.load_adapter(name, *named(adapted(config, changed), changed))
    slots = {name: generator.adapters._loaded[name].slot for name in generator.adapters.names}
    assert slots["one"] is slots["two"]
    assert slots["one"] is not slots["wider"]


def test_an_adapter_that_does_not_fit_is_refused_and_changes_nothing() -> None:
    config, lora = small_config("[*-]"), LoRA(rank=4)
    model = adapted(config, lora)
    configs, pairs = named(model, lora)
    generator, prompt_list = Generator(base_of(model)), prompts(VOCABULARY, (5,))
    generator.load_adapter("one", configs, pairs)
    expected = generator.generate(prompt_list, GREEDY, adapter="one")
    layer = "layers.0.attention.q_proj"
    wrong = pairs | {layer: (pairs[layer][0][:, 1:], pairs[layer][1])}
    refusals = {
        "adapter 'one' has A of [4, 15] for layers.0.attention.q_proj, but its config and the model ask for [4, 16]": (
            configs,
            wrong,
        ),
        "has only one of config and matrices for layers.0.attention.q_proj": (
            configs,
            {name: pair for name, pair in pairs.items() if name != layer},
        ),
        "is for layers.7.mlp.up_proj, but the model has no such layer": (
            {"layers.7.mlp.up_proj": AdapterConfig(4, 1.0)},
            {},
        ),
        "adapts no layer": ({}, {}),
    }
    for sentence, arguments in refusals.items():
        with pytest.raises(ValueError, match=re.escape(sentence)):
            generator.load_adapter("one", *arguments)
    assert generator.generate(prompt_list, GREEDY, adapter="one") == expected
    with pytest.raises(ValueError, match="has adapters of its own"):
        Generator(model).load_adapter("one", configs, pairs)


class FakeAttention:
    """Attention that needs no cache."""

    def attend(self, name: str, query: Tensor, key: Tensor, value: Tensor, scores: Any) -> Tensor:
        return query * 0.5 + key.sum() + value.sum()

    def attend_latents(self, name: str, inputs: Any, new: Any, decode: Any, prefill: Any) -> Tensor:
        def attend_cache(queries: Any, keys: Tensor, values: Tensor, scores: Any) -> Tensor:
            return queries[0] * queries[1].sum(-1, keepdim=True) + values.sum()

        output: Tensor = decode(inputs, new, attend_cache)
        return output


@pytest.mark.parametrize(
    ("pattern", "targets"),
    [("[*-]", "all"), ("[*-]", "q_proj,v_proj,up_proj"), ("[+-]", "all"), ("[+-]", "kv_a_proj,kv_b_proj,up_proj")],
)
@torch.no_grad()
def test_fused_decoding_of_an_adapted_block_equals_the_block(pattern: str, targets: str) -> None:
    """The GPU path; layers of a fused projection without an adapter get one of zeros."""
    lora = LoRA(rank=3, alpha=5.0, targets=targets, ranks={} if "+" in pattern else {"q_proj": 5})
    model = adapted(small_config(pattern), lora)
    generator = Generator(base_of(model))
    generator.load_adapter("one", *named(model, lora))
    for block in generator.model.blocks:
        for layers in block.fused_projections():
            fuse_weights(layers)
    generator.adapters.activate("one")
    (microbatch,) = pack([torch.arange(7)], budget=64)
    context: Any = ForwardContext(microbatch, generator.model.mesh, decode_state=FakeAttention())  # type: ignore[arg-type]
    hidden = torch.randn(7, 16, generator=torch.Generator().manual_seed(0))
    for block, expected in zip(generator.model.blocks, model.blocks, strict=True):
        norm = Norm(block.norm.weight, block.norm.eps, block.norm.offset)
        actual = block.fused_decode(hidden.clone(), norm, context)
        assert actual is not None
        assert_equal(actual, hidden + expected.sublayer(expected.norm(hidden), context), block.name)


@BOTH
def test_requests_of_one_session_name_their_adapters(generator_type: type[Generator]) -> None:
    config, loras = small_config("[*-]"), {"one": LoRA(rank=4), "two": LoRA(rank=2, targets="mlp")}
    models = {name: adapted(config, lora, seed) for seed, (name, lora) in enumerate(loras.items())}
    base = base_of(models["one"])
    generator = generator_type(base)
    for name, lora in loras.items():
        generator.load_adapter(name, *named(models[name], lora))
    models_of = {None: base, **models}
    session = Session(generator)
    request_ids, finished = {}, []
    names = ("one", None, "two", "one", None, "two")
    for name, prompt in zip(names, prompts(VOCABULARY, (3, 5, 2, 7, 1, 4)), strict=True):
        request_ids[session.add(Request(tuple(prompt), GREEDY, adapter=name))] = (name, prompt)
        finished += session.step()
    while session.busy:
        finished += session.step()
    assert len(finished) == len(names)
    for result in finished:
        name, prompt = request_ids[result.request_id]
        assert result.completion is not None
        assert logprob_difference(models_of[name], [prompt], [[result.completion]]) < 1e-5
    with pytest.raises(ValueError, match="adapter 'three' is not loaded"):
        session.add(Request((1,), GREEDY, adapter="three"))


def test_completions_continue_with_a_replaced_adapter_and_fail_with_a_removed_one() -> None:
    config, lora = small_config("[*-]"), LoRA(rank=4)
    first, second = adapted(config, lora), adapted(config, lora, seed=2)
    generator = Generator(base_of(first))
    generator.load_adapter("one", *named(first, lora))
    session = Session(generator, "1")
    session.add(Request((1, 2, 3), GREEDY, adapter="one"))
    for _ in range(3):
        session.step()
    session.update_weights(lambda: generator.load_adapter("one", *named(second, lora)), "2")
    (waiting,) = (session.add(Request((5,), GREEDY, adapter=None)),)
    finished = []
    while not finished:
        finished = session.step()
    completion = finished[0].completion
    assert completion is not None
    start = completion.versions[1].start
    assert [span.version for span in completion.versions] == ["1", "2"]
    expected = teacher_forced(second, [[1, 2, 3]], [[completion]])[0]
    torch.testing.assert_close(torch.tensor(completion.logprobs[start:]), expected[start:], rtol=0, atol=1e-5)

    removed = session.add(Request((4,), GREEDY, adapter="one"))
    generator.remove_adapter("one")
    results = {}
    while session.busy:
        results |= {result.request_id: result for result in session.step()}
    assert "adapter 'one' is not loaded; there are none" in str(results[removed].error)
    assert results[waiting].completion is not None


@BOTH
def test_adapters_take_turns_between_clients_and_completions_equal_those_alone(generator_type: type[Generator]) -> None:
    """Many requests of one client, of two adapters, do not delay another client. A turn has 4 steps on this clock."""
    config, loras = small_config("[*-]"), {"one": LoRA(rank=4), "two": LoRA(rank=2), "three": LoRA(rank=3)}
    models = {name: adapted(config, lora, seed) for seed, (name, lora) in enumerate(loras.items())}
    generator = generator_type(base_of(models["one"]), max_sequences=2)
    for name, lora in loras.items():
        generator.load_adapter(name, *named(models[name], lora))
    now, finished, order = [0.0], {}, []
    session = Session(generator, clock=lambda: now[0])
    prompt_list = prompts(VOCABULARY, (3, 5, 2, 7, 1, 4))
    names = ("one", "two", "one") * 2
    sent = [
        session.add(Request(tuple(prompt), GREEDY, adapter=name, client=("many", str(number))))
        for number, (name, prompt) in enumerate(zip(names, prompt_list, strict=True))
    ]
    other = session.add(Request((1, 2), GREEDY, adapter="three", client=("other",)))
    while session.busy:
        now[0] += 0.25
        for result in session.step():
            finished[result.request_id] = result.completion
            order.append(result.request_id)
    later = order[order.index(other) + 1 :]
    assert len(later) >= 4, "the other client waits for the first one's requests"
    assert {names[sent.index(request_id)] for request_id in later} == {"one", "two"}
    assert logprob_difference(models["three"], [[1, 2]], [[finished[other]]]) < 1e-5
    for name in ("one", "two"):
        places = [place for place in range(len(sent)) if names[place] == name]
        alone = generator.generate([prompt_list[place] for place in places], GREEDY, adapter=name)
        assert_alike([[finished[sent[place]]] for place in places], alone)


class SlowAdapters(NamedAdapters):
    """Advances a clock by 5 seconds when the adapter changes."""

    def __init__(self, model: LanguageModel) -> None:
        super().__init__(model)
        self.now, self.active = 0.0, None

    def activate(self, name: str | None) -> None:
        self.now += 5.0 * (name != self.active)
        self.active = name
        super().activate(name)


def test_a_turn_is_long_compared_with_what_it_takes_to_begin() -> None:
    lora = LoRA(rank=4)
    model = adapted(small_config("[*-]"), lora)
    generator = Generator(base_of(model))
    generator.adapters = adapters = SlowAdapters(generator.model)
    generator.load_adapter("one", *named(model, lora))
    session, active = Session(generator, clock=lambda: adapters.now), []
    for name in ("one", None):
        session.add(Request((1, 2, 3), replace(GREEDY, max_new_tokens=50), adapter=name))
    while session.busy:
        adapters.now += 1.0
        finished = session.step()
        active.append("finished" if finished else adapters.active)
    turns = [len(list(steps)) for name, steps in itertools.groupby(active) if name != "finished"]
    assert 4 <= len(turns) <= 6
    assert min(turns[:2]) >= 20


def test_tasks_run_between_steps_with_their_adapter_and_clients_take_turns() -> None:
    lora = LoRA(rank=4)
    model = adapted(small_config("[*-]"), lora)
    generator = Generator(base_of(model))
    generator.load_adapter("one", *named(model, lora))
    session, ran = Session(generator), list[Any]()

    def add(name: str, adapter: str | None, client: str) -> None:
        def run() -> None:
            ran.append((name, generator.adapters.slot.loaded if adapter else generator.adapters.slot.layers))

        session.add_task(SessionTask(adapter, (client,), run, lambda error: ran.append((name, str(error)))))

    for number in range(3):
        add(f"a{number}", None, "a")
    add("b", None, "b")
    while session.busy:
        before = len(ran)
        session.step()
        assert len(ran) == before + 1
    assert ran == [(name, {}) for name in ("a0", "b", "a1", "a2")]
    ran.clear()
    add("c", "one", "a")
    session.step()
    add("d", "one", "a")
    generator.remove_adapter("one")
    session.step()
    assert ran == [("c", "one"), ("d", "adapter 'one' is not loaded; there are none. Load it, or name none.")]
    assert not session.busy


def generated(group: Any, layout: Layout, pattern: str, lora: LoRA) -> list[list[float]]:
    config = small_config(pattern, vocab_size=64)
    full_model = adapted(config, lora)
    model = LanguageModel(config, mesh=mesh(layout))
    generator = Generator(model)
    generator.load_adapter("one", *named(full_model, lora))
    prompt_list = prompts(64, (5, 1, 9))
    return [
        completion.logprobs for group in generator.generate(prompt_list, GREEDY, adapter="one") for completion in group
    ]


@pytest.mark.parametrize("pattern", ["[*-][*E]", pytest.param("[+-][G-][M-]", marks=pytest.mark.slow)])
def test_tensor_parallel_ranks_load_their_adapter_shards(ranks: Any, pattern: str) -> None:
    lora = LoRA(rank=3, alpha=5.0)
    expected = ranks(1, generated, Layout(), pattern, lora)[0]
    for actual in ranks(2, generated, Layout(tp=2), pattern, lora):
        assert [pytest.approx(logprobs, abs=1e-4) for logprobs in expected] == actual
