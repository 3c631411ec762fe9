"""Each rank uses its own GPU where there is one, however the launcher exposes it; sharing a GPU gives a warning."""

import logging
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.distributed as dist

from postlude import Engine
from postlude.world.devices import (
    DeviceAssignment,
    VisibleDevices,
    agree_on_device,
    assign_devices,
    check_device,
    default_device,
    group_device,
)
from postlude.world.launcher import launch, ranks
from postlude.world.mesh import high_priority_options

ALL = ("a", "b", "c", "d")


def agreed_devices(visible: list[VisibleDevices]) -> list[DeviceAssignment]:
    """Returns the device of each rank, agreed on through a store."""
    store = dist.HashStore()
    with ThreadPoolExecutor(len(visible)) as threads:
        return list(
            threads.map(lambda rank: agree_on_device(store, rank, len(visible), visible[rank]), range(len(visible)))
        )


@pytest.mark.parametrize(
    ("visible", "gpus"),
    [
        pytest.param([VisibleDevices("x", ALL, rank) for rank in range(4)], [0, 1, 2, 3], id="torchrun"),
        pytest.param([VisibleDevices("x", ALL) for _ in range(4)], [0, 1, 2, 3], id="no LOCAL_RANK"),
        pytest.param(
            [VisibleDevices("x", (name,), rank) for rank, name in enumerate(ALL)], [0] * 4, id="each sees its own"
        ),
        pytest.param(
            [VisibleDevices(host, (host + name,)) for host in "xy" for name in "ab"], [0] * 4, id="two machines"
        ),
        pytest.param([VisibleDevices(host, (host + "a", host + "b")) for host in "xxyy"], [0, 1, 0, 1], id="by place"),
        pytest.param(
            [VisibleDevices("x", ("a", "b"), 0), VisibleDevices("x", ("b", "a"), 1)], [0, 0], id="seen in another order"
        ),
        pytest.param(
            [VisibleDevices("x", ALL, 2, fixed=True), VisibleDevices("x", ALL, 2)], [2, 0], id="the other one is taken"
        ),
    ],
)
def test_ranks_get_separate_gpus_and_use_nccl(visible: list[VisibleDevices], gpus: list[int]) -> None:
    assignments = agreed_devices(visible)
    assert [place.gpu for place in assignments] == gpus
    assert [str(place.device) for place in assignments] == [f"cuda:{gpu}" for gpu in gpus]
    assert {(place.backend, place.shared, place.refusal) for place in assignments} == {("nccl", "", "")}


def test_ranks_that_share_a_gpu_use_gloo_with_a_warning() -> None:
    assignments = agreed_devices(
        [VisibleDevices("x", ("a", "b"), rank) for rank in range(3)] + [VisibleDevices("y", ("c",), 0)]
    )
    assert [str(place.device) for place in assignments] == ["cuda:0", "cuda:1", "cuda:0", "cuda:0"]
    assert {place.backend for place in assignments} == {"gloo"}
    assert {place.warning("gloo") for place in assignments} == {
        "ranks 0, 2 of 4 share a GPU, so all ranks communicate through gloo, by way of host memory; start one rank a "
        "GPU to use NCCL."
    }


def test_ranks_that_share_a_gpu_have_distinct_nccl_host_ids() -> None:
    same_host = agreed_devices([VisibleDevices("x", ("a",)), VisibleDevices("x", ("a",))])
    assert [place.nccl_variables(rank) for rank, place in enumerate(same_host)] == [
        {"NCCL_HOSTID": f"postlude-rank-{rank}", "NCCL_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": "1"} for rank in (0, 1)
    ]
    assert same_host[0].warning("nccl").startswith("ranks 0, 1 of 2 share a GPU: NCCL treats each rank as a machine")
    two_hosts = agreed_devices([VisibleDevices("x", ("a",)), VisibleDevices("x", ("a",)), VisibleDevices("y", ("b",))])
    assert two_hosts[0].nccl_variables(0) == {"NCCL_HOSTID": "postlude-rank-0"}  # lo does not lead to another machine
    alone = agreed_devices([VisibleDevices("x", ("a",)), VisibleDevices("y", ("b",))])[0]
    assert (alone.nccl_variables(0), alone.warning("nccl")) == ({}, "")


def test_nccl_on_the_cpu_is_refused() -> None:
    with (
        pytest.raises(ValueError, match="backend 'nccl' needs a GPU, but ranks compute on the CPU"),
        ranks(backend="nccl", device="cpu"),
    ):
        pass


def test_all_ranks_name_a_rank_without_a_gpu() -> None:
    assignments = agreed_devices([VisibleDevices("x", ("a",)), VisibleDevices("y", ()), VisibleDevices("z", ("b",))])
    assert {place.refusal for place in assignments} == {
        "rank 1 of 3 sees no GPU, but rank 0 does; give every rank one, or start all of them on the CPU (device cpu)."
    }
    assert assign_devices([VisibleDevices("x", ()), VisibleDevices("y", ())]) == [DeviceAssignment()] * 2
    assert (DeviceAssignment().backend, DeviceAssignment().device) == ("gloo", torch.device("cpu"))


def test_missing_device_gives_clear_error_before_any_rank_starts() -> None:
    count = torch.cuda.device_count()
    with pytest.raises(
        ValueError, match=rf"^device 'cuda:{count}' was requested, but torch sees {count} GPUs here.*cpu"
    ):
        launch(print, nproc=2, device=f"cuda:{count}")
    with pytest.raises(ValueError, match="device 'gpu' is unknown to torch; use cpu, cuda or cuda:0"):
        check_device("gpu")
    for fine in (None, "cpu", torch.device("cpu"), default_device()):
        check_device(fine)


def test_an_amd_gpu_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "hip", "7.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for device in ("cuda", "cuda:0", None):
        with pytest.raises(ValueError, match="built for AMD GPUs, on which Postlude was never run; use device cpu"):
            check_device(device)
    check_device("cpu")


def test_an_engine_computes_on_its_ranks_device() -> None:
    with ranks(device="cpu") as rank:
        engine = Engine("tiny-dense")
        assert engine.device == rank.device == group_device() == torch.device("cpu")
        assert {parameter.device.type for parameter in engine.parameters.values()} == {"cpu"}


def rank_device() -> tuple[str, str, str, str]:
    engine = Engine("tiny-dense") if dist.get_world_size() == 1 else None
    with ranks() as rank:
        return dist.get_backend(), str(rank.device), str(engine.device if engine else group_device()), default_device()


@pytest.mark.gpu
def test_one_rank_per_gpu_uses_nccl_and_more_use_gloo(capfd, caplog) -> None:
    with ranks(), caplog.at_level(logging.WARNING):
        assert rank_device() == ("nccl", "cuda:0", "cuda:0", "cuda")
    assert not caplog.records
    count = torch.cuda.device_count()
    results = launch(rank_device, nproc=count + 1)
    assert [result[:3] for result in results] == [
        ("gloo", f"cuda:{rank % count}", f"cuda:{rank % count}") for rank in range(count + 1)
    ]
    assert capfd.readouterr().err.count("share a GPU, so all ranks communicate through gloo") == 1


@pytest.mark.gpu
def test_expert_exchange_group_has_a_high_priority_stream() -> None:
    """A group that is asked for as the experts' has a stream that comes first."""
    with ranks():
        assert dist.get_backend() == "nccl"
        group = dist.new_group([0], pg_options=high_priority_options())
        dist.all_reduce(torch.ones(1, device="cuda"), group=group)
        assert group._get_backend(torch.device("cuda")).options.is_high_priority_stream
