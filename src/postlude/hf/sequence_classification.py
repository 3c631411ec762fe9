"""A reward model as transformers' AutoModelForSequenceClassification reads it: one label, `score.weight` [1, H]."""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import PretrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES

from postlude.hf.family import TensorMapping, TensorSource, copy_from_hf
from postlude.hf.read_model import read_model, tensors_in, weights_path
from postlude.model.parallel import local_shard, region

VALUE_HEAD = "value_head.weight"
SCORE = "score.weight"
"""The name of the value head in transformers' models that classify sequences."""


def score_mapping(size: int) -> TensorMapping:
    """Returns the mapping of the value head [H] to `score.weight` [1, H]."""
    return TensorMapping(SCORE, (1, size), region=(slice(0, size),))


def as_classifier(hf: PretrainedConfig) -> PretrainedConfig:
    """Returns the config of the same model with one label. Raises ValueError if transformers has no such model."""
    name = MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES.get(hf.model_type)
    if name is None:
        raise ValueError(
            f"transformers has no model of type {hf.model_type!r} that classifies sequences, so a reward model of it "
            "cannot be exported. Set export to false, and load its checkpoint with Engine(..., critic=True)."
        )
    hf.architectures, hf.num_labels = [name], 1
    end = hf.eos_token_id
    if hf.pad_token_id is not None and hf.pad_token_id in (end if isinstance(end, list) else [end]):
        # transformers scores the last token that is not padding, which would be the one before the end.
        hf.pad_token_id = None
    return hf


@torch.no_grad()
def copy_score(tensors: TensorSource, weight: Tensor) -> None:
    """Copies this rank's shard of the value head from a source that has one."""
    shape = tuple(tensors.shape(SCORE))
    if shape != (1, weight.shape[0]):
        raise ValueError(
            f"{SCORE} has shape {shape}, but a value head of this model is (1, {weight.shape[0]}). Give a model with "
            "num_labels=1."
        )
    copy_from_hf(tensors.take(SCORE), score_mapping(weight.shape[0]), local_shard(weight), region(weight))


def check_value_head(source: str) -> None:
    """Raises ValueError if a model directory has no `score.weight`, and so is not a reward model."""
    path = weights_path(source)
    if path is None or not path.is_dir() or SCORE not in tensors_in(path, *read_model(source)).names():
        raise ValueError(
            f"{source} has no tensor {SCORE}, so it is not a reward model. Give the model/ directory of a run of "
            "postlude rm, or one that transformers' AutoModelForSequenceClassification reads with num_labels=1."
        )
