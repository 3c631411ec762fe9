"""Settings with a fixed set of values, defined once for configs, the command line and the code. Needs no torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, Literal, TypeAlias, TypeVar

Backend = Literal["auto", "torch", "triton"]
"""Backend of a kernel: "torch" anywhere, "triton" on a GPU; "auto" uses triton where it can run."""
HeadBackend = Literal["auto", "torch", "triton", "logits"]
"""Backend of log-probs: as `Backend`, or "logits", the plain product with all logits in memory, for comparison."""
ScanBackend = Literal["auto", "torch", "triton", "fla"]
"""Backend of the scans of Mamba-2 and gated delta nets."""
KVCacheDtype = Literal["auto", "fp8"]
"""How the native generator stores keys and values: in the model's dtype, or in FP8 with a scale for each token and key
head."""
Quantization = Literal["fp8"]
"""How the native generator stores the weights of linear layers: FP8 in blocks of 128 × 128."""
Draft = Literal["mtp"]
"""Speculative decoding: with the model's first multi-token-prediction depth."""
SyncMethod = Literal["disk", "network", "ipc", "delta"]
"""How servers get new weights: from files, sent into their memory, in memory of their own device that the trainer
shares, or what changed."""
DeviceKind = Literal["cpu", "cuda"]
"""The kind of a device."""
TrainedTurns = Literal["all", "last"]
"""The assistant's turns of a conversation that are trained on."""
Dtype = Literal["float32", "bfloat16", "float16"]
"""A dtype to compute in."""
Recompute = Literal["none", "selective", "full"]
"""What a backward recomputes instead of keeping it."""
MomentStorage = Literal["fp32", "8bit"]
"""How AdamW's moments of matrices are stored; "8bit" in blocks of 64 with a scale each."""
WeightStorage = Literal["fp32", "split", "rounded"]
"""How weights are stored: in fp32; in bf16, with the lower sixteen bits of fp32 in the optimizer's state; or in bf16
only, each step rounded up or down at random so that it is right on average."""
SharePrefixes = Literal["auto", "always", "off"]
"""Whether tokens with which several sequences of a microbatch begin are computed once: where it pays ("auto"), wherever
two sequences begin alike ("always"), or never."""
Overlap = bool | Literal["zero_bubble"]
"""What hides a rank's waits: nothing (False); a forward interleaved with another microbatch's backward, so that one
computes while the other exchanges rows with experts (True); or deferred weight gradients in the pipeline's bubble."""
ZERO_BUBBLE: Literal["zero_bubble"] = "zero_bubble"
COMMON = "x-common"
"""In a JSON Schema, marks a key that `Common` does."""


class _CommonMark:
    """Marks a field of a config in its JSON Schema."""

    def __get_pydantic_json_schema__(self, core: Any, handler: Callable[[Any], dict[str, Any]]) -> dict[str, Any]:
        """Returns the field's schema with the mark."""
        return handler(core) | {COMMON: True}


Value = TypeVar("Value")
Common: TypeAlias = Annotated[Value, _CommonMark()]
"""The type of an option that most users set, which a short help shows: `lr: Common[float] = 1e-6`. One in a section is
shown if the field of the section is common too."""


class _TrueAndFalse:
    """Reads true and false from text, as configs are, where other text is a value too."""

    def __get_pydantic_core_schema__(self, source: Any, handler: Callable[[Any], Any]) -> Any:
        """Returns pydantic's schema of the type, after this."""
        words = {"true": True, "false": False}
        convert = {"type": "no-info", "function": lambda value: words.get(str(value).lower(), value)}
        return {"type": "function-before", "function": convert, "schema": handler(source)}


LayerChoice = Annotated[bool | str, _TrueAndFalse()]
"""Layers of a model: all, none, or numbers and Python slices with commas between: "1:-1", "::3", "0,5,-1"."""


def check_overlap(overlap: Overlap, *, pp: int, vpp: int) -> None:
    """Raises ValueError if there is no schedule for this overlap."""
    if overlap not in (True, False, ZERO_BUBBLE):
        raise ValueError(f"overlap={overlap!r} is unknown; use True, False or {ZERO_BUBBLE!r}.")
    if overlap == ZERO_BUBBLE and pp == 1:
        raise ValueError(f"overlap={overlap!r} fills the bubble of a pipeline, but pp is 1. Use pp=2 or overlap=False.")
    if overlap == ZERO_BUBBLE and vpp > 1:
        raise ValueError(f"overlap={overlap!r} has a schedule for one stage per rank, but vpp is {vpp}. Use vpp=1.")


def check_layer_choice(name: str, choice: LayerChoice) -> None:
    """Raises ValueError for text that names no layers. `name` is the option's."""
    for part in () if isinstance(choice, bool) else choice.split(","):
        try:
            bounds = [int(text) if text or ":" not in part else None for text in part.strip().split(":")]
        except ValueError:
            bounds = []
        if not 1 <= len(bounds) <= 3 or (len(bounds) == 3 and bounds[2] is not None and bounds[2] < 1):
            raise ValueError(
                f"{name} is {choice!r}, but it must be true, false, or layers by their numbers, such as 1:-1 (all but "
                "the first and the last), ::3 (every third) or 0,5,-1."
            )


def chosen_layers(name: str, choice: LayerChoice, count: int) -> frozenset[int]:
    """Returns the numbers of the chosen ones of `count` layers. Raises ValueError if one does not exist."""
    if isinstance(choice, bool):
        return frozenset(range(count if choice else 0))
    check_layer_choice(name, choice)
    chosen = set[int]()
    for part in choice.split(","):
        first, *rest = (int(text) if text.strip() else None for text in part.split(":"))
        for bound in (first, *rest[:1]):
            if bound is not None and not -count <= bound <= count - (not rest):
                raise ValueError(
                    f"{name} is {choice!r}, but the model's {count} layers are 0 to {count - 1}, and none is {bound}."
                )
        chosen.update(range(count)[slice(first, *rest)] if rest else [range(count)[first or 0]])
    return frozenset(chosen)
