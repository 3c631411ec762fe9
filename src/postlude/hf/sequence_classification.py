"""A reward model as transformers' AutoModelForSequenceClassification reads it: one label, `score.weight` [1, H]."""

from __future__ import annotations

from transformers import PretrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES

from postlude.hf.family import SCORE
from postlude.hf.model_source import Recast, Source
from postlude.hf.read_model import read_model, tensors_in, weights_path


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


def has_value_head(source: Source) -> bool:
    """Whether a model directory or a checkpoint has a value head."""
    base = source.source if isinstance(source, Recast) else source
    path = weights_path(base)
    return path is not None and path.is_dir() and SCORE in tensors_in(path, *read_model(base)).names()


def check_value_head(source: str) -> None:
    """Raises ValueError if a model directory has no `score.weight`, and so is not a reward model."""
    if not has_value_head(source):
        raise ValueError(
            f"{source} has no tensor {SCORE}, so it is not a reward model. Give the model/ directory of a run of "
            "postlude rm, or one that transformers' AutoModelForSequenceClassification reads with num_labels=1."
        )
