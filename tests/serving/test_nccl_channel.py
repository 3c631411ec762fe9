"""NCCL calls on a GPU: an id that others can join by, bytes through a communicator, and a timeout without one."""

from __future__ import annotations

import base64

import pytest
import torch

from postlude.serving.weights.channel import ChannelError, NCCLRendezvous, send_all

pytestmark = pytest.mark.gpu


def test_bytes_through_a_communicator_are_unchanged() -> None:
    """With one rank, since NCCL does not allow two on one GPU."""
    device = torch.device("cuda", 0)
    offer = NCCLRendezvous(1, device)
    assert len(base64.b64decode(offer.info["nccl_unique_id_b64"], validate=True)) == 128
    channel = offer.open(30.0)
    for size in (1, 1 << 20, 3_000_001):
        data = torch.randint(256, (size,), dtype=torch.uint8, device=device)
        original = data.clone()
        assert send_all({"http://a": channel}, data, 30.0) == {}
        assert torch.equal(data, original)
    channel.close()
    channel.close()


def test_workers_that_never_join_time_out_and_the_gpu_stays_usable() -> None:
    device = torch.device("cuda", 0)
    with pytest.raises(ChannelError, match="did not join to receive weights within 2 s"):
        NCCLRendezvous(2, device).open(2.0)
    assert float(torch.ones(8, device=device).sum()) == 8.0
    NCCLRendezvous(1, device).open(30.0).close()
