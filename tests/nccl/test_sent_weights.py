"""Weights sent to another process over NCCL arrive bit-exact, on a GPU that both processes share."""

import base64
import ctypes
import hashlib
import os
from multiprocessing.connection import Connection

import torch

from postlude.serving.weights.channel import (
    FLOAT32,
    SUM,
    UINT8,
    NCCLConfig,
    NCCLRendezvous,
    UniqueId,
    check,
    library,
    send_all,
)
from tests.conftest import SERVER

SIZES = (1, 1 << 20, 3_000_001)
ALONE_ON_A_HOST = {"NCCL_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": "1"}


def digest(data: torch.Tensor) -> str:
    return hashlib.sha256(data.cpu().numpy().tobytes()).hexdigest()


def receive(unique_id: str, connection: Connection) -> None:
    """Receives as a vLLM worker does: joins by the NCCL id, takes part in the first all-reduce, receives broadcasts."""
    os.environ.update(ALONE_ON_A_HOST, NCCL_HOSTID="receiver")
    torch.cuda.set_device(0)
    nccl_id, communicator = UniqueId.from_buffer_copy(base64.b64decode(unique_id)), ctypes.c_void_p()
    config = NCCLConfig(ctypes.sizeof(NCCLConfig), 0xCAFEBEEF, 21400, 1)
    check(library().ncclCommInitRankConfig(ctypes.byref(communicator), 2, nccl_id, 1, ctypes.byref(config)))
    stream = torch.cuda.current_stream().cuda_stream
    greeting = torch.zeros(1, device="cuda")
    check(library().ncclAllReduce(greeting.data_ptr(), greeting.data_ptr(), 1, FLOAT32, SUM, communicator, stream))
    for size in SIZES:
        data = torch.empty(size, dtype=torch.uint8, device="cuda")
        check(library().ncclBroadcast(data.data_ptr(), data.data_ptr(), size, UINT8, 0, communicator, stream))
        torch.cuda.synchronize()
        connection.send(digest(data))


def test_weights_arrive_bit_exact_in_another_process(monkeypatch) -> None:
    for name, value in {**ALONE_ON_A_HOST, "NCCL_HOSTID": "sender"}.items():
        monkeypatch.setenv(name, value)
    device = torch.device("cuda", 0)
    offer = NCCLRendezvous(2, device)
    parent_pipe, child_pipe = SERVER.Pipe()
    process = SERVER.Process(target=receive, args=(offer.info["nccl_unique_id_b64"], child_pipe), daemon=True)
    process.start()
    channel = offer.open(120.0)
    try:
        for size in SIZES:
            data = torch.randint(256, (size,), dtype=torch.uint8, device=device)
            assert send_all({"http://a": channel}, data, 120.0) == {}
            assert parent_pipe.poll(120)
            assert parent_pipe.recv() == digest(data)
    finally:
        channel.close()
        process.kill()
        process.join()
