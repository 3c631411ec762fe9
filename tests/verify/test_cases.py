"""The batches of the layout comparison cover what objectives compute."""

from __future__ import annotations

import pytest
import torch

from postlude import load_model, pack
from postlude.hf.builtin import BUILTIN
from postlude.verify.cases import BUDGET, FRESH_RANGE, batches


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_some_ratios_are_clipped_and_some_are_not(seed: int) -> None:
    """For both signs of advantages, and without ratios so large that only their rounding is compared."""
    config = BUILTIN["tiny-dense"]()
    config.initializer_range = FRESH_RANGE
    model = load_model(config, seed=seed)
    batch = batches("grpo", model.config, seed)["many"]
    microbatches = pack(batch.sequences, budget=BUDGET, columns=batch.columns)
    kinds = set()
    for microbatch in microbatches:
        with torch.no_grad():
            losses = model(microbatch, targets=True)
        ratios = (-losses - microbatch.column("old_logprobs")).exp()[microbatch.targets >= 0]
        raised = microbatch.column("advantages")[microbatch.targets >= 0] > 0
        clipped = torch.where(raised, ratios > 1.28, ratios < 0.8)
        kinds |= set(zip(raised.tolist(), clipped.tolist(), strict=True))
        assert ratios.log().abs().max() < 6
    assert len(kinds) == 4
