"""The tensors that Python knows of in this process, and their memory."""

from __future__ import annotations

import gc
from collections.abc import Iterable

from torch import Tensor

from postlude.model.parallel import is_dtensor


def live_tensors() -> list[Tensor]:
    """Returns all but DTensors, whose local shards are among them, and garbage that was not collected yet.

    gloo's threads hold vectors of finished collectives for a moment: two lists can differ by these.
    """
    candidates = [candidate for candidate in gc.get_objects() if issubclass(type(candidate), Tensor)]
    return [tensor for tensor in candidates if not is_dtensor(tensor)]


def live_matrices() -> list[Tensor]:
    """Returns floating-point tensors of two and more dimensions, which gloo's threads do not hold."""
    return [tensor for tensor in live_tensors() if tensor.ndim > 1 and tensor.is_floating_point()]


def storage_bytes(tensors: Iterable[Tensor]) -> int:
    storages = [tensor.untyped_storage() for tensor in tensors]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())
