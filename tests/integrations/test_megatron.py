"""`LogprobsProcessor` in a copy of Megatron-Core's hook equals the full head on one rank."""

import inspect
import sys
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from postlude.integrations.megatron import LogprobsProcessor, MegatronContext, MegatronDepth, OutputHook
from postlude.ops.linear_logprobs import TokenStats
from tests.conftest import Ranks
from tests.equality import assert_equal
from tests.ops.dense_head import dense

LENGTH, BATCH, FEATURES = 8, 3, 6
PADDED, REAL = 40, 37  # rows of the vocabulary, and how many of them mean something
HOOK = [
    "hidden_states",
    "output_layer",
    "output_weight",
    "labels",
    "loss_mask",
    "input_ids",
    "position_ids",
    "attention_mask",
    "decoder_input",
    "inference_context",
    "packed_seq_params",
    "runtime_gather_output",
    "context",
    "compute_language_model_loss",
    "scale_logits",
    "config",
]


@dataclass
class Config:
    """The TransformerConfig fields that the hook's caller and the output layer read."""

    sequence_parallel: bool = False
    use_mup: bool = False
    mup_output_mult: float = 1.0
    mtp_num_layers: int | None = None
    mtp_detach_heads: bool = False
    gradient_accumulation_fusion: bool = False
    defer_embedding_wgrad_compute: bool = False


class ColumnParallelLinear(nn.Module):
    """As in megatron.core.tensor_parallel.layers: this rank's rows of [output_size, input_size]."""

    def __init__(
        self, weight: Tensor | None, bias: Tensor | None, config: Config, tp_group: dist.ProcessGroup | None
    ) -> None:
        super().__init__()
        size = 1 if tp_group is None else dist.get_world_size(tp_group)
        self.config, self.tp_group = config, tp_group
        self.input_size, self.output_size, self.output_size_per_partition = FEATURES, PADDED, PADDED // size
        self.gather_output = self.skip_bias_add = self.is_expert = self.explicit_expert_comm = False
        self.disable_grad_reduce = False
        self.weight = None if weight is None else nn.Parameter(weight)  # None: skip_weight_param_allocation
        self.register_parameter("bias", None if bias is None else nn.Parameter(bias))
        self.sequence_parallel = config.sequence_parallel and size > 1
        self.allreduce_dgrad = size > 1 and not self.sequence_parallel

    def forward(self, hidden: Tensor, weight: Tensor | None = None, runtime_gather_output: Any = None) -> Any:
        assert len(hidden) == 0, "the output layer was called: there would be logits"


class GPTModel(nn.Module):
    """The end of megatron.core.models.gpt.GPTModel, on the last pipeline stage."""

    def __init__(self, weight: Tensor, bias: Tensor | None, config: Config, tied: bool, tp_group: Any) -> None:
        super().__init__()
        self.config, self.tied = config, tied
        self.embedding = nn.Parameter(weight.clone())
        self.output_layer = ColumnParallelLinear(None if tied else weight, bias, config, tp_group)

    @property
    def head_weight(self) -> nn.Parameter:
        return self.embedding if self.tied else self.output_layer.weight

    def forward(
        self,
        hidden_states: Tensor,
        labels: Tensor | None = None,
        loss_mask: Tensor | None = None,
        *,
        inference_context: Any = None,
        output_processor: Callable[..., Any],
        output_processor_context: Any = None,
    ) -> Any:
        """`_postprocess`, given the decoder's hidden states [s, b, h] or [s / tp, b, h]."""
        return output_processor(
            hidden_states=hidden_states,
            output_layer=self.output_layer,
            output_weight=self.embedding if self.tied else None,
            labels=labels,
            loss_mask=loss_mask,
            input_ids=None,
            position_ids=None,
            attention_mask=None,
            decoder_input=None,
            inference_context=inference_context,
            packed_seq_params=None,
            runtime_gather_output=None,
            context=output_processor_context,
            compute_language_model_loss=self.compute_language_model_loss,
            scale_logits=self._scale_logits,
            config=self.config,
        )

    def compute_language_model_loss(self, labels: Tensor, logits: Tensor) -> Tensor:
        raise AssertionError("there would be logits")

    def _scale_logits(self, logits: Tensor) -> Tensor:
        if not self.config.use_mup or self.config.mup_output_mult == 1.0:
            return logits
        return logits * self.config.mup_output_mult


@dataclass
class Case:
    """One layout, and whether the head is tied, scaled and biased."""

    sequence_parallel: bool = False
    tied: bool = False
    mup: float = 1.0
    bias: bool = False
    returns: str = "stats"

    def __str__(self) -> str:
        marks = {"sequence": self.sequence_parallel, "tied": self.tied, "mup": self.mup != 1.0, "bias": self.bias}
        return "-".join([*(name for name, is_set in marks.items() if is_set), self.returns])

    @property
    def config(self) -> Config:
        return Config(self.sequence_parallel, use_mup=self.mup != 1.0, mup_output_mult=self.mup)


class FullTensors:
    """All tensors unsharded, the same on every rank."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(2)
        self.hidden = torch.randn(LENGTH, BATCH, FEATURES, generator=generator)
        self.weight = torch.randn(PADDED, FEATURES, generator=generator)
        self.bias = torch.randn(PADDED, generator=generator)
        self.labels = torch.randint(REAL, (BATCH, LENGTH), generator=generator)
        self.labels[1, 3] = -100
        self.loss_mask = (torch.rand(BATCH, LENGTH, generator=generator) > 0.3).float()
        self.temperature = torch.rand(BATCH, LENGTH, generator=generator) + 0.5
        self.upstream = torch.randn(3, BATCH, LENGTH, generator=generator)  # of logprob, entropy, lse
        self.targets = self.labels.masked_fill(self.loss_mask == 0, -100)

    def exact(self, case: Case) -> tuple[list[Tensor], tuple[Tensor, ...]]:
        """Returns logprob, entropy, lse [b, s], and the gradients of hidden, weight and bias, in float64."""
        leaves = [tensor.double().requires_grad_() for tensor in (self.hidden, self.weight, self.bias)]
        options = {"temperature": self.temperature, "logit_scale": case.mup, "vocab_size": REAL}
        bias = leaves[2] if case.bias else None
        rows = dense(leaves[0].transpose(0, 1), leaves[1], self.targets, bias=bias, **options)
        total = sum((row * up).sum() for row, up in zip(rows, self.upstream, strict=True))
        return [row.detach() for row in rows], torch.autograd.grad(total, leaves, materialize_grads=True)


def run(group: dist.ProcessGroup, case: Case) -> tuple[list[Tensor], list[Tensor]]:
    """Returns one rank's results and its gradients of its hidden states and of its shard of the head."""
    full, size, rank = FullTensors(), dist.get_world_size(group), dist.get_rank(group)
    bias = full.bias.chunk(size)[rank].clone() if case.bias else None
    model = GPTModel(full.weight.chunk(size)[rank].clone(), bias, case.config, case.tied, group)
    hidden = full.hidden.chunk(size)[rank] if case.sequence_parallel else full.hidden
    hidden = hidden.clone().requires_grad_()
    processor = LogprobsProcessor(vocab_size=REAL, entropy=True, lse=True, temperature=9.0, returns=case.returns)
    context = MegatronContext(temperature=full.temperature)
    output = model(hidden, full.labels, full.loss_mask, output_processor=processor, output_processor_context=context)
    rows = output.unbind() if case.returns == "tensor" else (output.logprob, output.entropy, output.lse)
    sum((row * up).sum() for row, up in zip(rows, full.upstream, strict=True)).backward()
    leaves = [hidden, model.head_weight, *([model.output_layer.bias] if case.bias else [])]
    return [row.detach() for row in rows], [leaf.grad for leaf in leaves]


CASES = [
    Case(sequence_parallel, tied, mup)
    for sequence_parallel in (True, False)
    for tied in (True, False)
    for mup in (1.0, 0.3)
]
CASES += [Case(bias=True), Case(sequence_parallel=True, bias=True, mup=0.3), Case(returns="tensor", tied=True)]


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("size", [1, 2, pytest.param(4, marks=pytest.mark.thorough)])
def test_equals_the_full_head_on_one_rank(ranks: Ranks, size: int, case: Case) -> None:
    rows, (hidden, weight, bias) = FullTensors().exact(case)
    results = ranks(size, run, case)
    for rank_result, _ in results:
        for name, actual, expected in zip(("logprob", "entropy", "lse"), rank_result, rows, strict=True):
            assert_equal(actual, expected, name)
            assert actual.is_contiguous()
    hiddens = [gradients[0] for _, gradients in results]
    for gradient in [torch.cat(hiddens)] if case.sequence_parallel else hiddens:
        assert_equal(gradient, hidden, "gradient of hidden")
    assert_equal(torch.cat([gradients[1] for _, gradients in results]), weight, "gradient of the weight's shards")
    if case.bias:
        assert_equal(torch.cat([gradients[2] for _, gradients in results]), bias, "gradient of the bias's shards")


def one_rank(**config: Any) -> tuple[FullTensors, GPTModel]:
    full = FullTensors()
    return full, GPTModel(full.weight, None, Config(**config), False, None)


def test_default_scores_labels_over_the_padded_vocabulary() -> None:
    full, model = one_rank()
    stats = model(full.hidden, full.labels, output_processor=LogprobsProcessor())
    assert isinstance(stats, TokenStats)
    assert stats.entropy is None
    assert_equal(stats.logprob, dense(full.hidden.transpose(0, 1), full.weight, full.labels)[0])


def test_top_k_and_hit_are_batch_first() -> None:
    full, model = one_rank()
    stats = model(full.hidden, full.labels, output_processor=LogprobsProcessor(topk=2, top1=True))
    logits = full.hidden.transpose(0, 1) @ full.weight.t()
    has_label = full.labels != -100
    assert torch.equal(stats.topk_ids[has_label], logits.topk(2).indices[has_label])
    assert torch.equal(stats.top1, (logits.argmax(-1) == full.labels) & has_label)


def test_targets_from_the_context_replace_labels() -> None:
    full, model = one_rank()
    context = MegatronContext(targets=full.labels)
    stats = model(full.hidden, output_processor=LogprobsProcessor(), output_processor_context=context)
    assert_equal(stats.logprob, model(full.hidden, full.labels, output_processor=LogprobsProcessor()).logprob)


def test_loss_mask_can_be_left_to_the_caller() -> None:
    full, model = one_rank()
    masked = model(full.hidden, full.labels, full.loss_mask, output_processor=LogprobsProcessor()).logprob
    processor = LogprobsProcessor(use_loss_mask=False)
    everything = model(full.hidden, full.labels, full.loss_mask, output_processor=processor).logprob
    assert (everything != 0).equal(full.labels != -100)
    assert_equal(masked, everything * full.loss_mask)


def test_signature_equals_the_hook() -> None:
    parameters = inspect.signature(LogprobsProcessor.__call__).parameters.values()
    assert [parameter.name for parameter in parameters if parameter.kind is parameter.KEYWORD_ONLY] == HOOK
    assert all(parameter.default is parameter.empty for parameter in parameters)
    full, model = one_rank()
    sent: dict[str, Any] = {}
    model(full.hidden, full.labels, output_processor=lambda **hook: sent.update(hook))
    assert list(sent) == HOOK
    assert_equal(
        LogprobsProcessor()(**sent, padding_mask=None).logprob,
        model(full.hidden, full.labels, output_processor=LogprobsProcessor()).logprob,
    )
    with pytest.raises(TypeError, match=r"passed padding_mask, which this version of postlude does not know"):
        LogprobsProcessor()(**sent, padding_mask=full.loss_mask)


def test_unsupported_models_and_arguments_are_refused() -> None:
    full, model = one_rank()
    arguments: dict[str, Any] = {"output_processor": LogprobsProcessor()}
    with pytest.raises(ValueError, match=r"without inference_context"):
        model(full.hidden, full.labels, inference_context=SimpleNamespace(), **arguments)
    with pytest.raises(ValueError, match=r"give the model labels, or the context targets"):
        model(full.hidden, **arguments)
    with pytest.raises(TypeError, match=r"must be a MegatronContext, but is a dict"):
        model(full.hidden, full.labels, output_processor_context={}, **arguments)
    with pytest.raises(ValueError, match=r"vocab_size is 41, but the output layer has 40 rows x 1 ranks"):
        model(full.hidden, full.labels, output_processor=LogprobsProcessor(vocab_size=41))
    with pytest.raises(ValueError, match=r"Drop topk and top1"):
        LogprobsProcessor(returns="tensor", topk=1)
    with pytest.raises(ValueError, match=r'must be "stats" or "tensor", but is .tuple.'):
        LogprobsProcessor(returns="tuple")
    model._scale_logits = lambda logits: 30 * torch.tanh(logits / 30)
    with pytest.raises(ValueError, match=r"honour a factor on the logits alone"):
        model(full.hidden, full.labels, **arguments)


class SoftcappedLinear(ColumnParallelLinear):
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return torch.tanh(super().forward(*args, **kwargs))


def test_output_layer_that_is_more_than_a_product_is_refused() -> None:
    full, model = one_rank()
    arguments: dict[str, Any] = {"labels": full.labels, "output_processor": LogprobsProcessor()}
    model.output_layer.disable_grad_reduce = True
    with pytest.raises(ValueError, match=r"without disable_grad_reduce"):
        model(full.hidden, **arguments)
    model.output_layer = ColumnParallelLinear(full.weight[:20], None, model.config, None)
    with pytest.raises(ValueError, match=r"needs the 40 rows .* weight is a Parameter \[20, 6\]"):
        model(full.hidden, **arguments)
    model.output_layer = SoftcappedLinear(full.weight, None, model.config, None)
    with pytest.raises(TypeError, match=r"output layer is a SoftcappedLinear"):
        model(full.hidden, **arguments)
    model.output_layer = nn.Linear(FEATURES, PADDED)
    with pytest.raises(TypeError, match=r"output layer is a Linear"):
        model(full.hidden, **arguments)


def test_settings_that_make_megatron_drop_the_head_gradient_are_refused() -> None:
    full, model = one_rank(defer_embedding_wgrad_compute=True)
    arguments: dict[str, Any] = {"labels": full.labels, "output_processor": LogprobsProcessor()}
    with pytest.raises(ValueError, match=r"set defer_embedding_wgrad_compute=False"):
        model(full.hidden, **arguments)
    full, model = one_rank(gradient_accumulation_fusion=True, mtp_num_layers=1)
    with pytest.raises(ValueError, match=r"Set zero_out_wgrad = True"):
        model(full.hidden, **arguments)
    with torch.no_grad():
        scored = model(full.hidden, **arguments).logprob
    model.output_layer.weight.zero_out_wgrad = True
    assert_equal(model(full.hidden, **arguments).logprob, scored)


class HybridModel(nn.Module):
    """The end of megatron.core.models.hybrid.HybridModel, given hidden states of trunk and depths [(1 + D) s, b, h]."""

    def __init__(self, config: Config, *, tied: bool = False, post_process: bool = True) -> None:
        super().__init__()
        self.config, self.post_process, self.share_embeddings_and_output_weights = config, post_process, tied
        weight = FullTensors().weight
        self.embedding = nn.Parameter(weight.clone())
        self.output_layer = ColumnParallelLinear(None if tied else weight, None, config, None)
        self.pg_collection = SimpleNamespace(cp="cp group", tp="tp group")

    def shared_embedding_or_output_weight(self) -> Tensor:
        return self.embedding

    def compute_language_model_loss(self, labels: Tensor, logits: Tensor) -> Tensor:
        raise AssertionError("there would be logits")

    def forward(
        self,
        hidden: Tensor,
        input_ids: Tensor | None = None,
        labels: Tensor | None = None,
        inference_context: Any = None,
        *,
        loss_mask: Tensor | None = None,
        packed_seq_params: Any = None,
    ) -> Tensor:
        if hidden.shape[-1] != FEATURES:
            raise ValueError("hidden has other features")
        return hidden if not self.post_process else hidden.sum()


def hooked(config: Config | None = None, **options: Any) -> HybridModel:
    model = HybridModel(config or Config(), **options)
    OutputHook(model)
    return model


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_output_hook_passes_what_gpt_model_does(tied: bool) -> None:
    full, model, sent = FullTensors(), hooked(tied=tied), {}
    model(full.hidden, None, full.labels, output_processor=lambda **hook: sent.update(hook) or 0)
    assert sorted(sent) == sorted(HOOK)
    processor = LogprobsProcessor(vocab_size=REAL, entropy=True, lse=True)
    context = MegatronContext(temperature=full.temperature)
    stats = model(
        full.hidden,
        labels=full.labels,
        loss_mask=full.loss_mask,
        output_processor=processor,
        output_processor_context=context,
    )
    expected, (_, weight, _) = full.exact(Case())
    rows = (stats.logprob, stats.entropy, stats.lse)
    sum((row * up).sum() for row, up in zip(rows, full.upstream, strict=True)).backward()
    for name, actual, exact in zip(("logprob", "entropy", "lse"), rows, expected, strict=True):
        assert_equal(actual, exact, name)
    assert_equal((model.embedding if tied else model.output_layer.weight).grad, weight, "gradient of the weight")


def test_output_hook_honours_mup() -> None:
    full, model = FullTensors(), hooked(Config(use_mup=True, mup_output_mult=0.3))
    stats = model(full.hidden, labels=full.labels, output_processor=LogprobsProcessor())
    exact = dense(full.hidden.transpose(0, 1), full.weight, full.labels, logit_scale=0.3)[0]
    assert_equal(stats.logprob, exact)


def test_output_hook_leaves_other_calls_as_they_are() -> None:
    full, model = FullTensors(), HybridModel(Config())
    hook, arguments = OutputHook(model), {"labels": full.labels, "output_processor": LogprobsProcessor()}
    assert torch.equal(model(full.hidden), full.hidden.sum())
    with pytest.raises(ValueError, match=r"other features"):
        model(full.hidden[..., 1:], **arguments)
    with pytest.raises(ValueError, match=r"without inference_context"):
        model(full.hidden, None, full.labels, SimpleNamespace(), output_processor=LogprobsProcessor())
    with pytest.raises(ValueError, match=r"give the model labels"):
        model(full.hidden, output_processor=LogprobsProcessor())
    assert torch.equal(model(full.hidden), full.hidden.sum())
    model.post_process = False  # another pipeline stage
    assert torch.equal(model(full.hidden, **arguments), full.hidden)
    hook.remove()
    with pytest.raises(TypeError, match=r"unexpected keyword argument 'output_processor'"):
        model(full.hidden, **arguments)


@pytest.fixture
def megatron_mtp(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Megatron's module for MTP. Returns what its `process_mtp_loss` receives; that adds 1 to the hidden states."""
    received: dict[str, Any] = {}

    def roll_tensor(tensor: Tensor, cp_group: Any, packed_seq_params: Any) -> tuple[Tensor, Tensor]:
        assert cp_group == "cp group"
        rolled = tensor.roll(-1, dims=-1)
        rolled[:, -1] = 0
        return rolled, rolled.sum()

    def process_mtp_loss(
        hidden_states: Tensor, labels: Tensor, output_layer: Any, cp_group: Any, tp_group: Any, scale_logits_fn: Any
    ) -> Tensor:
        received.update(locals())
        return hidden_states.chunk(3)[0] + 1

    module = SimpleNamespace(roll_tensor=roll_tensor, process_mtp_loss=process_mtp_loss)
    for parent in ("megatron", "megatron.core", "megatron.core.transformer"):
        monkeypatch.setitem(sys.modules, parent, SimpleNamespace())
    monkeypatch.setitem(sys.modules, "megatron.core.transformer.multi_token_prediction", module)
    return received


def test_megatrons_mtp_loss_runs_before_a_processor_without_mtp(megatron_mtp: dict[str, Any]) -> None:
    full, model = FullTensors(), hooked(Config(mtp_num_layers=2))
    states = torch.cat([full.hidden, 2 * full.hidden, 3 * full.hidden])
    stats = model(states, labels=full.labels, output_processor=LogprobsProcessor())
    assert_equal(stats.logprob, dense(full.hidden.transpose(0, 1) + 1, full.weight, full.labels)[0])
    assert megatron_mtp["hidden_states"] is states
    assert megatron_mtp["output_layer"] is model.output_layer
    assert megatron_mtp["tp_group"] == "tp group"


@pytest.mark.usefixtures("megatron_mtp")
@pytest.mark.parametrize("given", ["labels", "input_ids"])
def test_a_processor_scores_the_depths(given: str) -> None:
    """A depth's labels are `depth` further ahead; without labels they come from the tokens, one further still."""
    full, model = FullTensors(), hooked(Config(mtp_num_layers=2))
    ahead = 0 if given == "labels" else 1
    labels = torch.nn.functional.pad(full.labels, (0, 2 + ahead), value=-100)
    mask = torch.nn.functional.pad(full.loss_mask, (0, 2 + ahead))
    states = torch.cat([full.hidden, 2 * full.hidden, 3 * full.hidden])

    def processor(*, mtp: tuple[MegatronDepth, ...], **hook: Any) -> list[TokenStats]:
        return [depth(LogprobsProcessor()) for depth in mtp]

    arguments = {given: full.labels.clamp(min=0)}
    for depth, stats in enumerate(
        model(states, loss_mask=full.loss_mask, output_processor=processor, **arguments), start=1
    ):
        window = slice(depth + ahead, depth + ahead + LENGTH)
        targets = labels.clamp(min=0)[:, window].masked_fill(mask[:, window] == 0, -100)
        exact = dense((1 + depth) * full.hidden.transpose(0, 1), full.weight, targets)[0]
        assert_equal(stats.logprob, exact, f"depth {depth}")


@pytest.mark.usefixtures("megatron_mtp")
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize(("detach_heads", "stop_head"), [(False, None), (True, None), (True, False), (False, True)])
def test_head_learns_from_depths_unless_stopped(tied: bool, detach_heads: bool, stop_head: bool | None) -> None:
    full, model = FullTensors(), hooked(Config(mtp_num_layers=1, mtp_detach_heads=detach_heads), tied=tied)

    def processor(*, mtp: tuple[MegatronDepth, ...], **hook: Any) -> Tensor:
        return mtp[0](LogprobsProcessor(), stop_head=stop_head).logprob.sum()

    states = torch.cat([full.hidden, full.hidden]).requires_grad_()
    model(states, labels=full.labels, loss_mask=full.loss_mask, output_processor=processor).backward()
    weight = model.embedding if tied else model.output_layer.weight
    stopped = detach_heads if stop_head is None else stop_head
    assert (weight.grad is None) == stopped
    assert states.grad is not None
    assert (states.grad != 0).any(-1).any(-1).tolist() == [False] * LENGTH + [True] * (LENGTH - 1) + [False]


def test_a_processor_with_mtp_gets_no_depths_from_a_model_without() -> None:
    full, model = FullTensors(), hooked()

    def processor(*, mtp: tuple[MegatronDepth, ...], **hook: Any) -> Any:
        return mtp, LogprobsProcessor()(**hook)

    mtp, stats = model(full.hidden, labels=full.labels, output_processor=processor)
    assert mtp == ()
    assert_equal(stats.logprob, dense(full.hidden.transpose(0, 1), full.weight, full.labels)[0])
