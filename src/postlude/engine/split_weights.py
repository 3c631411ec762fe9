"""Split weights: loads fp32 weights into parameters of bf16, and keeps the lower bits."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from postlude.model import LanguageModel
from postlude.model.parallel import local_shard
from postlude.ops.adamw_storage import split_halves


@contextmanager
def loading_in_fp32(stage: LanguageModel, low_bits: dict[str, Tensor]) -> Iterator[None]:
    """Makes the trained bf16 parameters of a stage fp32 in the block, and splits their values after it.

    The nearest bf16 numbers become the parameters again. The lower bits go to `low_bits` by name.
    """
    names = [name for name, parameter in stage.named_parameters() if _is_narrow(parameter)]
    for name in names:
        _replace(stage, name, stage.get_parameter(name).detach().float())
    yield
    for name in names:
        wide = stage.get_parameter(name).detach()
        high, low_bits[name] = split_halves(local_shard(wide))
        narrow = wide.to(torch.bfloat16)
        local_shard(narrow).copy_(high)  # ties are rounded as the optimizer does
        _replace(stage, name, narrow)


def _is_narrow(parameter: nn.Parameter) -> bool:
    return parameter.dtype == torch.bfloat16 and parameter.requires_grad


def _replace(stage: LanguageModel, name: str, values: Tensor) -> None:
    module, _, leaf = name.rpartition(".")
    setattr(stage.get_submodule(module), leaf, nn.Parameter(values))
