"""The choices of a comparison: layouts, objectives and tolerances. Needs no torch."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from postlude.layout import Layout
from postlude.objectives import SFT, Objective, PolicyGradient, Preference, ReferenceKL

# Relative to the largest value. Half precision rounds each rank's part, so layouts differ by a few roundings.
TOLERANCES: Mapping[str, float] = MappingProxyType({"float32": 1e-5, "bfloat16": 3e-2, "float16": 5e-3})
# Sums that cancel are rounded by more. A larger difference is compared with how far one rank is from itself in a wider
# dtype: the layout and the one rank may each be as far from it, on two sides.
WIDER: Mapping[str, str] = MappingProxyType({"float32": "float64", "bfloat16": "float32", "float16": "float32"})
ROUNDINGS = 2.0
# More is no rounding: a token whose experts are nearly equal goes to another one in the wider dtype.
MOST_ROUNDING = 10.0  # times the tolerance

# With FP8 products layouts are compared in this dtype, within the tolerance of float32. Where a number lies between two
# values of e4m3, its last bit decides which of them it becomes. Two layouts in float32 round a few numbers differently,
# and one is enough to change a gradient by a hundredth; in bfloat16 they differ by what a wrong scale would change.
# In float64 no number is rounded differently, and what remains is that gradients are stored in float32.
FP8_DTYPE = "float64"

# Every axis alone and combined. A model without experts skips those with ep.
GRID = tuple(
    Layout.parse(text)
    for text in (
        "tp=2",
        "tp=4",
        "pp=2",
        "pp=4",
        "pp=2,vpp=2",
        "cp=2",
        "cp=4",
        "dp_shard=2,ep=2",
        "dp_shard=4,ep=4",
        "dp_shard=2",
        "dp_shard=4",
        "dp_replicate=2,dp_shard=2",
        "tp=2,pp=2",
        "tp=2,cp=2",
        "pp=2,cp=2",
        "cp=2,ep=2",
        "pp=2,dp_shard=2,ep=2",
        "tp=2,ep=2",
        "tp=2,pp=2,cp=2",
        "pp=2,vpp=2,cp=2,dp_shard=2",
    )
)

OBJECTIVES: Mapping[str, Objective] = MappingProxyType(
    {
        "sft": SFT(over="response_mask"),
        "grpo": PolicyGradient(clip_high=0.28, kl=ReferenceKL(coefficient=0.1), entropy=0.05),
        "gspo": PolicyGradient(ratio="sequence", length=8.0),
        "dpo": Preference(beta=0.1, nll=0.2),
    }
)
