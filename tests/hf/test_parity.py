"""Every family equals transformers: logits, loss and all gradients, on packed sequences of unequal length."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from postlude import load_model, pack, unpack
from postlude.hf.families import FAMILIES
from postlude.hf.family import map_to_hf
from postlude.hf.tensor_sources import as_stored
from tests.equality import TOLERANCE, assert_equal
from tests.hf.families import CONFIGS, FORWARD_ALONE, saved_model

LENGTHS = (7, 1, 13, 2, 19, 10)
# What decays and time steps are made of has one number a head, whose gradient is a sum over all tokens and all states
# after each. Its terms are much larger than what is left of them, so that rounding shows: up to 2e-5 of it is seen.
CANCELLING = {"A_log": 1e-4, "dt_bias": 1e-4}


def sequences(vocabulary: int, seed: int = 1) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(vocabulary, (length,), generator=generator) for length in LENGTHS]


@pytest.mark.parametrize("name", [*CONFIGS, *FORWARD_ALONE])
def test_packed_model_equals_transformers_on_each_sequence(name: str, tmp_path) -> None:
    hf_model = saved_model({**CONFIGS, **FORWARD_ALONE}[name](), tmp_path)
    model = load_model(tmp_path)
    batch = sequences(hf_model.config.vocab_size)
    microbatches = pack(batch, budget=32)
    assert len(microbatches) > 1
    assert max(len(microbatch.packing.lengths) for microbatch in microbatches) > 1

    expected_logits = [hf_model(sequence[None]).logits[0] for sequence in batch]
    count = sum(len(sequence) - 1 for sequence in batch)
    expected_losses = [
        F.cross_entropy(logits[:-1], sequence[1:], reduction="none")
        for logits, sequence in zip(expected_logits, batch, strict=True)
    ]
    expected_loss = torch.cat(expected_losses).sum() / count
    expected_loss.backward()

    logits = unpack(microbatches, [model(microbatch) for microbatch in microbatches], shifted=False)
    for actual, expected in zip(logits, expected_logits, strict=True):
        assert_equal(actual, expected, "logits")

    losses = [model(microbatch, targets=True) for microbatch in microbatches]
    for actual, expected in zip(unpack(microbatches, losses), expected_losses, strict=True):
        assert_equal(actual[1:], expected, "token losses")
    loss = torch.stack([part.sum() for part in losses]).sum() / count
    loss.backward()
    assert_equal(loss, expected_loss, "loss")

    parameters = dict(model.named_parameters())
    family = FAMILIES[hf_model.config.model_type]
    expected_tensors = map_to_hf(
        family, model.config, ((name, parameter.shape) for name, parameter in parameters.items())
    )
    learned = {name: parameter.grad for name, parameter in hf_model.named_parameters()}
    expected_gradients = as_stored(learned, family, expected_tensors)
    for tensor in expected_tensors.values():
        gradient = torch.full(tensor.shape, torch.nan)
        for parameter_name, mapping in tensor.parts:
            mapping.write(gradient, parameters[parameter_name].grad[mapping.region])
        tolerance = CANCELLING.get(tensor.name.rpartition(".")[2], TOLERANCE)
        assert_equal(gradient, expected_gradients[tensor.name], f"gradient of {tensor.name}", tolerance)
    assert set(expected_tensors) == set(expected_gradients)
