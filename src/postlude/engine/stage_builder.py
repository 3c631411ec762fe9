"""Building: the stages of a model that one rank runs, with weights of a source, or anew around those that they have."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch

from postlude.engine.fsdp import ParameterSharding, shard_stage
from postlude.head import HeadConfig
from postlude.layout import Stage
from postlude.model import LanguageModel, ModelConfig
from postlude.model.blocks import Block
from postlude.model.recompute import Recompute
from postlude.ops.kernels.capabilities import ScanBackend
from postlude.optimizer import WeightStorage
from postlude.pipeline import Executor
from postlude.pipeline.schedule import Overlap
from postlude.world.mesh import Mesh


class BuiltStages(NamedTuple):
    """What runs on a rank: its stages by their global numbers, how the weights of each are gathered, the pipeline."""

    stages: dict[int, LanguageModel]
    gathering: dict[int, ParameterSharding]
    executor: Executor


@dataclass(frozen=True, kw_only=True)
class StageBuilder:
    """What the stages of an engine are built of, and how: always alike. `Engine` says what each word means."""

    config: ModelConfig
    mesh: Mesh
    device: torch.device
    compute_dtype: torch.dtype
    recompute: Recompute
    scans: ScanBackend
    head: HeadConfig
    critic: bool
    mtp: bool
    overlap: Overlap
    gather_once: bool
    weights: WeightStorage
    blocks: Mapping[str, type[Block]]

    def build(self, fill: Callable[[LanguageModel], None]) -> BuiltStages:
        """This rank's stages, each sharded before it has memory, and then given its weights by `fill`."""
        layout, stages, gathering = self.mesh.layout, dict[int, LanguageModel](), dict[int, ParameterSharding]()
        for index in range(self.mesh.pp.rank, layout.stages, layout.pp):
            stages[index], gathering[index] = self._without_tensors(index)
            stages[index].to_empty(device=self.device)
            fill(stages[index])
        return self._built(stages, gathering)

    def rebuild(self, stages: Mapping[int, LanguageModel], gathering: Mapping[int, ParameterSharding]) -> BuiltStages:
        """New stages around the same parameters, for ones that an exception left in the middle of a pass."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)  # what is under way on other streams still uses the old ones
        for each in gathering.values():
            each.end()
        new_stages, new_gathering = dict[int, LanguageModel](), dict[int, ParameterSharding]()
        for index, old in stages.items():
            new_stages[index], new_gathering[index] = self._without_tensors(index)
            _move_tensors(old, new_stages[index])
        return self._built(new_stages, new_gathering)

    def _built(self, stages: dict[int, LanguageModel], gathering: dict[int, ParameterSharding]) -> BuiltStages:
        executor = Executor(stages, self.mesh, dtype=self.compute_dtype, overlap=self.overlap)
        return BuiltStages(stages, gathering, executor)

    def _without_tensors(self, index: int) -> tuple[LanguageModel, ParameterSharding]:
        """One stage, sharded, all on the meta device."""
        with torch.device("meta"):
            stage = LanguageModel(
                self.config,
                mesh=self.mesh,
                stage=Stage(index, self.mesh.layout.stages),
                recompute=self.recompute,
                scans=self.scans,
                head=self.head,
                value_head=self.critic,
                dtype=None if self.weights == "fp32" else torch.bfloat16,
                blocks=self.blocks,
            )
        if stage.has_mtp:
            stage.mtp.requires_grad_(self.mtp)
        planned = bool(self.overlap)
        return stage, shard_stage(stage, self.mesh, self.compute_dtype, planned=planned, once=self.gather_once)


def _move_tensors(old: LanguageModel, new: LanguageModel) -> None:
    """Move the parameters, with their gradients, and the buffers of a stage into a new one that has never run.

    Of the old one nothing is asked but its state, which FSDP gives out sharded whatever it was in the middle of.
    """
    new.load_state_dict(old.state_dict(keep_vars=True), assign=True)
    for before, after in zip(old.modules(), new.modules(), strict=True):
        for name, buffer in before.named_buffers(recurse=False):
            setattr(after, name, buffer)  # also those that no state holds
