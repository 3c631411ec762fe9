"""Records what torch does: the largest tensor, the matrix products, and operations that synchronise with a GPU."""

import traceback
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

GEMMS = {torch.ops.aten.mm, torch.ops.aten.addmm, torch.ops.aten.addmm_}


class Watch(TorchDispatchMode):
    """Records, while active, the storage of every new tensor and the shape of every matrix product."""

    def __init__(self) -> None:
        super().__init__()
        self.largest = 0  # elements
        self.products: list[tuple[int, int, int]] = []  # rows, inner dimension, columns

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                self.largest = max(self.largest, leaf.untyped_storage().nbytes() // leaf.element_size())
        if func.overloadpacket in GEMMS:
            left, right = args[-2:]
            self.products.append((*left.shape, right.shape[1]))
        return result

    def projections(self, features: int) -> int:
        """Returns the products over the features: slabs of logits."""
        return sum(inner == features for _, inner, _ in self.products)

    @property
    def operations(self) -> int:
        """Returns the multiplications of all matrix products."""
        return sum(rows * inner * columns for rows, inner, columns in self.products)


# Results that are numbers on the host, and results whose shape depends on values.
NUMBERS = {"_local_scalar_dense", "is_nonzero", "equal"}
SHAPES = {"nonzero", "masked_select", "bincount", "histc", "_unique", "_unique2", "unique_dim", "unique_consecutive"}
READS = {Tensor.tolist, Tensor.numpy, Tensor.cpu}  # on the CPU no operator is called for these


class Waits(TorchFunctionMode):
    """Records, while active, where postlude calls an operation that would make the host wait for a GPU."""

    def __init__(self) -> None:
        super().__init__()
        self.sites: list[str] = []  # "file.py:function"
        self.operators = _Operators(self.sites)

    def __enter__(self) -> "Waits":
        self.operators.__enter__()
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self.operators.__exit__(*error)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in READS:
            self.sites.append(_site())
        return func(*args, **(kwargs or {}))


class _Operators(TorchDispatchMode):
    def __init__(self, sites: list[str]) -> None:
        super().__init__()
        self.sites = sites

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, kwargs = func.overloadpacket.__name__, kwargs or {}
        if (
            name in NUMBERS | SHAPES
            or (name.startswith("index") and _is_boolean_mask(args))
            or (name == "repeat_interleave" and isinstance(args[-1], Tensor) and kwargs.get("output_size") is None)
        ):
            self.sites.append(_site())
        return func(*args, **kwargs)


def _is_boolean_mask(args: Any) -> bool:
    """Returns whether an index is a boolean mask."""
    indices = args[1] if len(args) > 1 and isinstance(args[1], list | tuple) else []
    return any(isinstance(index, Tensor) and index.dtype == torch.bool for index in indices)


def _site() -> str:
    frames = [frame for frame in traceback.extract_stack() if "/postlude/" in frame.filename]
    return f"{Path(frames[-1].filename).name}:{frames[-1].name}" if frames else "elsewhere"
