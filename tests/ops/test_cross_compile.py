"""Every Triton kernel compiles for every GPU in the table, with tiles that fit its shared memory.

Triton's compiler needs no GPU. What a kernel computes is tested elsewhere: in Triton's interpreter and on a GPU.
"""

from collections.abc import Iterator
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="triton has no wheel for this platform, so no kernel can be compiled")

from postlude.ops.kernels import attention
from postlude.ops.kernels.capabilities import GPUS, KERNELS, gpu_of
from tests.ops.cross_compile import CALLS, Call, launched_kernels, launches_on

ARCHITECTURES = ("L40S", "A100", "H200", "B200")  # one GPU of each, that with the least shared memory first
TENSOR_MEMORY = 512  # columns of a multiprocessor, on Blackwell
LONG = (  # calls that compile for long
    *("ssd", "192 and 128", "rank 256", "attention ", "attention_softcap", "256, fp32", "latent"),
    *("attend_pages_fp8", "two tokens", "sample_next", "rank 64", "narrow tiles"),
)


def cases() -> Iterator[Any]:
    """Yields each call on each GPU that can run it, also where a variable must allow it. Long ones are thorough."""
    for name in ARCHITECTURES:
        for call in CALLS:
            case_name = f"{call.operation} {call.label}"
            quick = name == ARCHITECTURES[0] and not any(pattern in case_name for pattern in LONG)
            if KERNELS[call.operation].oldest <= GPUS[name].capability and call.fits(GPUS[name]):
                yield pytest.param(call, name, id=f"{name}, {case_name}", marks=() if quick else pytest.mark.thorough)


def test_every_kernel_is_compiled_by_some_call() -> None:
    with launches_on(GPUS["H200"], compiles=False) as launches:
        for call in CALLS:
            call.make()
    assert {launch.kernel for launch in launches} == launched_kernels()


@pytest.mark.parametrize(("call", "name"), list(cases()))
def test_kernels_compile_and_fit(call: Call, name: str) -> None:
    with launches_on(GPUS[name], compiles=True) as launches:
        call.make()
    assert launches
    for launch in launches:
        assert launch.shared_memory <= GPUS[name].shared_memory, launch
        assert launch.tensor_memory <= TENSOR_MEMORY, launch


@pytest.mark.parametrize("name", ["A100", "H100", "H200", "B200"])
def test_large_gpus_get_the_measured_tiles(name: str) -> None:
    """The tiles of an H200, without its tensor memory accelerator on an A100."""
    chosen = []
    for gpu in (GPUS["H200"], GPUS[name]):
        with launches_on(gpu, compiles=False) as launches:
            for call in CALLS:
                call.make()
        chosen.append([(launch.kernel, {**launch.options, "TMA": None}) for launch in launches])
    assert chosen[0] == chosen[1]


def test_h200_tiles_equal_the_measured_ones() -> None:
    with launches_on(GPUS["H200"], compiles=False):
        heads = torch.empty(4, 2, 128, dtype=torch.bfloat16)
        wide = torch.empty(4, 2, 256, dtype=torch.bfloat16)
        assert attention.tiles_for(heads, heads, heads) == attention.AttentionTiles(
            attention.AttentionTile(64, 64, 4, 3, True),
            attention.AttentionTile(128, 64, 8, 3, True),
            attention.AttentionTile(64, 64, 4, 2, True),
        )
        assert attention.tiles_for(wide, wide, wide) == attention.AttentionTiles(
            attention.AttentionTile(128, 64, 8, 2, True),
            attention.AttentionTile(64, 64, 8, 2, True),
            attention.AttentionTile(32, 64, 8, 2, True),
        )


@pytest.mark.gpu
def test_current_gpu_matches_the_table() -> None:
    gpu = gpu_of(torch.device("cuda", 0))
    for known in GPUS.values():
        if known.name in gpu.name:
            assert (gpu.capability, gpu.shared_memory) == (known.capability, known.shared_memory)
