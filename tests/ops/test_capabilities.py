"""`backend="auto"` falls back where Triton kernels cannot run, with one warning; `backend="triton"` is refused."""

import importlib
import logging
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from postlude.ops.kernels import capabilities as backend
from postlude.ops.linear_logprobs import resolved_call

GPU = torch.device("cuda", 0)
Patch = Callable[[pytest.MonkeyPatch], None]


def triton_missing(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(importlib.util, "find_spec", lambda name: None)


def triton_too_old(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(backend, "version_of", lambda package: "3.1.0")


def triton_import_error(patch: pytest.MonkeyPatch) -> None:
    def version_of(package: str) -> str:
        raise RuntimeError("libtriton.so: undefined symbol: _ZN4llvm\nand a page more")

    patch.setattr(backend, "version_of", version_of)


def triton_language_import_error(patch: pytest.MonkeyPatch) -> None:
    """triton can be imported, but triton.language cannot."""
    import_module = importlib.import_module

    def imported(name: str) -> Any:
        if name == "triton.language":
            raise AttributeError("module 'ast' has no attribute 'Num'")
        return import_module(name)

    patch.setattr(importlib, "import_module", imported)


def gpu_too_old(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(backend, "gpu_of", lambda device: backend.GPU("Tesla T4", (7, 5), 64 * backend.KIB))


def amd_gpu(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(torch.version, "hip", "7.0")


CASES: dict[Patch, str] = {
    triton_missing: "triton is not installed",
    triton_too_old: "triton 3.1.0 is older than 3.6",
    triton_import_error: r"triton cannot be imported (RuntimeError: libtriton.so: undefined symbol: _ZN4llvm)",
    triton_language_import_error: "triton cannot be imported (AttributeError: module 'ast' has no attribute 'Num')",
    gpu_too_old: "Tesla T4 is older than compute capability 8.0",
    amd_gpu: "this torch is built for AMD GPUs, on which Postlude was never run",
}


@pytest.fixture(autouse=True)
def clear_cached_reasons() -> Iterator[None]:
    """Clears cached reasons and logged warnings."""
    messages = (
        *(backend.why_no_triton, backend.why_unmeasured, backend._log_once, backend._warn_once),
        resolved_call._warn_of_promotion,
    )
    for message in messages:
        message.cache_clear()
    yield
    for message in messages:
        message.cache_clear()


@pytest.mark.parametrize("case", CASES, ids=[case.__name__ for case in CASES])
def test_auto_falls_back_to_torch_with_one_warning(
    case: Patch, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    if case is not triton_missing:
        pytest.importorskip("triton")
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    case(monkeypatch)
    with caplog.at_level(logging.INFO, logger=backend.log.name):
        for name in ("linear_logprobs", "rms_norm", "convolve"):
            assert not backend.use_kernel(name, "auto", GPU, torch.bfloat16)
        assert not backend.use_kernel("adamw_step", "auto", GPU, torch.float32)
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert record.getMessage() == f"operations run without Triton's kernels, and slower: {CASES[case]}"
    assert not backend.use_kernel("rms_norm", "torch", GPU, torch.bfloat16)
    with pytest.raises(RuntimeError) as refused:
        backend.use_kernel("rms_norm", "triton", GPU, torch.bfloat16)
    assert str(refused.value).startswith(f'backend="triton" cannot run: {CASES[case]}')


@pytest.mark.parametrize("name", backend.GPUS)
def test_auto_uses_triton_on_supported_gpus(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    monkeypatch.setattr(backend, "gpu_of", lambda device: backend.GPUS[name])
    assert backend.use_kernel("rms_norm", "auto", GPU, torch.bfloat16)
    assert backend.use_kernel("attention_softcap", "auto", GPU, torch.bfloat16)


@pytest.mark.parametrize("name", [name for name, kernel in backend.KERNELS.items() if kernel.measured])
def test_auto_uses_measured_kernels_only_on_measured_gpus(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend, "version_of", lambda package: "3.6.0")
    assert backend.why_unmeasured(name, backend.GPUS["H200"]) is None
    reason = backend.why_unmeasured(name, backend.GPUS["B200"])
    assert reason is not None
    assert reason.endswith("and this is B200; set POSTLUDE_TRY_UNMEASURED=1 to try them")
    backend.why_unmeasured.cache_clear()
    monkeypatch.setenv("POSTLUDE_TRY_UNMEASURED", "1")
    assert backend.why_unmeasured(name, backend.GPUS["B200"]) is None


def test_unsupported_kernel_is_not_tried_with_try_unmeasured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("POSTLUDE_TRY_UNMEASURED", "1")
    reason = backend.why_unmeasured("linear_logprobs_fused", backend.GPUS["A100"])
    assert reason == "its kernels need compute capability 9.0, and A100 has 8.0"


def test_gated_delta_kernels_need_the_measured_triton_version(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend, "version_of", lambda package: "3.7.1")
    reason = backend.why_unmeasured("gated_delta", backend.GPUS["H200"])
    assert reason == "its kernels were measured with triton 3.6, and this is 3.7.1"


def test_fallback_on_a_gpu_warns_once_with_the_cost(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    pytest.importorskip("triton")
    monkeypatch.setattr(backend, "gpu_of", lambda device: backend.GPUS["L40S"])
    with caplog.at_level(logging.INFO, logger=backend.log.name):
        for _ in range(2):
            assert not backend.use_kernel("ssd", "auto", GPU, torch.bfloat16, shared_memory=110_000)
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert record.getMessage() == (
        "ssd uses the torch backend: its kernels need 110000 bytes of shared memory, and L40S has 101376. "
        "The cost: torch takes 13 times as long on an H200"
    )
    assert backend.use_kernel("ssd", "auto", GPU, torch.bfloat16, shared_memory=101_376)


def test_empty_tensors_give_no_warning(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """For example those of an expert without tokens."""
    pytest.importorskip("triton")
    monkeypatch.setattr(backend, "gpu_of", lambda device: backend.GPUS["H200"])
    with caplog.at_level(logging.INFO, logger=backend.log.name):
        assert not backend.use_kernel("rms_norm", "auto", GPU, torch.bfloat16, unsupported_reason=backend.EMPTY)
        assert not caplog.records
        assert not backend.use_kernel("rms_norm", "auto", GPU, torch.bfloat16, unsupported_reason="it is too wide")
    assert len(caplog.records) == 1


def test_cpu_gives_no_warning(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger=backend.log.name):
        assert not backend.use_kernel("ssd", "auto", torch.device("cpu"), torch.bfloat16)
    assert not caplog.records


def test_logits_promoted_to_fp32_on_a_gpu_warn_once(caplog: pytest.LogCaptureFixture) -> None:
    wide, half = torch.float32, torch.bfloat16
    with caplog.at_level(logging.WARNING, logger=resolved_call.log.name):
        for dtypes in ((half, half, half), (half, wide, half), (wide, wide, wide)):  # the second: by autocast
            resolved_call._warn_of_promotion(*dtypes, "cuda")
        resolved_call._warn_of_promotion(wide, half, wide, "cpu")
        assert not caplog.records
        for _ in range(2):
            resolved_call._warn_of_promotion(wide, half, wide, "cuda")
    (message,) = caplog.messages
    assert "hidden is torch.float32 and weight is torch.bfloat16, so logits are computed in fp32" in message
