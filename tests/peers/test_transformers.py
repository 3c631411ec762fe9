"""`integrations.hf.logprobs` equals the model's own numbers under torch.compile and accelerate's FSDP."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from postlude.integrations.hf import logprobs
from postlude.ops.linear_logprobs import TokenStats
from tests.conftest import Ranks
from tests.equality import TOLERANCE
from tests.integrations.test_hf import all_but_first, logprobs_from_logits, model_of, tokens
from tests.peers.frameworks import errors_of, report

pytestmark = pytest.mark.peers
FAMILIES = ["llama", "gemma2", "qwen3_moe"]


class ScoringModule(nn.Module):
    """Wrapped by FSDP or DDP, so that `logprobs` runs inside its forward, where the head's weight is unsharded."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: Tensor, **options: Any) -> TokenStats:
        return logprobs(self.model, ids, **options)


def with_gradients(model: nn.Module, logprob: Tensor, entropy: Tensor) -> dict[str, Tensor]:
    """Returns the results, and each parameter's full gradient of the mean of their squares."""
    model.zero_grad()
    (logprob.square().mean() + entropy.square().mean()).backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}
    full_gradients = {
        name: tensor.full_tensor() if isinstance(tensor, DTensor) else tensor.clone()
        for name, tensor in gradients.items()
    }
    return {"logprob": logprob.detach(), "entropy": entropy.detach()} | {
        f"gradient of {n}": g for n, g in full_gradients.items()
    }


def logprobs_from_model(model: Any, ids: Tensor) -> dict[str, Tensor]:
    return with_gradients(model, *logprobs_from_logits(model(ids).logits, ids, all_but_first()))


@pytest.mark.parametrize("family", FAMILIES)
def test_compiled_model(family: str) -> None:
    model, ids = model_of(family, torch.float32), tokens()
    expected = logprobs_from_model(model, ids)
    model.base_model.compile()  # in place: the module that `logprobs` calls
    stats = logprobs(model, ids, entropy=True)
    errors = errors_of(with_gradients(model, stats.logprob, stats.entropy), expected)
    report("transformers", f"{family}, torch.compile", errors)
    assert max(errors.values()) <= TOLERANCE


def compare_sharded(_: Any, family: str) -> dict[str, float]:
    """Every rank has the same tokens, so FSDP's mean of gradients over ranks equals each rank's own.

    An Accelerator refuses FSDP on CPUs, so accelerate's own function that shards a model is called, with the fields of
    an Accelerator that it reads.
    """
    from accelerate.utils import FullyShardedDataParallelPlugin
    from accelerate.utils.fsdp_utils import fsdp2_prepare_model

    ids, model = tokens(), model_of(family, torch.float32)
    expected = logprobs_from_model(model, ids)
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=[type(model.base_model.layers[0]).__name__],
        cpu_ram_efficient_loading=False,
    )
    scored = fsdp2_prepare_model(
        SimpleNamespace(state=SimpleNamespace(fsdp_plugin=plugin), mixed_precision="no"), ScoringModule(model)
    )
    weight = model.get_output_embeddings().weight
    assert isinstance(weight, DTensor)
    assert weight.to_local().shape[0] < weight.shape[0]
    stats = scored(ids, entropy=True)
    actual = with_gradients(scored, stats.logprob, stats.entropy)
    return errors_of(
        {name.replace("gradient of model.", "gradient of ", 1): tensor for name, tensor in actual.items()}, expected
    )


@pytest.mark.parametrize("family", FAMILIES)
def test_sharded_by_accelerate(ranks: Ranks, family: str) -> None:
    for errors in ranks(2, compare_sharded, family):
        report("accelerate", f"{family}, FSDP2, 2 ranks", errors)
        assert max(errors.values()) <= TOLERANCE
