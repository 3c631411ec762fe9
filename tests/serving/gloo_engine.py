"""vLLM's NCCL weight-transfer engine over gloo, for a CPU server, loaded by `--worker-extension-cls`.

All else is vLLM's: how the words of a trainer are read, when an update begins and ends, how tensors become its weights.
"""

import math
from datetime import timedelta

import torch
import torch.distributed as dist
from vllm.distributed.weight_transfer import WeightTransferEngineFactory
from vllm.distributed.weight_transfer.nccl_engine import NCCLWeightTransferEngine


class GlooEngine(NCCLWeightTransferEngine):
    """Receives packed tensors like the original, cut where a buffer is full."""

    def init_transfer_engine(self, init_info):
        assert init_info.packed
        self.packed_buffer_size_bytes = init_info.packed_buffer_size_bytes
        store = dist.TCPStore(init_info.master_address, init_info.master_port, is_master=False)
        rank = self.parallel_config.rank + init_info.rank_offset
        self.group = dist.ProcessGroupGloo(store, rank, init_info.world_size, timedelta(seconds=60))

    def update_weights(self, update_info):
        update = self.parse_update_info(update_info)
        waiting = list(zip(update.names, update.dtype_names, update.shapes, strict=True))
        while waiting:
            chunk, size = [], 0
            while waiting and size <= self.packed_buffer_size_bytes:
                name, dtype, shape = waiting.pop(0)
                chunk.append((name, getattr(torch, dtype), shape))
                size += math.prod(shape) * chunk[-1][1].itemsize
            data = torch.empty(size, dtype=torch.uint8)
            self.group.broadcast(data, 0).wait()
            parts = data.split([math.prod(shape) * dtype.itemsize for _, dtype, shape in chunk])
            tensors = zip(chunk, parts, strict=True)
            self.model.load_weights([(name, part.view(dtype).view(shape)) for (name, dtype, shape), part in tensors])

    def shutdown(self):
        self.group = None


class Extension:
    """Registers the engine where workers are made."""


WeightTransferEngineFactory.register_engine("gloo", GlooEngine)
