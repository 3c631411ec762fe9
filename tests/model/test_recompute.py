"""Activation recompute uses less memory and gives the same results."""

from typing import Any

import pytest
import torch
from torch import Tensor

from postlude import LanguageModel
from tests.equality import assert_equal
from tests.model.small import small_config, small_microbatch


def saved_bytes_and_gradients(recompute: Any) -> tuple[int, dict[str, Tensor]]:
    """Returns the bytes that the graph keeps besides parameters, and the gradients."""
    model = LanguageModel(small_config("[*-][S-][*E]*[M-]G"), recompute=recompute)
    parameter_pointers = {parameter.data_ptr() for parameter in model.parameters()}
    kept_bytes: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        if tensor.data_ptr() not in parameter_pointers:
            kept_bytes[tensor.data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        loss = model(small_microbatch(30, 20, 10), targets=True).sum()
    total_bytes = sum(kept_bytes.values())
    loss.backward()
    return total_bytes, {
        name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None
    }


def test_recompute_saves_fewer_activations_with_equal_gradients() -> None:
    everything, expected = saved_bytes_and_gradients("none")
    for recompute in ("selective", "full"):
        _, gradients = saved_bytes_and_gradients(recompute)
        assert gradients.keys() == expected.keys()
        for name, gradient in gradients.items():
            assert_equal(gradient, expected[name], name)
    assert saved_bytes_and_gradients("full")[0] < 0.5 * everything


def calls_of_norms(recompute: Any) -> dict[str, int]:
    """Returns how often each block's norm runs in a forward and its backward."""
    model = LanguageModel(small_config("[*-][S-][*E]*[M-]G"), recompute=recompute)
    calls: dict[str, int] = {}
    for block in model.blocks:
        block.norm.register_forward_hook(lambda *_, name=block.name: calls.update({name: calls.get(name, 0) + 1}))
    model(small_microbatch(30, 20, 10), targets=True).sum().backward()
    return calls


def test_activations_that_are_not_saved_are_recomputed() -> None:
    once = calls_of_norms("none")
    assert set(once.values()) == {1}
    for recompute in ("selective", "full"):
        assert calls_of_norms(recompute) == dict.fromkeys(once, 2)
    assert saved_bytes_and_gradients("selective")[0] < saved_bytes_and_gradients("none")[0]


def test_unknown_recompute_mode_is_refused() -> None:
    with pytest.raises(ValueError, match="recompute is 'some', but the choices are 'none', 'selective', 'full'"):
        LanguageModel(small_config(), recompute="some")  # type: ignore[arg-type]
