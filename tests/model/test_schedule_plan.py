"""A schedule plan equals forward and backward bit for bit, also interleaved with another microbatch's."""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from postlude import LanguageModel, Microbatch, OutputInputs, pack
from postlude.model import MTPOptions
from postlude.model.blocks import BLOCKS, MoE, MoEConfig
from postlude.model.context import ForwardContext
from postlude.model.schedule_plan import AsyncExchange, interleave
from postlude.model.steps import LayerStep, exchange
from postlude.trace.recorder import Recorder
from tests.model.small import sequences, small_config

Gradients = dict[str, Tensor | None]
AGAIN = ("selective", "full")


def batch(depths: int = 0) -> list[Microbatch]:
    return pack(sequences(5, 8, 3, 12, 7, 9), budget=14, depths=depths)


@dataclass(frozen=True)
class Processor:
    """Has MTPOptions for models with depths, which declare the requested depths, or not."""

    mtp_options: MTPOptions | None = field(default_factory=MTPOptions)
    stop_trunk: bool = False
    stop_head: bool = False

    def __call__(self, inputs: OutputInputs, bonus: float) -> dict[str, Any]:
        stats = inputs.head.logprobs(inputs.hidden, inputs.microbatch.targets, entropy=True)
        loss = (-stats.logprob - bonus * stats.entropy).sum() + _squared_norm(inputs)
        if inputs.config.pattern.mtp:
            for depth in inputs.depths(stop_trunk=self.stop_trunk, stop_head=self.stop_head):
                loss = loss - 0.3 * depth.head.logprobs(depth.hidden, depth.microbatch.targets).logprob.sum()
                loss = loss + _squared_norm(depth)
        return {"loss": loss, "parts": [stats.logprob.detach(), (inputs.microbatch.index, "text")]}


def _squared_norm(inputs: OutputInputs) -> Tensor:
    """A second use of the states, and a third."""
    return (0.01 * inputs.hidden.square() + 0.03 * inputs.hidden).sum()


processor = Processor()


def gradients(model: LanguageModel) -> Gradients:
    return {name: parameter.grad for name, parameter in model.named_parameters()}


def run_unplanned(model: LanguageModel, microbatches: list[Microbatch], processor: Processor = processor) -> list[Any]:
    results = []
    for microbatch in microbatches:
        results.append(model(microbatch, output_processor=processor, output_processor_context=0.1))
        results[-1]["loss"].backward()
    return results


def run_planned(model: LanguageModel, microbatches: list[Microbatch], processor: Processor = processor) -> list[Any]:
    """Runs each forward interleaved with the backward of the previous microbatch."""
    results: list[Any] = []
    backwards: list[Any] = []
    for microbatch in microbatches:
        plan = model.build_schedule_plan(microbatch, output_processor=processor, output_processor_context=0.1)
        results.append(interleave(plan.forward_steps(), *backwards)[0])
        backwards = [plan.backward_steps(results[-1]["loss"])]
    interleave(*backwards)
    return results


def run_deferred(model: LanguageModel, microbatches: list[Microbatch]) -> list[Any]:
    """Runs all forwards, all backwards, and then the weight gradients."""
    options = {"output_processor": processor, "output_processor_context": 0.1}
    plans = [model.build_schedule_plan(microbatch, **options) for microbatch in microbatches]
    results = [plan.forward() for plan in plans]
    completed: list[list[Any]] = [[], []]
    for plan, result in zip(plans, results, strict=True):
        interleave(plan.backward_steps(result["loss"], complete=completed[0].append, compute_wgrads=False))
    products = [name for name, parameter in model.named_parameters() if "attention" in name and parameter.ndim == 2]
    assert products
    assert all(gradients(model)[name] is None for name in products)
    for plan in plans:
        plan.flush_wgrads(completed[1].append)
    assert completed[0] == completed[1]
    assert completed[0][-1] is model
    assert all(not plan.wgrad_queue for plan in plans)
    return results


def assert_alike(plain: LanguageModel, planned: LanguageModel, results: list[Any], planned_results: list[Any]) -> None:
    for result, expected in zip(planned_results, results, strict=True):
        assert torch.equal(result["loss"], expected["loss"])
        assert torch.equal(result["parts"][0], expected["parts"][0])
        assert result["parts"][1] == expected["parts"][1]
    unequal = [
        name
        for (name, before), after in zip(gradients(plain).items(), gradients(planned).values(), strict=True)
        if (before is None) != (after is None) or (before is not None and not torch.equal(before, after))
    ]
    assert not unequal


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
@pytest.mark.parametrize(
    ("pattern", "tied"),
    [
        ("[*-]{3}", False),
        ("[*-]{3}", True),
        ("[*E]{2}", False),
        pytest.param("M[G-][S+E]/[*E]", True, marks=pytest.mark.slow),
    ],
)
def test_interleaved_microbatches_equal_separate_ones(pattern: str, tied: bool, recompute: Any) -> None:
    config = small_config(pattern, tied_head=tied)
    plain, interleaved = (LanguageModel(config, recompute=recompute) for _ in range(2))
    microbatches = batch(len(config.pattern.mtp))
    assert_alike(plain, interleaved, run_unplanned(plain, microbatches), run_planned(interleaved, microbatches))


@pytest.mark.parametrize("recompute", ["none", pytest.param("selective", marks=pytest.mark.thorough), "full"])
@pytest.mark.parametrize("pattern", ["[*E]{2}", "M[G-][S+E]/[*E]"])
def test_deferred_weight_gradients_equal_immediate_ones(pattern: str, recompute: Any) -> None:
    config = small_config(pattern, tied_head=True)
    plain, planned = (LanguageModel(config, recompute=recompute) for _ in range(2))
    microbatches = batch(len(config.pattern.mtp))
    assert_alike(plain, planned, run_unplanned(plain, microbatches), run_deferred(planned, microbatches))


def test_a_layer_that_is_used_twice_completes_once_after_both_uses() -> None:
    model = LanguageModel(small_config("[*-]/[*-][*-]/[*-][*-]", mtp_repeated=True))
    plan = model.build_schedule_plan(batch(2)[0], output_processor=processor, output_processor_context=0.1)
    done: list[tuple[Any, list[Tensor]]] = []

    def complete(module: torch.nn.Module) -> None:
        done.append((module, [parameter.grad.clone() for parameter in module.parameters()]))

    plan.backward(plan.forward()["loss"], complete=complete)
    first, second = model.mtp.layers
    assert [module for module, _ in done] == [second, first, *model.layers.values(), model]
    for module, finished in done:
        assert all(map(torch.equal, finished, (parameter.grad for parameter in module.parameters())))


TRUNK = small_config("[*E]/[*E]/[*E]", tied_head=True)
REPEATED = small_config("[*-]/[*-][*E]/[*-][*E]/[*-][*E]", mtp_repeated=True)


@pytest.mark.parametrize(
    ("config", "processor_type", "recompute"),
    [
        (TRUNK, Processor(), "none"),
        (TRUNK, Processor(MTPOptions(stop_trunk=True), stop_trunk=True), "none"),
        (REPEATED, Processor(), "none"),
        (REPEATED, Processor(mtp_options=None), "none"),
        *(
            pytest.param(config, Processor(stop_head=True), recompute, marks=pytest.mark.thorough)
            for config in (TRUNK, REPEATED)
            for recompute in ("selective", "full")
        ),
    ],
)
def test_planned_mtp_depths_equal_those_of_a_forward(config: Any, processor_type: Processor, recompute: Any) -> None:
    plain, interleaved = (LanguageModel(config, recompute=recompute) for _ in range(2))
    microbatches = batch(len(config.pattern.mtp))
    results = run_unplanned(plain, microbatches, processor_type)
    assert_alike(plain, interleaved, results, run_planned(interleaved, microbatches, processor_type))


def exchanges(model: LanguageModel, processor: Any) -> list[str]:
    plan = model.build_schedule_plan(batch(2)[0], output_processor=processor, output_processor_context=0.1)
    return [part.name for part in plan.parts if isinstance(part, AsyncExchange)]


def test_a_plan_overlaps_the_exchanges_of_mtp_depths_if_the_processor_has_mtp_options() -> None:
    model = LanguageModel(small_config("[*E]/[*E]"), blocks={**BLOCKS, "E": ExchangingMoE})
    trunk_exchanges = ["layers.0 moe.dispatch", "layers.0 moe.combine"]
    assert exchanges(model, processor) == [
        *trunk_exchanges,
        "mtp.0.layers.0 moe.dispatch",
        "mtp.0.layers.0 moe.combine",
    ]
    assert exchanges(model, Processor(mtp_options=None)) == trunk_exchanges
    repeated = LanguageModel(small_config("[*E]/[*E]/[*E]", mtp_repeated=True), blocks={**BLOCKS, "E": ExchangingMoE})
    assert exchanges(repeated, processor) == [
        *trunk_exchanges,
        *["mtp.0.layers.0 moe.dispatch", "mtp.0.layers.0 moe.combine"] * 2,
    ]


def test_a_processor_that_requests_depths_unlike_its_mtp_options_is_refused() -> None:
    with pytest.raises(
        ValueError, match=r"requests depths with stop_trunk=True, but its `mtp_options` has stop_trunk=False"
    ):
        run_planned(LanguageModel(small_config("[*-]/[*-]")), batch(1), Processor(stop_trunk=True))


@dataclass
class Result:
    """A result type that is not a pytree node."""

    loss: Tensor
    nested: dict[str, Any]


def test_any_result_type_is_returned_unchanged() -> None:
    model = LanguageModel(small_config("[*E]"))
    results: list[Result] = []

    def result_processor(inputs: OutputInputs, context: Any) -> Result:
        loss = inputs.head.logprobs(inputs.hidden, inputs.microbatch.targets).logprob.sum()
        results.append(Result(loss, {"context": context, "index": inputs.microbatch.index}))
        return results[-1]

    marker = object()
    plan = model.build_schedule_plan(batch()[0], output_processor=result_processor, output_processor_context=marker)
    result = plan.forward()
    assert result is results[0]
    assert result.nested["context"] is marker
    plan.backward(result.loss)
    assert all(gradient is not None for gradient in gradients(model).values())


def test_plan_without_a_processor_equals_forward() -> None:
    model = LanguageModel(small_config("[*-]"))
    (microbatch, *_) = batch()
    assert torch.equal(model.build_schedule_plan(microbatch).forward(), model(microbatch))
    assert torch.equal(model.build_schedule_plan(microbatch, targets=True).forward(), model(microbatch, targets=True))


@dataclass(frozen=True)
class RecordedSpans(Recorder):
    """Records the spans of a plan, with their microbatches."""

    log: list[tuple[int, str, str]]
    microbatch: int = 0

    @contextlib.contextmanager
    def span(self, kind: str, name: str) -> Iterator[None]:
        self.log.append((self.microbatch, kind, name))
        yield


@dataclass(frozen=True)
class LoggedExchange:
    """An exchange with this rank alone, which logs when rows are sent and received."""

    @property
    def reverse(self) -> "LoggedExchange":
        return self

    def __call__(self, rows: Tensor, *arguments: Any) -> Tensor:
        return rows * 1.0

    def start(self, rows: Tensor, kind: str, name: str, heard: RecordedSpans) -> Callable[[], Tensor]:
        heard.log.append((heard.microbatch, "start", f"{kind} {name}"))

        def wait() -> Tensor:
            heard.log.append((heard.microbatch, "arrived", f"{kind} {name}"))
            return rows * 1.0

        return wait


class ExchangingMoE(MoE):
    """Experts whose rows are sent and returned, although all experts are local."""

    def steps(self) -> tuple[LayerStep, ...]:
        def between() -> Iterator[LayerStep]:
            for step in super(ExchangingMoE, self).steps():
                yield from [exchange("dispatch", "rows", plan_name="to_experts")] if step.name == "experts" else []
                yield replace(step, syncs_host=True) if step.name == "plan" else step
                yield from [exchange("combine", "rows", plan_name="to_tokens")] if step.name == "experts" else []

        return tuple(between())

    def plan(self, pending_route: Any, context: ForwardContext) -> dict[str, Any]:
        return {**super().plan(pending_route, context), "to_experts": LoggedExchange(), "to_tokens": LoggedExchange()}


@pytest.mark.parametrize(
    ("pattern", "repeated"),
    [
        ("[*E]{3}", False),
        ("-[*E][*-][*E]-", False),
        ("[*E]/[*E]/[*E]", False),
        ("[*E]/[*E]/[*E]", True),
        ("[*E][*-]/[*-][*E]", False),
    ],
)
def test_every_exchange_overlaps_the_other_microbatchs_compute(pattern: str, repeated: bool) -> None:
    """Between the start of an exchange or size exchange and its wait, the other microbatch computes something."""
    config = small_config(pattern, mtp_repeated=repeated)
    plain, far = LanguageModel(config), LanguageModel(config, blocks={**BLOCKS, "E": ExchangingMoE})
    first, second, *_ = batch(len(config.pattern.mtp))
    log: list[tuple[int, str, str]] = []
    plans = [
        far.build_schedule_plan(
            model, output_processor=processor, output_processor_context=0.1, recorder=RecordedSpans(log, number)
        )
        for number, model in enumerate((first, second))
    ]
    results = [plans[0].forward()]
    log.clear()
    results.append(interleave(plans[1].forward_steps(), plans[0].backward_steps(results[0]["loss"]))[0])
    events, log = log.copy(), []
    plans[1].backward(results[1]["loss"])
    assert_alike(plain, far, run_unplanned(plain, [first, second]), results)
    starts = [index for index, (_, kind, _) in enumerate(events) if kind == "start"]
    assert len(starts) == 4 * pattern.replace("{3}", "[*E]" * 2).count("E")
    for index in starts:
        microbatch_name, _, name = events[index]
        arrived = events.index((microbatch_name, "arrived", name), index)
        assert any(
            event[0] != microbatch_name and event[1] in ("forward", "backward") for event in events[index:arrived]
        ), name
    waits = [index for index, (_, kind, name) in enumerate(events) if kind == "forward" and name.endswith("moe.plan")]
    for index in waits[1:]:  # the first time a backward has not begun
        assert events[index - 1][0] == 0


class WideMergeMoE(ExchangingMoE):
    """Defers several weight gradients after the experts, too."""

    def merge(
        self,
        hidden: Tensor,
        rows: Tensor,
        order: Tensor,
        inverse: Tensor,
        weights: Tensor,
        shared: Tensor | None,
        context: ForwardContext,
    ) -> Any:
        for layer in (self.latent_down, self.latent_up):
            rows = rows + layer(hidden if layer is self.latent_down else rows).mean()
        return super().merge(hidden, rows, order, inverse, weights, shared, context)


class RowlessMoE(WideMergeMoE):
    """Experts without rows, whose weights defer no gradient."""

    def run_experts(self, rows: Tensor, counts: Tensor, context: ForwardContext) -> Any:
        return {"rows": rows * 2.0}


def test_modules_complete_at_the_same_step_for_any_expert_load() -> None:
    """Collectives may start there, so a rank whose experts got no rows must not be earlier than others."""
    experts = MoEConfig(experts=4, top_k=2, intermediate_size=12, latent_size=8)
    config = small_config("[*E]{3}", blocks={"E": experts})

    def heard(block: type[MoE]) -> list[tuple[int, str, str]]:
        log: list[tuple[int, str, str]] = []
        model = LanguageModel(config, blocks={**BLOCKS, "E": block})
        options = {"output_processor": processor, "output_processor_context": 0.1, "recorder": RecordedSpans(log)}
        plan = model.build_schedule_plan(batch()[0], **options)
        plan.backward(plan.forward()["loss"], complete=lambda module: log.append((0, "done", type(module).__name__)))
        return [event for event in log if event[1] in ("start", "arrived", "done")]

    expected = heard(WideMergeMoE)
    assert heard(RowlessMoE) == expected
    assert [kind for _, kind, _ in expected].count("done") == 4  # three layers and the stage
