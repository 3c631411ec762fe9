"""The model: a pattern of blocks over packed sequences, and an output processor. It does not depend on objectives."""

from postlude.model.config import ModelConfig
from postlude.model.language_model import LanguageModel
from postlude.model.output import MTPOptions, OutputHead, OutputInputs, OutputProcessor
from postlude.model.pattern import Pattern, PatternError

__all__ = [
    "LanguageModel",
    "MTPOptions",
    "ModelConfig",
    "OutputHead",
    "OutputInputs",
    "OutputProcessor",
    "Pattern",
    "PatternError",
]
