"""EngineOptions: everything that an engine is made with, besides its model."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, Concatenate, ParamSpec, TypeAlias

import torch

from postlude.hf.families import FAMILIES
from postlude.hf.family import Families
from postlude.hf.read_model import Source
from postlude.layout import Layout
from postlude.model.blocks import BLOCKS, BlockTable
from postlude.options import ScanBackend
from postlude.router_losses import RouterLosses
from postlude.training_options import TrainingOptions
from postlude.world.devices import group_device
from postlude.world.mesh import Mesh

P = ParamSpec("P")


@dataclass(frozen=True, kw_only=True)
class EngineOptions(TrainingOptions):
    """The options of an engine.

    A `mesh` has the layout. One `LoRA` makes the adapter "default"; a mapping makes one per name, and {} none yet
    (`Engine.add_adapter`).
    """

    compute_dtype: torch.dtype | None = None
    """Dtype to compute in; none takes bfloat16 on a GPU and float32 elsewhere."""
    device: torch.device | str | None = None
    """Device of this rank; none takes the one that `postlude.ranks()` chose."""
    mesh: Mesh | None = None
    """Mesh to run on; none makes one of the layout."""
    scan_backend: ScanBackend = "auto"
    """Kernels of recurrent blocks."""
    critic: bool = False
    """Add a value head: the source's, or one of zeros if it has none. It is trained, clipped, saved and loaded like
    every other parameter, and is not part of streamed or exported weights."""
    mtp: bool = False
    """Load the multi-token-prediction depths of the source, and train them with an objective that requests them
    (`MTP`); they run in every pass, even if it does not. With false they are not loaded, and those of a `ModelConfig`
    are not trained."""
    batch_invariant: bool = False
    """A token's results have the same bits in every batch, and equal a generator's: docs/recipes.md."""
    blocks: BlockTable = field(default_factory=lambda: BLOCKS)
    """Blocks by symbol, custom ones included."""
    families: Families = field(default_factory=lambda: FAMILIES)
    """Hugging Face families by model_type, custom ones included."""

    def __post_init__(self) -> None:
        if self.mesh is not None:
            if self.layout not in (Layout(), self.mesh.layout):
                raise ValueError(f"layout is {self.layout}, but mesh has {self.mesh.layout}. Leave either out.")
            object.__setattr__(self, "layout", self.mesh.layout)
        super().__post_init__()

    @property
    def rank_device(self) -> torch.device:
        """The device of this rank."""
        return group_device() if self.device is None else torch.device(self.device)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype to compute in."""
        return self.compute_dtype or (torch.bfloat16 if self.rank_device.type == "cuda" else torch.float32)

    def for_other_model(self) -> EngineOptions:
        """Returns the options of another model on the same ranks: without what concerns this model's parts."""
        changes: dict[str, Any] = {"selection_bias_rate": None, "router_losses": RouterLosses(), "lora": None}
        return replace(self, mtp=False, critic=False, batch_invariant=False, **changes)


Constructor: TypeAlias = Callable[[Any, Source, EngineOptions], None]


def takes_options(
    options: Callable[P, EngineOptions],
) -> Callable[[Constructor], Callable[Concatenate[Any, Source, P], None]]:
    """Lets an engine's constructor take the fields of its options as keyword arguments, with their types."""

    def decorate(constructor: Constructor) -> Callable[Concatenate[Any, Source, P], None]:
        def construct(self: Any, source: Source, /, *args: P.args, **kwargs: P.kwargs) -> None:
            constructor(self, source, options(*args, **kwargs))

        functools.update_wrapper(construct, constructor)
        (engine, source, _), keywords = inspect.signature(constructor).parameters.values(), inspect.signature(options)
        signature = keywords.replace(parameters=[engine, source, *keywords.parameters.values()])
        construct.__signature__ = signature  # type: ignore[attr-defined] # for help and editors
        return construct

    return decorate
