"""Runs other frameworks' own code, on a GPU as it is. On the CPU it gets CPU tensors where it allocates on CUDA, and
streams that do nothing; the rest is unchanged."""

import contextlib
import importlib
import os
import sys
import types
import warnings
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from tests.equality import TOLERANCE, difference

VOCABULARY, HIDDEN, LENGTH, BATCH = 128, 128, 8, 3  # verl's kernel takes multiples of 128
NO_FUSION = dict.fromkeys(
    ("bias_activation_fusion", "masked_softmax_fusion", "bias_dropout_fusion", "gradient_accumulation_fusion"), False
)
# bfloat16 has 8 bits: Megatron rounds its logits to them (ours are not rounded), and every layer rounds its gradients.
# Two right gradients differ by some units of the last bit.
TOLERANCES = {torch.float32: TOLERANCE, torch.bfloat16: 8 * 2**-8}


def report(framework: str, subject: str, errors: dict[str, float]) -> None:
    """Prints a framework's version and the error of each compared number."""
    numbers = ", ".join(f"{name} {error:.1e}" for name, error in errors.items())
    print(f"\n{framework} {release_of(framework)}: {subject}: {numbers}", flush=True)


def release_of(framework: str) -> str:
    try:
        return version(framework)
    except PackageNotFoundError:  # sources without a wheel say it themselves
        release: str = import_alone("nemo_rl.package_info").__shortversion__
        return release


def errors_of(actual: dict[str, Tensor], reference_values: dict[str, Tensor]) -> dict[str, float]:
    """Returns the relative difference by name; for gradients, that of the parameter with the largest."""
    assert actual.keys() == reference_values.keys()
    errors: dict[str, float] = {}
    for name, expected in reference_values.items():
        key = "gradients" if name.startswith("gradient of") else name
        errors[key] = max(errors.get(key, 0.0), difference(actual[name], expected))
    return errors


class _CpuTensors(TorchFunctionMode):
    def __torch_function__(self, function: Any, _: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if str(kwargs.get("device", "")).startswith("cuda"):
            kwargs["device"] = "cpu"
        return args[0] if function is torch.Tensor.cuda else function(*args, **kwargs)


@contextlib.contextmanager
def _cpu_in_place_of_cuda() -> Iterator[None]:
    """Replaces CUDA streams by no-ops, which is correct on a CPU, where operations are synchronous."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(_CpuTensors())
        stack.enter_context(mock.patch("torch.cuda.current_device", return_value="cpu"))
        stack.enter_context(mock.patch("torch.Tensor.record_stream", _record_stream))
        properties = types.SimpleNamespace(multi_processor_count=1)
        stack.enter_context(mock.patch("torch.cuda.get_device_properties", return_value=properties))
        for name in ("synchronize", "device", "Event", "Stream", "stream", "current_stream", "nvtx"):
            stack.enter_context(mock.patch(f"torch.cuda.{name}", mock.MagicMock()))
        from megatron.core.transformer.moe import token_dispatcher

        stack.enter_context(mock.patch.object(token_dispatcher, "maybe_move_tensor_to_cpu", _as_host_value))
        yield


def _record_stream(_: Tensor, stream: Any) -> None:
    """Does nothing: a CPU tensor's memory is not freed while it is used."""


def _as_host_value(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
    """Returns what the replaced function returns for a tensor on CUDA."""
    return tensor.numpy() if as_numpy and isinstance(tensor, Tensor) else tensor


def _layer_norm(_: type, config: Any, hidden_size: int, eps: float = 1e-5, **__: Any) -> nn.LayerNorm:
    """Megatron's norm without Apex, which refuses sequence parallelism because it would not add up its gradients."""
    return nn.LayerNorm(hidden_size, eps)


@contextlib.contextmanager
def megatron(device: str, *, tp: int = 1, pp: int = 1, ep: int = 1) -> Iterator[None]:
    """Sets up Megatron's process groups on the running ranks. Its models have no dropout, so no random state.

    Mamba's kernels leave the precision of fp32 products to Triton, whose default is TF32. There the last bit of one
    gradient can change another by 1e-5, so Triton takes fp32 here.
    """
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.dict(os.environ, TRITON_F32_DEFAULT="ieee"))
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")
        if device == "cpu":
            stack.enter_context(_cpu_in_place_of_cuda())
        from megatron.core import parallel_state
        from megatron.core.tensor_parallel.random import initialize_rng_tracker
        from megatron.core.transformer.multi_token_prediction import MTPLossAutoScaler, MTPLossLoggingHelper
        from megatron.core.transformer.torch_norm import WrappedTorchNorm

        stack.enter_context(mock.patch.object(WrappedTorchNorm, "__new__", _layer_norm))

        parallel_state.initialize_model_parallel(tp, pp, expert_model_parallel_size=ep)
        stack.callback(parallel_state.destroy_model_parallel)
        stack.callback(MTPLossLoggingHelper.tracker.clear)  # its tensors have the size of the first model's depths
        MTPLossAutoScaler.set_loss_scale(torch.tensor(1.0))  # a schedule leaves one for its microbatches
        initialize_rng_tracker(inference_rng_tracker=True, force_reset=True)
        yield


def gpt_model(device: str, *, tied: bool = False, dtype: torch.dtype = torch.float32, **config: Any) -> Any:
    """Returns this rank's part of a small GPTModel whose weights depend only on the sizes."""
    return seeded(unseeded_gpt_model(VOCABULARY, LENGTH, tied=tied, dtype=dtype, **config), device, dtype)


def unseeded_gpt_model(vocabulary: int, length: int, *, tied: bool, dtype: torch.dtype, **config: Any) -> Any:
    """Returns this rank's part of a GPTModel made of Megatron's modules, without Transformer Engine."""
    from megatron.core import parallel_state
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec, get_gpt_mtp_block_spec
    from megatron.core.models.gpt.gpt_model import GPTModel

    layer = get_gpt_layer_local_spec(num_experts=config.get("num_moe_experts"))
    transformer = transformer_config(dtype, **{"num_layers": 2, **config})
    has_mtp = config.get("mtp_num_layers")
    return GPTModel(
        transformer,
        layer,
        mtp_block_spec=get_gpt_mtp_block_spec(transformer, layer, use_transformer_engine=False) if has_mtp else None,
        vocab_size=vocabulary,
        max_sequence_length=length,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        position_embedding_type="rope",
        share_embeddings_and_output_weights=tied,
    )


def transformer_config(dtype: torch.dtype, **config: Any) -> Any:
    from megatron.core.transformer import TransformerConfig

    sizes = {"hidden_size": HIDDEN, "num_attention_heads": 4, "ffn_hidden_size": 64}
    usual = {"hidden_dropout": 0.0, "attention_dropout": 0.0, "use_cpu_initialization": True, **NO_FUSION}
    dtypes = {"params_dtype": dtype, "pipeline_dtype": dtype, "bf16": dtype == torch.bfloat16}
    return TransformerConfig(**{**sizes, **usual, **dtypes, **config})


def seeded(model: Any, device: str, dtype: torch.dtype) -> Any:
    """Sets large weights, so that distributions are far from uniform; equal on every rank that has the full tensor."""
    for name, parameter in model.named_parameters():
        split = getattr(parameter, "tensor_model_parallel", False) or not getattr(parameter, "allreduce", True)
        seed = sum(map(ord, name)) + dist.get_rank() * split
        values = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(seed))
        with torch.no_grad():
            parameter.copy_(1 + 0.1 * values if "norm" in name and "weight" in name else values / HIDDEN**0.5)
    return model.to(device, dtype)


def import_alone(name: str) -> Any:
    """Imports a module without running its packages' __init__, which import servers that this test does not need."""
    parts = name.split(".")
    for depth in range(1, len(parts)):
        package = ".".join(parts[:depth])
        if package not in sys.modules:
            parents = sys.path if depth == 1 else sys.modules[".".join(parts[: depth - 1])].__path__
            module = types.ModuleType(package)
            module.__path__ = [str(place) for parent in parents if (place := Path(parent, parts[depth - 1])).is_dir()]
            sys.modules[package] = module
    return importlib.import_module(name)


class Inputs:
    """The same tokens on every rank: input_ids, position_ids, attention_mask (Megatron's: True is masked), labels."""

    def __init__(
        self, device: str, seed: int = 0, *, batch: int = BATCH, length: int = LENGTH, vocabulary: int = VOCABULARY
    ) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.tokens = torch.randint(vocabulary, (batch, length), generator=generator).to(device)
        self.positions = torch.arange(length, device=device).expand(batch, length)
        self.mask = torch.ones(1, 1, length, length, dtype=torch.bool, device=device).triu(1)
        self.labels = self.tokens.roll(-1, 1)
        self.upstream = torch.randn(2, batch, length, generator=generator).to(device)  # of logprob and entropy
        self.loss_mask = (torch.rand(batch, length, generator=generator) > 0.3).float().to(device)

    @property
    def model(self) -> tuple[Tensor, Tensor, Tensor]:
        """Returns a model's positional arguments."""
        return self.tokens, self.positions, self.mask


def gradients_of(model: Any) -> dict[str, Tensor]:
    return {f"gradient of {name}": parameter.grad.clone() for name, parameter in model.named_parameters()}


def backward(inputs: Inputs, results: dict[str, Tensor]) -> None:
    """Returns the gradients of the results' weighted sum."""
    length = results["logprob"].shape[1]
    rows = [row.float() * up[:, :length] for row, up in zip(results.values(), inputs.upstream, strict=False)]
    torch.stack([row for row in rows if row.requires_grad]).sum().backward()


def with_gradients(model: Any, inputs: Inputs, results: dict[str, Tensor]) -> dict[str, Tensor]:
    """Returns the results and every parameter's gradient of their weighted sum."""
    model.zero_grad()
    backward(inputs, results)
    return {name: row.detach() for name, row in results.items()} | gradients_of(model)
