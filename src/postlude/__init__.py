"""Postlude trains language models after pre-training. The names here are the public, stable ones.

Each is imported when it is first used: `from postlude import linear_logprobs` needs torch alone, and nothing waits for
transformers but what reads or writes its models.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from postlude.data import Batch, Microbatch, pack, unpack
    from postlude.engine import SGD, AdamW, Engine, LRSchedule
    from postlude.generate.distributed import SyncedGenerator
    from postlude.generate.generator import Generator
    from postlude.generate.sampling_params import SamplingParams
    from postlude.head import HeadConfig
    from postlude.hf.export import export_hf, export_model
    from postlude.hf.load import load_model, load_tokenizer
    from postlude.hf.read_model import Recast
    from postlude.layout import Layout, Stage
    from postlude.model import LanguageModel, ModelConfig, OutputHead, OutputInputs, OutputProcessor, Pattern
    from postlude.objectives import Loss
    from postlude.ops.linear_logprobs import TokenStats, linear_logprobs
    from postlude.ops.linear_objective import LinearObjective, linear_objective
    from postlude.world.failure_report import RankError
    from postlude.world.launcher import launch, ranks
    from postlude.world.mesh import Mesh

__all__ = [
    "SGD",
    "AdamW",
    "Batch",
    "Engine",
    "Generator",
    "HeadConfig",
    "LRSchedule",
    "LanguageModel",
    "Layout",
    "LinearObjective",
    "Loss",
    "Mesh",
    "Microbatch",
    "ModelConfig",
    "OutputHead",
    "OutputInputs",
    "OutputProcessor",
    "Pattern",
    "RankError",
    "Recast",
    "SamplingParams",
    "Stage",
    "SyncedGenerator",
    "TokenStats",
    "export_hf",
    "export_model",
    "launch",
    "linear_logprobs",
    "linear_objective",
    "load_model",
    "load_tokenizer",
    "pack",
    "ranks",
    "unpack",
]

_HOMES = {
    "postlude.data": ("Batch", "Microbatch", "pack", "unpack"),
    "postlude.engine": ("SGD", "AdamW", "Engine", "LRSchedule"),
    "postlude.generate.distributed": ("SyncedGenerator",),
    "postlude.generate.generator": ("Generator",),
    "postlude.generate.sampling_params": ("SamplingParams",),
    "postlude.head": ("HeadConfig",),
    "postlude.hf.export": ("export_hf", "export_model"),
    "postlude.hf.load": ("load_model", "load_tokenizer"),
    "postlude.hf.read_model": ("Recast",),
    "postlude.world.failure_report": ("RankError",),
    "postlude.world.launcher": ("launch", "ranks"),
    "postlude.layout": ("Layout", "Stage"),
    "postlude.world.mesh": ("Mesh",),
    "postlude.model": ("LanguageModel", "ModelConfig", "OutputHead", "OutputInputs", "OutputProcessor", "Pattern"),
    "postlude.objectives": ("Loss",),
    "postlude.ops.linear_logprobs": ("TokenStats", "linear_logprobs"),
    "postlude.ops.linear_objective": ("LinearObjective", "linear_objective"),
}
_HOME = {name: home for home, names in _HOMES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'postlude' has no attribute {name!r}; it has {', '.join(__all__)}.")
    return getattr(importlib.import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
