"""Every field of a family's config is read as transformers reads it, or refused: none is ignored."""

from pathlib import Path
from typing import Any

import pytest
import torch
from packaging.version import Version
from transformers import PretrainedConfig, __version__

from postlude import load_model, pack
from tests.equality import difference
from tests.hf import attention_families, families
from tests.hf.families import saved_model

CONFIGS = {**families.CONFIGS, **attention_families.CONFIGS}
SEQUENCE = torch.randint(61, (17,), generator=torch.Generator().manual_seed(0))
WITHOUT_EFFECT = {*PretrainedConfig().to_dict(), "use_cache", "bos_token_id", "eos_token_id", "pad_token_id"}
OTHERWISE_READ = {
    # transformers clamps time steps to it; it is for initialisation (its pull request 48989).
    ("nemotron_h", "time_step_min")
}
if Version(__version__) < Version("5.20"):  # 5.17 takes the states of other groups on a CPU; 5.23 does not
    OTHERWISE_READ |= {("mamba2", "n_groups"), ("granitemoehybrid", "mamba_n_groups")}
DIFFERENT = 1e-3  # relative: rounding is below 1e-5, and a field that is ignored changes 1e-2 and more


def other_values(value: Any) -> list[Any]:
    """Returns values of which the first that transformers can run is tried."""
    if isinstance(value, bool):
        return [not value]
    if isinstance(value, int):
        return [2 * value, value + 1]
    if isinstance(value, float):
        return [1.5 * value or 0.3]
    return ["gelu"] if isinstance(value, str) else [2, 0.5, True] if value is None else []


def transformers_logits(base: PretrainedConfig, field: str, value: Any, directory: Path) -> torch.Tensor | None:
    """Returns the logits of a model with a field changed, which is written to `directory`; None if it cannot run."""
    try:
        with torch.no_grad():
            logits = saved_model(type(base)(**{**base.to_dict(), field: value}), directory)(SEQUENCE[None]).logits
    except Exception:  # whatever transformers raises
        return None
    return logits[0]


@pytest.mark.slow
@pytest.mark.parametrize("name", {make().model_type: name for name, make in reversed(CONFIGS.items())}.values())
def test_a_field_with_another_value_gives_the_logits_of_transformers_or_is_refused(name: str, tmp_path: Path) -> None:
    base = CONFIGS[name]()
    wrong, compared = {}, 0
    for field, value in base.to_dict().items():
        if field in WITHOUT_EFFECT or (base.model_type, field) in OTHERWISE_READ:
            continue
        for number, other in enumerate(other_values(value)):
            directory = tmp_path / f"{field}-{number}"
            expected = transformers_logits(base, field, other, directory)
            if expected is None:
                continue
            compared += 1
            try:
                model = load_model(directory)
            except ValueError:
                break
            (microbatch,) = pack([SEQUENCE], budget=64)
            with torch.no_grad():
                off = difference(model(microbatch), expected)
            if not off < DIFFERENT:
                wrong[field] = (other, off)
            break
    assert compared > 9
    assert not wrong
