"""Our part of vLLM's workers, loaded by `--worker-extension-cls postlude_worker.Extension`.

`SharedMemoryEngine`, the weight-transfer backend "postlude", loads weights from a buffer that a trainer on the same
machine shares. When an update begins and ends, and how tensors become parameters, is vLLM's.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from shared_buffers import Buffer, device_name, open_buffer
from vllm.distributed.weight_transfer import WeightTransferEngineFactory
from vllm.distributed.weight_transfer.nccl_engine import NCCLWeightTransferEngine

BACKEND = "postlude"


class Extension:
    """Methods that vLLM's workers get, for /collective_rpc."""

    postlude_weights = "default"

    def postlude_weight_version(self) -> dict[str, str]:
        """Returns the name of the weights, for vLLM before 0.27, which has no route for it."""
        return {"weight_version": self.postlude_weights}

    def postlude_set_weight_version(self, version: str) -> None:
        self.postlude_weights = version


class SharedMemoryEngine(NCCLWeightTransferEngine):  # type: ignore[misc] # vLLM is not installed where types are checked
    """Loads weights from the trainer's buffers, in which the tensors of one request follow one another."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._buffers: dict[str, Buffer] = {}  # by their handles

    def parse_init_info(self, init_dict: dict[str, Any]) -> dict[str, Any]:
        """Returns it as it is."""
        return init_dict

    def init_transfer_engine(self, init_info: dict[str, Any]) -> None:
        """Does nothing: no connection is needed."""

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Loads the tensors of one request. The trainer may write to the buffer again afterwards."""
        data = self._open(update_info["handles"])
        names, dtypes = update_info["names"], [getattr(torch, name) for name in update_info["dtype_names"]]
        start, weights = 0, []
        for name, dtype, shape in zip(names, dtypes, update_info["shapes"], strict=True):
            end = start + math.prod(shape) * dtype.itemsize
            # vLLM keeps tensors until it has all of a layer, and the trainer writes the next ones to the same buffer.
            weights.append((name, data[start:end].clone().view(dtype).view(shape)))
            start = end
        self.model.load_weights(weights)
        if data.is_cuda:
            torch.cuda.synchronize(data.device)

    def start_weight_update(self) -> None:
        """Begins an update. Unmaps the buffers of one that did not end, which the trainer has freed."""
        self.shutdown()
        super().start_weight_update()

    def finish_weight_update(self) -> None:
        """Ends an update, and unmaps the buffers, which the trainer can then free."""
        super().finish_weight_update()
        self.shutdown()

    def shutdown(self) -> None:
        buffers, self._buffers = list(self._buffers.values()), {}
        for buffer in buffers:
            buffer.close()

    def _open(self, handles: dict[str, str]) -> torch.Tensor:
        """Returns the bytes of the trainer's buffer on this worker's device, [n] uint8."""
        name = device_name(self.device)
        if name not in handles:
            raise ValueError(f"the trainer shares memory of {sorted(handles)}, but this worker computes on {name}")
        handle = handles[name]
        if handle not in self._buffers:
            self._buffers[handle] = open_buffer(self.device, handle)
        data: torch.Tensor = self._buffers[handle].data
        return data


WeightTransferEngineFactory.register_engine(BACKEND, SharedMemoryEngine)
