"""The output processor: defaults are processors, results are returned unchanged, gradients reach everything."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from postlude import LanguageModel, Microbatch, OutputInputs, Stage
from postlude.head import HeadConfig
from postlude.model.output import logits_processor, token_loss_processor
from postlude.ops.linear_logprobs import torch_epilogue
from postlude.ops.linear_logprobs.statistics import Slab
from tests.equality import assert_equal
from tests.model.small import VOCABULARY, small_config, small_microbatch, small_model

TIED = pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])


@TIED
def test_default_path_is_bit_identical_with_and_without_a_processor(tied: bool) -> None:
    model, microbatch = small_model(tied_head=tied), small_microbatch()
    logits = model(microbatch)
    assert logits.shape == (len(microbatch), VOCABULARY)
    assert torch.equal(logits, model(microbatch, output_processor=None, output_processor_context=None))
    assert torch.equal(logits, model(microbatch, output_processor=logits_processor))
    losses = model(microbatch, targets=True)
    assert torch.equal(losses, model(microbatch, output_processor=token_loss_processor))
    assert torch.equal(losses, model(microbatch, targets=microbatch.targets))


def test_token_losses_are_cross_entropy_and_zero_without_a_target() -> None:
    model, microbatch = small_model(), small_microbatch()
    expected = F.cross_entropy(model(microbatch), microbatch.targets, reduction="none", ignore_index=-100)
    assert_equal(model(microbatch, targets=True), expected)
    assert (model(microbatch, targets=True)[microbatch.targets < 0] == 0).all()


def test_without_targets_the_model_returns_logits() -> None:
    model, microbatch = small_model(), small_microbatch()
    assert torch.equal(model(microbatch, targets=None), model(microbatch))
    assert torch.equal(model(microbatch, targets=False), model(microbatch))
    with pytest.raises(TypeError, match="targets is True, a tensor"):
        model(microbatch, targets=1)


@TIED
def test_gradients_through_a_processor_equal_those_through_logits(tied: bool) -> None:
    microbatch = small_microbatch()

    def custom(inputs: OutputInputs, context: None) -> torch.Tensor:
        return -inputs.head.logprobs(inputs.hidden, inputs.microbatch.targets).logprob.sum()

    processed, dense = small_model(tied_head=tied), small_model(tied_head=tied)
    processed(microbatch, output_processor=custom).backward()
    F.cross_entropy(dense(microbatch), microbatch.targets, reduction="sum").backward()
    head = "embedding.weight" if tied else "head.weight"
    assert dict(processed.named_parameters())[head].grad.abs().sum() > 0
    for (name, actual), expected in zip(processed.named_parameters(), dense.parameters(), strict=True):
        assert_equal(actual.grad, expected.grad, f"gradient of {name}")


@TIED
def test_single_pass_objective_equals_two_passes(tied: bool) -> None:
    microbatch = small_microbatch(4, 7, 3, weight=[1.0, -0.5, 2.0])

    def loss(logprob: torch.Tensor, entropy: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return -weight * logprob - 0.1 * entropy

    def single_pass(inputs: OutputInputs, context: None) -> torch.Tensor:
        columns = inputs.microbatch.column("weight")
        return inputs.head.objective(inputs.hidden, inputs.microbatch.targets, loss, columns, entropy=True).loss

    def two_passes(inputs: OutputInputs, context: None) -> torch.Tensor:
        stats = inputs.head.logprobs(inputs.hidden, inputs.microbatch.targets, entropy=True)
        return loss(stats.logprob, stats.entropy, inputs.microbatch.column("weight")).sum()

    results = []
    for processor in (single_pass, two_passes):
        model = small_model(tied_head=tied, logit_scale=0.8, logit_softcap=4.0)
        total = model(microbatch, output_processor=processor)
        total.backward()
        results.append((total, {name: parameter.grad for name, parameter in model.named_parameters()}))
    (actual, gradients), (expected, references) = results
    assert_equal(actual, expected, "loss")
    for name, gradient in gradients.items():
        assert_equal(gradient, references[name], f"gradient of {name}")


def test_logits_and_logprobs_apply_the_same_scale_and_softcap() -> None:
    model, microbatch = small_model(logit_scale=0.7, logit_softcap=2.0), small_microbatch()
    logits = model(microbatch)
    assert logits.abs().max() < 2.0
    expected = logits.log_softmax(-1)
    entropy_expected = -(expected.exp() * expected).sum(-1)

    def logprob_stats(inputs: OutputInputs, context: None):
        return inputs.head.logprobs(inputs.hidden, inputs.microbatch.targets, entropy=True)

    stats = model(microbatch, output_processor=logprob_stats)
    has_target = microbatch.targets >= 0
    assert_equal(
        stats.logprob[has_target], expected.gather(-1, microbatch.targets.clamp_min(0)[:, None])[:, 0][has_target]
    )
    assert_equal(stats.entropy[has_target], entropy_expected[has_target])


def test_topk_equals_sorted_log_softmax() -> None:
    model, microbatch = small_model(), small_microbatch()
    values, ids = model(microbatch, output_processor=lambda inputs, _: inputs.head.topk(inputs.hidden, 4))
    expected = model(microbatch).log_softmax(-1).topk(4)
    assert_equal(values, expected.values)
    assert torch.equal(ids, expected.indices)


def test_sequence_level_objective_gets_its_own_sequences() -> None:
    model = small_model()
    microbatch = small_microbatch(4, 6, 2)
    sums = model(
        microbatch,
        output_processor=lambda inputs, _: inputs.microbatch.sequence_sum(
            inputs.head.logprobs(inputs.hidden, inputs.microbatch.targets).logprob
        ),
    )
    losses = model(microbatch, targets=True)
    assert_equal(sums, torch.stack([-losses[:4].sum(), -losses[4:10].sum(), -losses[10:].sum()]))


def run_plan(model: LanguageModel, *arguments: Any, **keywords: Any) -> Any:
    return model.build_schedule_plan(*arguments, **keywords).forward()


@pytest.mark.parametrize("run", [LanguageModel.__call__, run_plan], ids=["forward", "plan"])
def test_processor_is_keyword_only_and_called_once_with_its_context(run: Callable[..., Any]) -> None:
    model, microbatch, marker, calls = small_model(), small_microbatch(), object(), []

    def processor(*arguments: Any, **keywords: Any) -> str:
        calls.append((arguments, keywords))
        return "as it is"

    assert run(model, microbatch, None, output_processor=processor, output_processor_context=marker) == "as it is"
    ((arguments, keywords),) = calls
    inputs, context = arguments
    assert isinstance(inputs, OutputInputs)
    assert inputs.microbatch is microbatch
    assert context is marker
    assert not keywords
    for hook_arguments in ((processor,), (processor, marker), (None, processor, marker)):
        with pytest.raises(TypeError, match="positional argument"):
            run(model, microbatch, None, *hook_arguments)
    assert len(calls) == 1


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"output_processor": 3}, "must be callable"),
        ({"output_processor_context": 3}, "without an output_processor"),
        ({"output_processor": logits_processor, "targets": True}, "either targets or an output_processor"),
        ({"hidden": torch.zeros(17, 16)}, "embeds the microbatch's tokens itself"),
    ],
)
def test_misuse_is_refused_with_clear_error(arguments: dict, sentence: str) -> None:
    with pytest.raises((ValueError, TypeError), match=sentence):
        small_model()(small_microbatch(), **arguments)


def test_a_processor_on_a_stage_without_a_head_is_refused() -> None:
    first = small_model("[*-]{2}", stage=Stage(0, 2))
    with pytest.raises(ValueError, match="stage 0 of 2 has no output head"):
        first(small_microbatch(), output_processor=logits_processor)
    with pytest.raises(ValueError, match="stage 0 of 2 has no output head"):
        first.output_head()


def test_empty_microbatch_has_zero_weight() -> None:
    model = small_model()
    full = small_microbatch()
    empty = Microbatch(
        tokens=full.tokens[:0],
        batch_indices=full.batch_indices[:0],
        packing=type(full.packing).from_lengths(()),
        positions=full.positions[:0],
        targets=full.targets[:0],
        columns={},
        sequences=(),
        index=0,
        count=1,
        batch_tokens=len(full),
        batch_targets=1,
        target_count=0,
    )
    loss = model(empty, targets=True).sum()
    assert loss == 0
    loss.backward()
    assert all(p.grad is None or p.grad.abs().sum() == 0 for p in model.parameters())


def test_head_uses_the_configured_budget_and_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks as small as the budget give the same log-probs; the configured backend is used."""
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    chunks: list[int] = []
    accumulate = torch_epilogue.accumulate

    def counted(slab: Slab, state: Tensor, *, entropy: bool) -> None:
        chunks.append(slab.products.shape[1])
        accumulate(slab, state, entropy=entropy)

    monkeypatch.setattr(torch_epilogue, "accumulate", counted)
    config, microbatch = small_config(), small_microbatch()
    expected = LanguageModel(config, head=HeadConfig(backend="torch"))(microbatch, targets=True)
    assert chunks == [VOCABULARY]
    chunks.clear()
    chunked = LanguageModel(config, head=HeadConfig(memory_budget=1000))
    assert_equal(chunked(microbatch, targets=True), expected)
    assert len(chunks) > 1
    assert sum(chunks) == VOCABULARY
    chunks.clear()
    plain = LanguageModel(config, head=HeadConfig(backend="logits"))
    assert_equal(plain(microbatch, targets=True), expected)
    assert not chunks
    with pytest.raises(RuntimeError, match='backend="triton" cannot run: the tensors are on cpu'):
        LanguageModel(config, head=HeadConfig(backend="triton"))(microbatch, targets=True)


def test_invalid_head_settings_are_refused() -> None:
    with pytest.raises(ValueError, match="the backend of the head is 'cuda', but the choices are 'auto', 'torch'"):
        HeadConfig(backend="cuda")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match='memory_budget is 5, but backend="logits" holds all logits'):
        HeadConfig(backend="logits", memory_budget=5)
    with pytest.raises(ValueError, match="memory_budget is 0, but it must be a number of at least 1"):
        HeadConfig(memory_budget=0)
