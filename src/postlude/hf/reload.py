"""renew: another set of weights for a model that is there, read from a directory, all of them or none."""

from __future__ import annotations

import os
from pathlib import Path

from postlude.hf.checksum import ChecksummedSource
from postlude.hf.families import FAMILIES
from postlude.hf.load import check_tensors, fill
from postlude.hf.tensor_source import TensorSource
from postlude.hf.tensor_sources import SafetensorsSource
from postlude.model import LanguageModel


class PartialReloadError(RuntimeError):
    """Reading failed after it had begun: the model has some of the new weights and some of the old."""


def reload_weights(model: LanguageModel, directory: str | os.PathLike[str]) -> str:
    """Copy the weights of a directory that `export_hf` wrote into a model of the same config, in place.

    What the files' headers show is seen before the first weight is touched: a directory without one of the tensors, or
    with another shape, raises a sentence and leaves the model as it was. Returns the checksum of what was read.
    """
    try:
        path = Path(directory).expanduser()
    except RuntimeError as error:  # ~ of a user that there is none of
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
