"""flash-linear-attention as a backend: when it is selected, its refusals, and that our arguments match its own."""

import logging
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from postlude import Batch, Engine, LanguageModel, Layout, OutputInputs, pack
from postlude.ops import fla
from postlude.ops.gated_delta import gated_delta
from postlude.ops.packing import Packing
from postlude.ops.ssd import ssd
from tests.meshes import mesh
from tests.model.small import sequences, small_config
from tests.ops import test_gated_delta, test_ssd

LENGTHS = (9, 1, 14)
MISSING = r"backend=\"fla\" cannot run: flash-linear-attention is not installed \(pip install 'postlude\[fla\]'\)\."


@pytest.fixture
def fla_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fla, "installed", lambda: False)


@pytest.fixture
def fake_fla(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fake package with its functions' contract, computed token by token on any device."""
    monkeypatch.setattr(fla, "installed", lambda: True)
    monkeypatch.setattr(fla, "check", lambda *tensors, width: None)
    for name, function in (("simple_gla", chunk_simple_gla), ("gated_delta_rule", chunk_gated_delta_rule)):
        module = ModuleType(f"fla.ops.{name}")
        setattr(module, function.__name__, function)
        monkeypatch.setitem(sys.modules, module.__name__, module)


def chunk_simple_gla(q, k, v, *, g, scale, output_final_state, cu_seqlens, cu_seqlens_cpu) -> tuple[Tensor, Any]:
    """All [1, T, H, ...]: S = e^g S + k ⊗ v, o = scale · q S; states [N, H, K, V]."""
    assert torch.equal(cu_seqlens.cpu(), cu_seqlens_cpu)
    outputs, states = [], []
    for start, stop in Packing(tuple(cu_seqlens.diff().tolist()), cu_seqlens).slices():
        state = torch.zeros(q.shape[2], q.shape[3], v.shape[3])
        for t in range(start, stop):
            state = g[0, t].exp()[:, None, None] * state + k[0, t][..., None] * v[0, t][:, None]
            outputs.append(scale * (q[0, t][..., None] * state).sum(1))
        states.append(state)
    return torch.stack(outputs)[None], torch.stack(states) if output_final_state else None


def chunk_gated_delta_rule(
    q, k, v, *, g, beta, scale, output_final_state, use_qk_l2norm_in_kernel, cu_seqlens, cu_seqlens_cpu
) -> tuple[Tensor, Any]:
    """q and k [1, T, H, K], v [1, T, HV, V]; states [N, HV, K, V]."""
    assert torch.equal(cu_seqlens.cpu(), cu_seqlens_cpu)
    if use_qk_l2norm_in_kernel:
        q, k = (tensor / (tensor.square().sum(-1, keepdim=True) + 1e-6).sqrt() for tensor in (q, k))
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    q, k = (tensor[0].repeat_interleave(v.shape[2] // k.shape[2], 1) for tensor in (q, k))
    outputs, states = [], []
    for start, stop in Packing(tuple(cu_seqlens.diff().tolist()), cu_seqlens).slices():
        state = torch.zeros(v.shape[2], k.shape[2], v.shape[3])
        for t in range(start, stop):
            state = g[0, t].exp()[:, None, None] * state
            written = beta[0, t][:, None] * (v[0, t] - (k[t][..., None] * state).sum(1))
            state = state + k[t][..., None] * written[:, None]
            outputs.append(scale * (q[t][..., None] * state).sum(1))
        states.append(state)
    return torch.stack(outputs)[None], torch.stack(states) if output_final_state else None


@pytest.mark.usefixtures("fake_fla")
def test_mamba_through_fla_interface_equals_recurrence() -> None:
    test_ssd.assert_alike(test_ssd.inputs(sum(LENGTHS)), LENGTHS, chunk=128, backend="fla")


@pytest.mark.usefixtures("fake_fla")
def test_gated_delta_through_fla_interface_equals_recurrence() -> None:
    operands = test_gated_delta.inputs(sum(LENGTHS), 4, 2, 6, 5, seed=0, decay=0.1)
    test_gated_delta.check(operands, list(LENGTHS), 64, test_gated_delta.FP32, backend="fla")
    packing = Packing.from_lengths(LENGTHS)
    options = {"scale": 0.7, "normalise": False}
    outputs, states = gated_delta(*operands, packing, **options, backend="fla")
    assert states is None
    test_gated_delta.assert_equal(outputs, gated_delta(*operands, packing, **options)[0])


@pytest.mark.usefixtures("fake_fla")
def test_empty_batch() -> None:
    nothing = Packing.from_lengths([])
    assert ssd(*test_ssd.inputs(0), nothing, backend="fla")[0].shape == (0, 4, 3)
    assert gated_delta(*test_gated_delta.inputs(0, 4, 2, 6, 5, seed=0), nothing, backend="fla")[0].shape == (0, 4, 5)


@pytest.mark.parametrize(
    ("fla_version", "triton", "capability", "gradient", "expected"),
    [
        ("0.6.0", "3.6.0", (9, 0), False, None),
        ("0.6.0", "3.7.1", (9, 0), True, None),
        ("0.6.2", "3.3.1", (9, 0), True, None),
        ("0.6.0", "3.6.0", (8, 0), True, None),
        (
            "0.6.0",
            "3.4.0",
            (9, 0),
            True,
            "with Triton 3.4.0 to 3.7.0, which compile it wrongly, and this is Triton 3.4.0",
        ),
        ("0.6.0", "3.7.0+git1", (9, 0), True, "flash-linear-attention 0.6.0 refuses a backward on Hopper"),
        ("0.5.1", "3.7.1", (9, 0), False, "was checked in its releases 0.6, and this is 0.5.1"),
        ("0.60.0", "3.7.1", (9, 0), False, "and this is 0.60.0"),
    ],
)
def test_only_verified_versions_are_accepted(
    fla_version: str, triton: str, capability: tuple[int, int], gradient: bool, expected: str | None
) -> None:
    refusal = fla._refusal(fla_version, triton, capability, gradient)
    assert (refusal is None) if expected is None else (refusal is not None and expected in refusal)


def test_unsupported_inputs_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fla, "installed", lambda: True)
    half = torch.zeros(1, dtype=torch.bfloat16)
    assert fla.refusal(half, half, width=8, gradient=True) == "the tensors are on cpu, not cuda"
    assert fla.refusal(half, width=257, gradient=True) == (
        "flash-linear-attention has room for keys 256 wide, and these are 257"
    )
    for tensors in ((half, half.half()), (half.float(),)):
        assert "is for one half precision, and these are" in (fla.refusal(*tensors, width=8, gradient=True) or "")


@pytest.mark.usefixtures("fla_missing")
def test_fla_backend_without_the_package_gives_clear_error() -> None:
    packing = Packing.from_lengths(LENGTHS)
    with pytest.raises(RuntimeError, match=MISSING):
        ssd(*test_ssd.inputs(sum(LENGTHS)), packing, backend="fla")
    with pytest.raises(RuntimeError, match=MISSING):
        gated_delta(*test_gated_delta.inputs(sum(LENGTHS), 4, 2, 6, 5, seed=0), packing, backend="fla")


@pytest.mark.usefixtures("fla_missing")
@pytest.mark.parametrize("pattern", ["M", "G", "*/M"])
def test_model_passes_the_backend_to_its_blocks(pattern: str) -> None:
    (microbatch,) = pack(sequences(5, 1, 8), budget=64, depths=1)

    def run(scan_backend: Any) -> Tensor:
        return LanguageModel(small_config(pattern), scan_backend=scan_backend)(microbatch, output_processor=last_hidden)

    assert torch.equal(run("torch"), run("auto"))
    with pytest.raises(RuntimeError, match=MISSING):
        run("fla")


def last_hidden(inputs: OutputInputs, _: Any) -> Tensor:
    """Returns the hidden states of the last depth."""
    depths = () if inputs.mtp is None else inputs.mtp(inputs, stop_trunk=False, stop_head=False)
    return [inputs, *depths][-1].hidden


@pytest.mark.thorough
def test_engine_passes_the_backend_to_its_model(ranks: Any) -> None:
    (message,) = ranks(1, refused_by_an_engine)
    assert message.startswith('backend="fla" cannot run: ')


def refused_by_an_engine(group: Any) -> str:
    engine = Engine(small_config("M"), mesh=mesh(Layout()), budget=32, scan_backend="fla")
    with pytest.raises(RuntimeError) as failed:
        engine.logprobs(Batch(sequences(5, 3)))
    return str(failed.value)


def refuse_gradients(*tensors: Any, width: int, gradient: bool) -> str | None:
    return "it is wrong here" if gradient else None


def test_auto_uses_fla_instead_of_torch_and_logs_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, fake_fla: None
) -> None:
    on_gpu = SimpleNamespace(is_cuda=True)
    monkeypatch.setattr(fla, "version_of", lambda package: "0.6.0")
    with caplog.at_level(logging.INFO, logger="postlude.ops.fla"):
        monkeypatch.setattr(fla, "refusal", refuse_gradients)
        assert not any(fla.auto_selects("one", "these were not checked", on_gpu, width=8) for _ in range(2))
        monkeypatch.setattr(fla, "refusal", lambda *tensors, width, gradient: None)
        assert all(fla.auto_selects("another", "these were not checked", on_gpu, width=8) for _ in range(2))
    assert [record.getMessage() for record in caplog.records] == [
        "one cannot use flash-linear-attention in place of its own kernels: it is wrong here",
        "another uses flash-linear-attention 0.6.0 instead of its own kernels: these were not checked",
    ]
    assert not fla.auto_selects("one", "these were not checked", torch.zeros(1), width=8)


@pytest.mark.parametrize(("slower_reason", "uses_fla"), [("these were not checked", True), (None, False)])
def test_auto_considers_fla_only_where_own_kernels_are_unmeasured(
    monkeypatch: pytest.MonkeyPatch, fake_fla: None, slower_reason: str | None, uses_fla: bool
) -> None:
    widths: list[str] = []
    monkeypatch.setattr("postlude.ops.gated_delta._why_slower", lambda *_: slower_reason)
    monkeypatch.setattr(fla, "auto_selects", lambda name, own_width, *tensors, width: widths.append(own_width) is None)
    monkeypatch.setattr(fla, "gated_delta", lambda *_: ("fla", None))
    operands, packing = test_gated_delta.inputs(5, 2, 1, 4, 4, seed=0), Packing.from_lengths([5])
    assert (gated_delta(*operands, packing)[0] == "fla") is uses_fla
    assert widths == [slower_reason] * uses_fla
    assert isinstance(gated_delta(*operands, packing, backend="torch")[0], Tensor)


@pytest.mark.gpu
class TestOnTheGpu:
    """bf16 against torch in float64 on the same values, with the limit that our own kernels have."""

    LIMIT = 2**-7

    @pytest.fixture(autouse=True)
    def installed(self) -> None:
        pytest.importorskip("fla")

    def compare(self, scan: Any, operands: list[Tensor], halved: slice, names: tuple[str, ...]) -> None:
        operands = [tensor.detach() for tensor in operands]
        operands[halved] = [tensor.bfloat16() for tensor in operands[halved]]
        packing = Packing.from_lengths((700, 65, 1, 64, 130, 2), "cuda")
        backward = fla.refusal(operands[0], width=128, gradient=True) is None
        results = []
        for backend, dtype in (("fla", None), ("torch", torch.float64)):
            leaves = [tensor.to(dtype or tensor.dtype).clone().requires_grad_(backward) for tensor in operands]
            outputs = scan(*leaves, packing, last_states=True, backend=backend)
            if backward:
                generator = torch.Generator().manual_seed(1)
                upstream = [torch.randn(tensor.shape, generator=generator).to(tensor) for tensor in outputs]
                outputs = *outputs, *torch.autograd.grad(outputs, leaves, upstream)
            results.append(outputs)
        for name, actual, want in zip(("outputs", "states", *names), *results, strict=False):
            off = float((actual.double() - want).norm() / want.norm())
            assert off <= self.LIMIT, f"{name}: off by {off:.1e}"

    def test_mamba(self) -> None:
        operands = test_ssd.inputs(962, 16, 64, 2, 128, device="cuda")
        with torch.no_grad():
            operands[1].clamp_(max=1.0)
        order = [operands[0], operands[3], operands[4], operands[1], operands[2], operands[5]]

        def scan(x, B, C, dt, A, D, packing: Packing, **options: Any) -> Any:
            return ssd(x, dt, A, B, C, D, packing, **options)

        self.compare(scan, order, slice(0, 3), ("x", "B", "C", "dt", "A", "D"))

    def test_gated_delta_rule(self) -> None:
        operands = test_gated_delta.inputs(962, 8, 4, 128, 128, seed=0, decay=0.1, device="cuda")

        def scan(*arguments: Any, **options: Any) -> Any:
            return gated_delta(*arguments, normalise=True, **options)

        self.compare(scan, operands, slice(0, 3), test_gated_delta.NAMES)

    def test_unsupported_backward_is_refused_before_the_forward(self) -> None:
        operands = [tensor.bfloat16() for tensor in test_gated_delta.inputs(5, 2, 1, 16, 16, seed=0, device="cuda")]
        if fla.refusal(*operands[:3], width=16, gradient=True) is None:
            pytest.skip("it is right here")
        with pytest.raises(RuntimeError, match="refuses a backward on Hopper"):
            gated_delta(*operands, Packing.from_lengths([5], "cuda"), backend="fla")
