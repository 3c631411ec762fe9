"""Engine: a model in any layout, and the calls of a training loop. Start at `engine.py`."""

from postlude.engine.engine import Engine
from postlude.engine.options import EngineOptions
from postlude.engine.result import PassResult, StepResult, TokenScores
from postlude.optimizer import SGD, AdamW, LRSchedule

__all__ = ["SGD", "AdamW", "Engine", "EngineOptions", "LRSchedule", "PassResult", "StepResult", "TokenScores"]
