"""`postlude env` prints what a bug report needs: versions, devices, and for each kernel whether it is used."""

import ast
import json
from pathlib import Path

import pytest
import torch

import postlude
from postlude.cli import main
from postlude.commands import env
from postlude.ops.kernels import capabilities
from postlude.ops.kernels.capabilities import GPUS, KERNELS

FP8 = {"attend_pages_fp8", "block_fp8", "fp8_quantize"}
HOPPER = {
    "attention",
    "linear_logprobs_fused",
    "gated_delta",
    "grouped_wgrad",
    "decode_experts",
}  # kernels measured there alone
FUNCTIONS = {"use_kernel", "_use_kernel", "warn_of_fallback", "was_measured"}


def kernels_of_the_source() -> set[str]:
    """Returns the names that operations pass to the functions of capabilities.py."""
    names = set()
    for path in (Path(postlude.__file__).parent).rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if (
                isinstance(node, ast.Call)
                and isinstance(node.func, ast.Name)
                and node.func.id in FUNCTIONS
                and node.args
            ):
                constants = [part for part in ast.walk(node.args[0]) if isinstance(part, ast.Constant)]
                names |= {constant.value for constant in constants if isinstance(constant.value, str)}
    return names


def test_every_kernel_is_listed() -> None:
    assert set(KERNELS) == kernels_of_the_source()


def test_text_and_json_output_agree(capsys: pytest.CaptureFixture[str]) -> None:
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


@pytest.mark.parametrize(
    ("name", "unused"), [("H200", set()), ("B200", HOPPER), ("L40S", HOPPER), ("A100", HOPPER | FP8)]
)
def test_every_unused_kernel_of_a_named_gpu_has_a_reason(
    name: str, unused: set[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With Triton 3.6: an H200 uses every kernel, other GPUs those not measured on Hopper only."""
    pytest.importorskip("triton")
    monkeypatch.delenv(capabilities.OVERRIDE, raising=False)
    monkeypatch.setattr(capabilities, "version_of", lambda package: "3.6.0")
    capabilities.why_unmeasured.cache_clear()
    assert main(["env", "--json", "--gpu", name.lower()]) == 0
    described = json.loads(capsys.readouterr().out)
    capabilities.why_unmeasured.cache_clear()
    assert {kernel for kernel, reason in described["kernels"].items() if reason} == unused
    text = env.as_text(described)
    assert f"kernels for torch.bfloat16 on {name}, compute capability" in text
    assert "rms_norm               triton RMSNorm" in text
    if unused:
        assert "attention              torch  attention on packed sequences\n" in text
        assert f"and this is {name}; set POSTLUDE_TRY_UNMEASURED=1 to try them\n" in text
        assert "torch takes 5.5 times as long on an H200" in text
        fused = described["kernels"]["linear_logprobs_fused"]
        assert GPUS[name].tma or fused == f"its kernels need compute capability 9.0, and {name} has " + (
            "8.0" if name == "A100" else "8.9"
        )


def test_unknown_gpu_error_lists_the_known_ones(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["env", "--gpu", "V100"]) != 0
    assert "GPU 'V100' is not in the table of kernels; it has A100, L40S" in capsys.readouterr().err
