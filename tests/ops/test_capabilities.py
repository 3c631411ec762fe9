"""`backend="auto"` runs where Triton's kernels cannot: each reason is said once, and an asked-for Triton is refused."""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from postlude.ops.kernels import capabilities as backend
from postlude.ops.linear_logprobs import problem

GPU = torch.device("cuda", 0)
Patch = Callable[[pytest.MonkeyPatch], None]


def missing(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(importlib.util, "find_spec", lambda name: None)


def old(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(backend, "version_of", lambda package: "3.1.0")


def broken(patch: pytest.MonkeyPatch) -> None:
    def version_of(package: str) -> str:
        raise RuntimeError("libtriton.so: undefined symbol: _ZN4llvm\nand a page more")

    patch.setattr(backend, "version_of", version_of)


def half_broken(patch: pytest.MonkeyPatch) -> None:
    """Its first file can be imported, and what kernels are written in cannot."""
    import_module = importlib.import_module

    def imported(name: str) -> Any:
        if name == "triton.language":
            raise AttributeError("module 'ast' has no attribute 'Num'")
        return import_module(name)

    patch.setattr(importlib, "import_module", imported)


def old_gpu(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(torch.version, "cuda", "12.8")
    patch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    patch.setattr(torch.cuda, "get_device_name", lambda device: "Tesla T4")


CASES: dict[Patch, str] = {
    missing: "triton is not installed",
    old: "triton 3.1.0 is older than 3.6",
    broken: r"triton cannot be imported (RuntimeError: libtriton.so: undefined symbol: _ZN4llvm)",
    half_broken: "triton cannot be imported (AttributeError: module 'ast' has no attribute 'Num')",
    old_gpu: "Tesla T4 is older than compute capability 8.0",
}


@pytest.fixture(autouse=True)
def forgotten() -> Iterator[None]:
    """Nothing is known, or said, from before."""
    said = (backend.why_no_triton, backend.why_unmeasured, backend._warn_once, problem._warn_of_promotion)
    for each in said:
        each.cache_clear()
    yield
    for each in said:
        each.cache_clear()


@pytest.mark.parametrize("case", CASES, ids=[case.__name__ for case in CASES])
def test_auto_falls_back_to_torch_with_one_warning(
    case: Patch, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    if case is not missing:
        pytest.importorskip("triton")
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    case(monkeypatch)
    with caplog.at_level(logging.INFO, logger=backend.log.name):
        for name in ("linear_logprobs", "rms_norm", "convolve"):
            assert not backend.use_kernel(name, "auto", GPU, torch.bfloat16)
        assert not backend.use_kernel("adamw_step", "auto", GPU, torch.float32)
    (said,) = caplog.records
    assert said.levelno == logging.WARNING
    assert said.getMessage() == f"operations run without Triton's kernels, and slower: {CASES[case]}"
    assert not backend.use_kernel("rms_norm", "torch", GPU, torch.bfloat16)
    with pytest.raises(RuntimeError) as refused:
        backend.use_kernel("rms_norm", "triton", GPU, torch.bfloat16)
    assert str(refused.value).startswith(f'backend="triton" cannot run: {CASES[case]}')


def test_a_triton_and_a_gpu_that_are_new_enough_are_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    assert backend.use_kernel("rms_norm", "auto", GPU, torch.bfloat16)


@pytest.mark.parametrize("name", [name for name, each in backend.MEASURED.items() if each.architectures])
def test_a_kernel_is_taken_by_itself_only_where_it_was_measured(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend, "version_of", lambda package: "3.6.0")
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA B200")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    assert backend.why_unmeasured(name, GPU) is None
    backend.why_unmeasured.cache_clear()
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (10, 0))
    why = backend.why_unmeasured(name, GPU)
    assert why is not None
    assert why.endswith("and this is NVIDIA B200; set POSTLUDE_TRY_UNMEASURED=1 to try them")
    backend.why_unmeasured.cache_clear()
    monkeypatch.setenv("POSTLUDE_TRY_UNMEASURED", "1")
    assert backend.why_unmeasured(name, GPU) is None
    assert backend.why_unmeasured(name, torch.device("cpu")) is None


def test_the_gated_delta_kernels_are_taken_with_the_triton_they_were_measured_with(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(backend, "version_of", lambda package: "3.7.1")
    why = backend.why_unmeasured("gated_delta", GPU)
    assert why == "its kernels were measured with triton 3.6, and this is 3.7.1"


def test_logits_that_are_promoted_to_fp32_on_a_gpu_are_warned_of_once(caplog: pytest.LogCaptureFixture) -> None:
    wide, half = torch.float32, torch.bfloat16
    with caplog.at_level(logging.WARNING, logger=problem.log.name):
        for given in ((half, half, half), (half, wide, half), (wide, wide, wide)):  # the second: by autocast
            problem._warn_of_promotion(*given, "cuda")
        problem._warn_of_promotion(wide, half, wide, "cpu")
        assert not caplog.records
        for _ in range(2):
            problem._warn_of_promotion(wide, half, wide, "cuda")
    (said,) = caplog.messages
    assert "hidden is torch.float32 and weight is torch.bfloat16, so logits are computed in fp32" in said
