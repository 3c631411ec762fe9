"""Tensors that are alive in this process, and their memory."""

import gc
from collections.abc import Iterable

from torch import Tensor

from postlude.model.parallel import is_dtensor


def live_tensors() -> list[Tensor]:
    """Returns all except DTensors, whose local shards are included, and uncollected garbage.

    gloo's threads hold the tensors of finished collectives for a moment. Keep the first list to compare a second one.
    """
    candidates = [candidate for candidate in gc.get_objects() if issubclass(type(candidate), Tensor)]
    return [tensor for tensor in candidates if not is_dtensor(tensor)]


def live_matrices() -> list[Tensor]:
    """Returns floating-point tensors with two or more dimensions: weights and activations."""
    return [tensor for tensor in live_tensors() if tensor.ndim > 1 and tensor.is_floating_point()]


def storage_bytes(tensors: Iterable[Tensor]) -> int:
    storages = [tensor.untyped_storage() for tensor in tensors]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())
