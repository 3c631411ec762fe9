"""`postlude env` says what a bug report needs: versions, devices, and of each kernel whether it is used and why not."""

from __future__ import annotations

import ast
import json
from pathlib import Path

import pytest
import torch

import postlude
from postlude.cli import main
from postlude.commands import env
from postlude.ops.kernels import capabilities
from postlude.ops.kernels.capabilities import KERNELS, MEASURED

FUNCTIONS = {"use_kernel", "_use_kernel", "why_unmeasured", "was_measured"}


def kernels_of_the_source() -> set[str]:
    """The names that the operations give to the functions of capabilities.py."""
    names = set()
    for path in (Path(postlude.__file__).parent).rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if (
                isinstance(node, ast.Call)
                and isinstance(node.func, ast.Name)
                and node.func.id in FUNCTIONS
                and node.args
            ):
                first = node.args[0]
                names |= {first.value} if isinstance(first, ast.Constant) and isinstance(first.value, str) else set()
    return names


def test_every_kernel_is_listed() -> None:
    assert set(KERNELS) == kernels_of_the_source()
    assert set(MEASURED) <= set(KERNELS)


def test_it_prints_the_same_as_text_and_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["env", "--json"]) == 0
    described = json.loads(capsys.readouterr().out)
    assert described["packages"]["torch"] == str(torch.__version__)
    assert set(described["kernels"]) == set(KERNELS)
    assert main(["env"]) == 0
    text = capsys.readouterr().out
    assert text.strip() == env.as_text(described)
    for name, version in described["packages"].items():
        assert f"{name:<13} {version}\n" in text if version else name in text


def test_no_secret_is_printed(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("POSTLUDE_API_KEY", "hunter2")
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    assert main(["env", "--json"]) == 0
    out = capsys.readouterr().out
    assert "hunter2" not in out
    assert json.loads(out)["variables"]["OMP_NUM_THREADS"] == "7"


def test_each_kernel_of_an_unmeasured_gpu_has_its_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    """An A100 with Triton 3.9: kernels measured on Hopper alone are not used there, the others are."""
    pytest.importorskip("triton")
    monkeypatch.delenv(capabilities.OVERRIDE, raising=False)
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "A100")
    capabilities.why_no_triton.cache_clear()
    capabilities.why_unmeasured.cache_clear()
    gpu = torch.device("cuda", 0)
    kernels = {name: capabilities.why_not(name, gpu, torch.bfloat16) for name in KERNELS}
    capabilities.why_no_triton.cache_clear()
    capabilities.why_unmeasured.cache_clear()
    unused = {name for name, reason in kernels.items() if reason}
    assert unused == {"attention", "linear_logprobs_fused", "gated_delta"}
    described = env.describe() | {"kernels": kernels, "gpus": [{"name": "A100", "capability": "8.0", "memory": 2**36}]}
    text = env.as_text(described)
    assert "gpu 0         A100, compute capability 8.0, 64.0 GiB" in text
    assert "rms_norm               triton RMSNorm" in text
    assert "attention              torch  attention on packed sequences\n" in text
    assert "and this is A100; set POSTLUDE_TRY_UNMEASURED=1 to try them" in text
