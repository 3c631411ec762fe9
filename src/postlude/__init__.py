"""Postlude: a PyTorch-native post-training core. The names here are the public, stable ones."""

from postlude.data import Microbatch, pack, unpack
from postlude.hf.export import export_hf
from postlude.hf.load import load_model
from postlude.hf.tokenizer import load_tokenizer
from postlude.layout import Layout, Stage
from postlude.model import LanguageModel, ModelConfig, OutputHead, OutputInputs, OutputProcessor, Pattern
from postlude.ops.linear_logprobs import TokenStats, linear_logprobs
from postlude.ops.linear_objective import LinearObjective, linear_objective

__all__ = [
    "LanguageModel",
    "Layout",
    "LinearObjective",
    "Microbatch",
    "ModelConfig",
    "OutputHead",
    "OutputInputs",
    "OutputProcessor",
    "Pattern",
    "Stage",
    "TokenStats",
    "export_hf",
    "linear_logprobs",
    "linear_objective",
    "load_model",
    "load_tokenizer",
    "pack",
    "unpack",
]
