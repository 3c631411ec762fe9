"""reload_weights: reads other weights into an existing model, all of them or none."""

from __future__ import annotations

import os
from pathlib import Path

from postlude.hf.checksum import ChecksummedSource
from postlude.hf.families import FAMILIES
from postlude.hf.family import TensorSource
from postlude.hf.load import check_tensors, fill
from postlude.hf.tensor_sources import SafetensorsSource
from postlude.model import LanguageModel


class PartialReloadError(RuntimeError):
    """Reading failed in the middle: the model has some of the new weights and some of the old."""


def reload_weights(model: LanguageModel, directory: str | os.PathLike[str]) -> str:
    """Copies the weights of a directory that `export_hf` wrote into a model of the same config, in place.

    The files' headers are checked first: a missing tensor, or one of another shape, raises and leaves the model as it
    was. Returns the checksum of the weights.
    """
    try:
        path = Path(directory).expanduser()
    except RuntimeError as error:  # ~ of an unknown user
        raise FileNotFoundError(f"{directory} names the home of a user who is not known here.") from error
    family = FAMILIES[model.config.family] if model.config.family is not None else None
    summed = ChecksummedSource(SafetensorsSource(path))
    tensors: TensorSource = summed if family is None or family.adapt_source is None else family.adapt_source(summed)
    check_tensors(tensors, family, model.config, model.block_types)
    try:
        fill(model, tensors, family)
    except Exception as error:
        raise PartialReloadError(
            f"{path} could not be read to its end, so the model is a mixture now: {error}"
        ) from error
    return summed.checksum()
