"""Invalid optimizer settings are refused when they are created, not when they are used."""

import math
from typing import Any

import pytest

from postlude.optimizer import SGD, AdamW, LRSchedule


@pytest.mark.parametrize(
    ("kind", "settings", "sentence"),
    [
        (AdamW, {"lr": -1.0}, "lr is -1, but it must be a number of at least 0"),
        (AdamW, {"lr": math.inf}, "lr is inf"),
        (AdamW, {"lr": math.nan}, "lr is nan"),
        (AdamW, {"betas": (0.9, 1.0)}, r"betas\[1\] is 1, but it must be a number of at least 0 and below 1"),
        (AdamW, {"betas": (-0.1, 0.9)}, r"betas\[0\] is -0.1"),
        (AdamW, {"eps": 0.0}, "eps is 0, but it must be a number above 0"),
        (AdamW, {"weight_decay": -0.1}, "weight_decay is -0.1"),
        (AdamW, {"max_grad_norm": 0.0}, "max_grad_norm is 0"),
        (AdamW, {"moments": "4bit"}, "how moments are kept is '4bit'"),
        (SGD, {"lr": -1.0}, "lr is -1"),
        (SGD, {"momentum": 1.0}, "momentum is 1"),
        (LRSchedule, {"warmup": -1}, "warmup is -1"),
        (LRSchedule, {"steps": 0}, "steps is 0"),
        (LRSchedule, {"floor": 1.5}, "floor is 1.5"),
        (LRSchedule, {"shape": "square"}, "shape of a schedule is 'square'"),
    ],
)
def test_invalid_settings_are_refused(kind: Any, settings: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        kind(**settings)
